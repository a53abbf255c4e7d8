"""Flat sets (images in one folder, labels in a file), ReaL labels, and ObjectNet's own mapping files."""

from __future__ import annotations

import csv
import json
import os
import re
from pathlib import Path

from clip_linear.errors import UserError
from clip_linear_eval.classnames import NameList
from clip_linear_eval.datasets.base import Source, is_image, own_texts

# LOC_val_solution.csv is Kaggle's (ImageId, PredictionString "n01440764 x y x y …"); val.txt is Caffe's (file, index).
_KAGGLE = "LOC_val_solution.csv"
LABEL_FILES = (_KAGGLE, "labels.csv", "labels.txt", "labels.tsv", "val.txt")
_BORDER = 2  # ObjectNet's images carry a red frame; its own loader crops two pixels on each side


def find_labels(root: Path) -> Path | None:
    """The label file of a flat set: in it or beside it; Kaggle's also up to four levels above, where Kaggle has it."""
    above = list(root.resolve().parents)
    near = [folder / name for folder in (root, *above[:1]) for name in LABEL_FILES]
    return next((p for p in [*near, *(folder / _KAGGLE for folder in above[1:4])] if p.is_file()), None)


def read_labels(path: Path) -> dict[str, str]:
    """File stem → class id, from two columns (comma, tab or space separated; further columns are ignored)."""
    labels = {}
    with open(path, newline="", encoding="utf-8-sig") as f:
        text = f.read()
    delimiter = "," if path.suffix == ".csv" else "\t" if "\t" in text else " "
    for row in csv.reader(text.splitlines(), delimiter=delimiter):
        if len(row) >= 2 and row[1].strip():
            labels[_stem(row[0])] = row[1].split()[0]
    if not labels:
        raise UserError(f"label file {str(path)!r} has no rows of two columns; write FILE,CLASS (a wnid or an index)")
    return labels


def _stem(name: str) -> str:
    return os.path.basename(name.strip()).rsplit(".", 1)[0] if is_image(name) else os.path.basename(name.strip())


def label_flat(source: Source, labels_path: Path | None) -> Source:
    """Give a flat source its targets from a label file. Raises UserError where there is none or images are missing."""
    path = labels_path or find_labels(source.root)
    if path is None:
        raise UserError(
            f"{str(source.root)!r} holds {len(source.files)} images without class folders and there is no label file; "
            f"put {' or '.join(LABEL_FILES[:2])} beside it, or give --labels FILE (columns: file, class), "
            "or the folder above if this is one class"
        )
    labels = read_labels(path)
    source.targets = [labels.get(_stem(file), "") for file in source.files]
    missing = [file for file, target in zip(source.files, source.targets) if not target]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(source.files)} images have no label in {str(path)!r}, e.g. {missing[0]!r}; "
            "its first column should hold their file names"
        )
    return source


def read_flat(root: Path) -> Source:
    """The images directly in a folder, unlabelled."""
    entries = sorted((e for e in os.scandir(root) if e.is_file() and is_image(e.name)), key=lambda e: e.name)
    files = [e.name for e in entries]
    names, templates = own_texts(root)
    return Source(
        name=root.resolve().name,
        root=root,
        files=files,
        read=lambda i: (root / files[i]).read_bytes(),
        names=names,
        templates=templates,
        sizes=[e.stat().st_size for e in entries],
    )


def real_positives(files: list[str]) -> list[tuple[int, ...]]:
    """ReaL labels (Beyer et al. 2020, arXiv 2006.07159) of ImageNet validation files, from the timm wheel.

    Some images have no ReaL label (an empty tuple): they are not scored. Raises UserError for other file names.
    """
    from clip_linear_eval.classnames import _info

    table = json.loads(_info("imagenet_real_labels.json"))
    numbers = [re.search(r"ILSVRC2012_val_(\d{8})", file) for file in files]
    strange = [file for file, number in zip(files, numbers) if not number or not 1 <= int(number[1]) <= len(table)]
    if strange:
        raise UserError(f"ReaL labels are for files ILSVRC2012_val_00000001 to _00050000, not {strange[0]!r}")
    return [tuple(table[int(number[1]) - 1]) for number in numbers if number]


def is_objectnet(root: Path) -> bool:
    """Whether a folder holds ObjectNet's mapping files (as in its own archive, or beside the images)."""
    return _mappings(root) is not None


def _mappings(root: Path) -> Path | None:
    places = (root, root / "mappings", root.parent / "mappings", root / "objectnet-1.0" / "mappings")
    return next((p for p in places if (p / "folder_to_objectnet_label.json").is_file()), None)


def read_objectnet(root: Path) -> Source:
    """ObjectNet's images of the classes that overlap ImageNet, by its own mapping files.

    Scored among the overlapping classes with ObjectNet's names in lower case (as CLIP_benchmark does), images of
    other classes left out, and the red frame of two pixels cropped (as ObjectNet's own loader does). Raises UserError.
    """
    from clip_linear_eval.datasets.folder import read_imagefolder

    mappings = _mappings(root)
    assert mappings is not None, "the caller has looked"
    folder_to_label = json.loads((mappings / "folder_to_objectnet_label.json").read_text())
    overlap = json.loads((mappings / "objectnet_to_imagenet_1k.json").read_text())
    images = next((p for p in (root / "images", root / "objectnet-1.0" / "images") if p.is_dir()), root)
    source = read_imagefolder(images)
    unknown = sorted(set(source.targets or ()) - set(folder_to_label))
    if unknown:
        raise UserError(f"ObjectNet folders that its mapping does not know: {', '.join(unknown[:5])}")
    wanted = {folder: label.lower() for folder, label in sorted(folder_to_label.items()) if label in overlap}
    keep = [i for i, target in enumerate(source.targets or ()) if target in wanted]
    files, read, sizes, targets = source.files, source.read, source.sizes or (), source.targets or ()
    source.name, source.border = "objectnet", _BORDER
    source.files, source.targets = [files[i] for i in keep], [targets[i] for i in keep]
    source.sizes = [sizes[i] for i in keep]
    source.read = lambda i: read(keep[i])
    source.names = NameList(
        names=tuple(wanted.values()), keys=tuple(wanted), source="objectnet mapping files", closed=True
    )
    return source
