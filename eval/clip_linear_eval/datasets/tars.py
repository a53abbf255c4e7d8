"""Tar files: CLIP_benchmark's webdataset layout, LAION shards with ``.cls``, and tars of class folders."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from clip_linear.errors import UserError
from clip_linear_eval.datasets.base import Source, is_image, own_texts

if TYPE_CHECKING:
    from clip_linear.data.tarindex import Member


@dataclass
class _Found:
    """An image inside a tar, with the text of its ``.cls`` and ``.txt`` and its folder."""

    file: str
    read: Callable[[], bytes]
    size: int
    label: str | None
    captions: list[str]
    folder: str


def is_tar(path: Path) -> bool:
    """Whether a file's name says that it is a tar, compressed or not."""
    return path.name.endswith((".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz"))


def find_tars(root: Path, split: str) -> tuple[list[Path], Path]:
    """The tars of a set, in numeric order, and the folder of its texts. ``root``: a tar, a folder of tars, or
    CLIP_benchmark's layout with a folder per split. Raises UserError."""
    if root.is_file():
        return [root], _with_texts(root.parent)
    for folder in (root, root / split):
        found = sorted(filter(is_tar, folder.iterdir()), key=_by_number) if folder.is_dir() else []
        if found:
            return found, _with_texts(folder)
    splits = sorted({p.parent.name for p in root.glob("*/*.tar")})
    if splits:
        raise UserError(f"{str(root)!r} has no split {split!r} but {', '.join(splits)}; give --split")
    raise UserError(f"no tar files in {str(root)!r} or {str(root / split)!r}; give a tar or a folder of tars")


def _with_texts(folder: Path) -> Path:
    """The folder of the tars, or the one above it where the names lie there (test/0.tar beside classnames.txt)."""
    texts = ("classnames.txt", "dataset_type.txt")
    return next((p for p in (folder, folder.resolve().parent) if any((p / t).is_file() for t in texts)), folder)


def _by_number(path: Path) -> tuple[int, str]:
    stem = path.name.split(".")[0]
    return (int(stem) if stem.isdigit() else -1, path.name)


def read_tars(root: Path, split: str = "test", captions_first: bool = False) -> Source:
    """List the samples of tars: targets from ``.cls`` or from the folder of each image, captions from ``.txt``.

    Captions win over labels where the set's ``dataset_type.txt`` says retrieval or ``captions_first`` is given. Members
    are found by their headers, with recovery behind a damage. Raises UserError where there are no images.
    """
    tars, texts = find_tars(root, split)
    faults: list[dict[str, str]] = []
    found = [sample for tar in tars for sample in _samples(tar, faults)]
    if not found:
        why = f" ({faults[0]['file']}: {faults[0]['reason']})" if faults else ""
        raise UserError(f"no images in {', '.join(map(str, tars[:3]))}{why}; expected KEY.jpg with KEY.cls or KEY.txt")
    kind = texts / "dataset_type.txt"
    captions_first |= kind.is_file() and kind.read_text(encoding="utf-8").strip().lower() == "retrieval"
    labelled, captioned = any(f.label for f in found), any(f.captions for f in found)
    take_labels = labelled and not (captions_first and captioned)
    if take_labels or captioned:
        wanted = "cls" if take_labels else "txt"
        for sample in found:
            if not (sample.label if take_labels else sample.captions):
                faults.append({"file": sample.file, "reason": f"no .{wanted} beside it, or an empty one"})
        found = [sample for sample in found if (sample.label if take_labels else sample.captions)]
    by_folder = not take_labels and not captioned and all(sample.folder for sample in found)
    names, templates = own_texts(texts)
    return Source(
        name=_name(root, texts),
        root=root,
        files=[sample.file for sample in found],
        read=lambda i: found[i].read(),
        targets=[str(s.folder if by_folder else s.label) for s in found] if take_labels or by_folder else None,
        captions=[s.captions for s in found] if captioned and not take_labels else None,
        names=names,
        templates=templates,
        sizes=[sample.size for sample in found],
        faults=faults,
    )


def _name(root: Path, texts: Path) -> str:
    """The folder's name; for a single tar its own, unless that is only a number."""
    stem = root.name.split(".")[0]
    return root.resolve().name if root.is_dir() else texts.resolve().name if stem.isdigit() else stem


def _samples(tar: Path, faults: list[dict[str, str]]) -> list[_Found]:
    from clip_linear.data.fetch import Store
    from clip_linear.data.groups import group_members
    from clip_linear.data.remote import MissingShardError
    from clip_linear.data.tarindex import index_tar

    try:
        file, damage = Store().open(str(tar))
    except MissingShardError as error:
        faults.append({"file": tar.name, "reason": f"missing_shard: {error}"})
        return []
    index = index_tar(file)
    if damage:
        index.note("corrupt_shard", 0, damage)
    faults += [{"file": tar.name, "reason": f"{reason}: {text}"} for reason, (_, text) in index.faults.items()]
    grouped = group_members(index, file, every_role=True).groups
    read = _reader(file)
    if not any(member.name.lower().endswith((".cls", ".txt")) for member in index.members):
        images = [m for m in index.members if is_image(m.name) and not m.is_cut]
        return [_found(tar, m.name, m, read, None, None, os.path.dirname(m.name)) for m in images]
    out = []
    for group in grouped:
        name = f"{group.folder}/{group.key}".lstrip("/")
        label, text = group.members.get("cls"), group.members.get("txt")
        if group.duplicates:
            faults.append({"file": f"{tar.name}/{name}", "reason": "duplicate_key: the key comes again in this tar"})
        if group.image is not None:
            out.append(_found(tar, group.image.name, group.image, read, label, text, group.folder))
        elif label is not None or text is not None:
            faults.append({"file": f"{tar.name}/{name}", "reason": "missing_image: a label or caption stands alone"})
    return out


def _found(
    tar: Path,
    name: str,
    image: Member,
    read: Callable[[Member], bytes],
    label: Member | None,
    text: Member | None,
    folder: str,
) -> _Found:
    captions = _text(read(text)).splitlines() if text is not None else []
    return _Found(
        file=f"{tar.name}/{name}",
        read=lambda: read(image),
        size=image.size,
        label=_text(read(label)) if label is not None else None,
        captions=[line for line in captions if line.strip()],
        folder=os.path.basename(folder),
    )


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace").strip()


def _reader(file: BinaryIO) -> Callable[[Member], bytes]:
    """Read members from any thread. A local tar is opened anew each time, so that thousands of them can be listed; an
    unpacked or fetched one has no name and stays open."""
    path = file.name

    def read(member: Member) -> bytes:
        if isinstance(path, str):
            with open(path, "rb") as again:
                again.seek(member.start)
                return again.read(member.size)
        return os.pread(file.fileno(), member.size, member.start)

    if isinstance(path, str):
        file.close()
    return read
