"""Image–caption sets in folders: Karpathy's JSON, lists of ``{image, caption}``, and ``captions.jsonl``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from clip_linear.errors import UserError
from clip_linear_eval.datasets.base import Source

_CAPTION_FILES = ("captions.jsonl", "captions.json", "dataset_coco.json", "dataset_flickr30k.json", "dataset.json")


def find_captions(root: Path) -> Path | None:
    """The caption file of a folder of images, or None."""
    return next((root / name for name in _CAPTION_FILES if (root / name).is_file()), None)


def read_captions(path: Path, split: str = "test", images: Path | None = None) -> Source:
    """Images with captions from JSON. Paths are relative to ``images`` or to the file's folder.

    Understood: Karpathy's files (``{"images": [{"filepath", "filename", "split", "sentences": [{"raw"}]}]}``), lists
    of ``{"image", "caption" | "captions"}`` as JSON or JSON lines. Raises UserError.
    """
    folder = images or path.parent
    files: list[str] = []
    captions: list[list[str]] = []
    where: dict[str, int] = {}
    for entry in _entries(path, split):
        name = entry.get("filename") or entry.get("image") or entry.get("file_name")
        sentences = entry.get("sentences") or entry.get("captions") or entry.get("caption")
        if not name or not sentences:
            raise UserError(f"{str(path)!r}: an entry lacks an image or its captions: {str(entry)[:80]}")
        name = str(Path(entry.get("filepath") or "") / str(name))
        texts = [sentences] if isinstance(sentences, str) else sentences
        texts = [str(t["raw"]) if isinstance(t, dict) else str(t) for t in texts]
        if name in where:  # a list of pairs names an image once per caption
            captions[where[name]] += texts
        else:
            where[name] = len(files)
            files.append(name)
            captions.append(texts)
    if not files:
        raise UserError(f"{str(path)!r} has no images of split {split!r}; give --split")
    return Source(
        name=(path.parent if path.name in _CAPTION_FILES else path.with_suffix("")).resolve().name,
        root=path,
        files=files,
        read=lambda i: _find(folder, files[i]).read_bytes(),
        captions=captions,
    )


def _find(folder: Path, name: str) -> Path:
    """Karpathy's COCO entries name val2014/…; archives are often unpacked without that folder, or under images/."""
    places = (folder / name, folder / Path(name).name, folder / "images" / Path(name).name)
    return next((p for p in places if p.is_file()), places[0])


def _entries(path: Path, split: str) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    try:
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"captions {str(path)!r} are not valid JSON ({error})") from None
    if isinstance(value, dict) and isinstance(value.get("images"), list):
        return [e for e in value["images"] if e.get("split", split) == split]
    if isinstance(value, list):
        return value
    raise UserError(f"captions {str(path)!r}: expected a list, or Karpathy's {{'images': […]}}")
