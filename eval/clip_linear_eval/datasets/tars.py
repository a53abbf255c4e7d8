"""Tar files: CLIP_benchmark's webdataset layout, LAION shards with ``.cls``, and tars of class folders."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clip_linear.errors import UserError
from clip_linear_eval.datasets.base import Source, is_image, own_texts

_COMPRESSED: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}


@dataclass(frozen=True)
class Member:
    """Where one file lies inside an uncompressed tar."""

    path: str
    name: str
    offset: int
    size: int

    def read(self) -> bytes:
        """The member's bytes. Raises OSError where the tar ends inside it."""
        with open(self.path, "rb") as f:
            f.seek(self.offset)
            data = f.read(self.size)
        if len(data) != self.size:
            raise OSError(f"the tar ends {self.size - len(data)} bytes early")
        return data


def is_tar(path: Path) -> bool:
    """Whether a file's name says that it is a tar, compressed or not."""
    return path.name.endswith((".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz"))


def find_tars(root: Path, split: str) -> tuple[list[Path], Path]:
    """The tars of a set, in numeric order, and the folder of its texts. ``root``: a tar, a folder of tars, or
    CLIP_benchmark's layout with a folder per split. Raises UserError."""
    if root.is_file():
        return [root], root.parent
    for folder in (root, root / split):
        found = sorted(filter(is_tar, folder.iterdir()), key=_by_number) if folder.is_dir() else []
        if found:
            texts = root.parent if folder == root and not (root / "classnames.txt").is_file() else root
            return found, texts
    splits = sorted({p.parent.name for p in root.glob("*/*.tar")})
    if splits:
        raise UserError(f"{str(root)!r} has no split {split!r} but {', '.join(splits)}; give --split")
    raise UserError(f"no tar files in {str(root)!r} or {str(root / split)!r}; give a tar or a folder of tars")


def _by_number(path: Path) -> tuple[int, str]:
    stem = path.name.split(".")[0]
    return (int(stem) if stem.isdigit() else -1, path.name)


def read_tars(root: Path, split: str = "test") -> Source:
    """List the samples of tars: targets from ``.cls`` or from the folder of each image, captions from ``.txt``.

    Members are found by their headers alone; a compressed tar is first unpacked to a temporary file. Raises UserError
    where there are no images or where labels are missing throughout.
    """
    tars, texts = find_tars(root, split)
    keep = tempfile.TemporaryDirectory(prefix="clip_linear_eval_")  # lives as long as the reader below
    faults: list[dict[str, str]] = []
    images: list[Member] = []
    labels: list[Member | str | None] = []
    captions: list[Member | None] = []
    for tar in tars:
        for key, fields in _groups(tar, Path(keep.name), faults).items():
            image = next((fields[e] for e in fields if is_image("x." + e)), None)
            if image is None:
                if "cls" in fields or "txt" in fields:
                    faults.append({"file": f"{tar.name}/{key}", "reason": "no image beside its label or caption"})
                continue
            images.append(image)
            labels.append(fields.get("cls") or os.path.dirname(image.name) or None)
            captions.append(fields.get("txt"))
    if not images:
        raise UserError(f"no images in {', '.join(str(t) for t in tars[:3])}; expected KEY.jpg with KEY.cls or KEY.txt")
    names, templates = own_texts(texts)
    shown = [f"{os.path.basename(m.path)}/{m.name}" for m in images]
    source = Source(
        name=(root if root.is_dir() else Path(root.name.split(".")[0])).resolve().name,
        root=root,
        files=shown,
        read=lambda i: images[i].read() if keep else b"",
        names=names,
        templates=templates,
        sizes=[m.size for m in images],
        faults=faults,
    )
    with_class = [isinstance(label, Member) for label in labels]
    if any(with_class):
        return _select(source, [_text(label) if isinstance(label, Member) else None for label in labels], "cls")
    if any(captions):
        return _select(source, [_text(c).splitlines() if c else None for c in captions], "txt")
    if all(labels):
        source.targets = [os.path.basename(str(label)) for label in labels]
    return source


def _select(source: Source, values: list, kind: str) -> Source:
    """Keep the samples that have a value; the others become faults."""
    keep = [i for i, value in enumerate(values) if value]
    gone = [i for i, value in enumerate(values) if not value]
    files, read, sizes = source.files, source.read, source.sizes
    source.faults += [{"file": files[i], "reason": f"no .{kind} beside it, or an empty one"} for i in gone]
    source.files = [files[i] for i in keep]
    source.read = lambda i: read(keep[i])
    source.sizes = [sizes[i] for i in keep] if sizes is not None else None
    if kind == "cls":
        source.targets = [values[i] for i in keep]
    else:
        source.captions = [[line for line in values[i] if line.strip()] for i in keep]
    return source


def _text(member: Member) -> str:
    return member.read().decode("utf-8", errors="replace").strip()


def _groups(tar: Path, temporary: Path, faults: list[dict[str, str]]) -> dict[str, dict[str, Member]]:
    """Members of a tar by key (the name up to the first dot of its last part), wherever in the tar they lie."""
    groups: dict[str, dict[str, Member]] = {}
    for member in _members(tar, temporary, faults):
        folder, base = os.path.split(member.name)
        stem, _, extension = base.partition(".")
        fields = groups.setdefault(os.path.join(folder, stem), {})
        if fields.setdefault(extension.lower(), member) is not member:
            faults.append({"file": f"{tar.name}/{member.name}", "reason": "the key occurs twice in the tar"})
    return groups


def _members(tar: Path, temporary: Path, faults: list[dict[str, str]]) -> Iterator[Member]:
    try:
        path = _plain(tar, temporary)
        with tarfile.open(path, "r:") as opened:
            for info in opened:
                if info.isfile() and not os.path.basename(info.name).startswith("."):
                    yield Member(str(path), info.name, info.offset_data, info.size)
    except (tarfile.TarError, OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        faults.append({"file": tar.name, "reason": f"damaged tar: {error}"})


def _plain(tar: Path, temporary: Path) -> Path:
    """The tar itself, or its unpacked copy where it is compressed."""
    with open(tar, "rb") as f:
        magic = f.read(6)
    opener = next((o for start, o in _COMPRESSED.items() if magic.startswith(start)), None)
    if opener is None:
        return tar
    with opener(tar, "rb") as packed, open(temporary / tar.name, "wb") as out:
        shutil.copyfileobj(packed, out)
    return temporary / tar.name
