"""Evaluation sets of the team that is never trained on, as image folders and in CLIP_benchmark's webdataset layout."""

from __future__ import annotations

import json
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clip_linear.emoji.concepts import EVAL_TEAM, TEMPLATES, Concept
from clip_linear.emoji.pairs import add_member
from clip_linear.emoji.tiles import Tiles


def write_sets(concepts: list[Concept], seen: set[str], tiles: Tiles, out: Path) -> dict[str, Any]:
    """Write the five sets below ``out``; ``seen``: hexcodes that some training pair shows. Returns their counts."""
    shown = [c for c in concepts if EVAL_TEAM in c.tiles]

    def name(concept: Concept) -> str:
        return concept.name

    def base(concept: Concept) -> str:
        return concept.base

    objects = [c for c in shown if c.hexcode in seen and not c.is_flag and not c.tone]
    flags = [c for c in shown if c.hexcode in seen and c.is_flag]
    people = [c for c in shown if c.hexcode in seen and c.group == "people body"]
    unseen = [c for c in shown if c.is_unseen]
    return {
        "twemoji_objects": _write_classes("twemoji_objects", objects, name, tiles, out),
        "twemoji_flags": _write_classes("twemoji_flags", flags, name, tiles, out),
        "twemoji_people": _write_classes("twemoji_people", people, base, tiles, out),  # skin tones pooled: unbalanced
        "twemoji_unseen": _write_classes("twemoji_unseen", unseen, name, tiles, out),
        "twemoji_retrieval": _write_retrieval("twemoji_retrieval", objects, tiles, out),
    }


def _write_classes(
    name: str, concepts: list[Concept], label: Callable[[Concept], str], tiles: Tiles, out: Path
) -> dict[str, Any]:
    """A zero-shot set: class folders 0000, 0001, … and ``.cls``/``.jpg`` samples; names and templates beside both."""
    classes = {text: number for number, text in enumerate(dict.fromkeys(label(c) for c in concepts))}
    folder, wds = out / "imagefolder" / name, out / "wds" / f"wds_{name}"
    for number in classes.values():
        (folder / f"{number:04d}").mkdir(parents=True)
    with _open_test_shard(wds) as tar:
        for place, concept in enumerate(concepts):
            jpeg, number = tiles.jpeg(EVAL_TEAM, concept.tiles[EVAL_TEAM]), classes[label(concept)]
            (folder / f"{number:04d}" / f"{place:06d}.jpg").write_bytes(jpeg)
            add_member(tar, f"s{place:07d}.cls", str(number).encode())
            add_member(tar, f"s{place:07d}.jpg", jpeg)
    for layout in (folder, wds):
        (layout / "classnames.txt").write_text("\n".join(classes), encoding="utf-8")
        (layout / "zeroshot_classification_templates.txt").write_text("\n".join(TEMPLATES), encoding="utf-8")
    return {"images": len(concepts), "classes": len(classes)}


def _write_retrieval(name: str, concepts: list[Concept], tiles: Tiles, out: Path) -> dict[str, Any]:
    """A retrieval set, up to five captions an image: images + captions.jsonl; ``.jpg`` + ``.txt``, a caption a line."""
    folder, wds = out / "imagefolder" / name, out / "wds" / f"wds_{name}"
    (folder / "images").mkdir(parents=True)
    lines, total = [], 0
    with _open_test_shard(wds) as tar:
        for place, concept in enumerate(concepts):
            rng = random.Random("ret" + concept.hexcode)
            captions = list(dict.fromkeys([concept.name, *(concept.caption(rng) for _ in range(8))]))[:5]
            jpeg, image = tiles.jpeg(EVAL_TEAM, concept.tiles[EVAL_TEAM]), f"images/{place:06d}.jpg"
            (folder / image).write_bytes(jpeg)
            lines.append(json.dumps({"image": image, "captions": captions}, ensure_ascii=False) + "\n")
            add_member(tar, f"s{place:07d}.jpg", jpeg)
            add_member(tar, f"s{place:07d}.txt", "\n".join(captions).encode())
            total += len(captions)
    (folder / "captions.jsonl").write_text("".join(lines), encoding="utf-8")
    (wds / "dataset_type.txt").write_text("retrieval", encoding="utf-8")
    return {"images": len(concepts), "captions": total}


def _open_test_shard(wds: Path) -> tarfile.TarFile:
    """CLIP_benchmark wants test/0.tar and the number of shards beside it."""
    (wds / "test").mkdir(parents=True)
    (wds / "test" / "nshards.txt").write_text("1", encoding="utf-8")
    return tarfile.open(wds / "test" / "0.tar", "w", format=tarfile.USTAR_FORMAT)
