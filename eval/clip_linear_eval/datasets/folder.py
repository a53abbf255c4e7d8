"""ImageFolder: one sub-folder per class, named by the class id."""

from __future__ import annotations

import os
from pathlib import Path

from clip_linear.errors import UserError
from clip_linear_eval.datasets.base import WNID, Source, is_image, own_texts


def read_imagefolder(root: Path) -> Source:
    """List ``root/CLASS/**/image``. Raises UserError for a folder at a wrong level or without images."""
    classes = sorted(e.name for e in os.scandir(root) if e.is_dir() and not e.name.startswith("."))
    files: list[str] = []
    targets: list[str] = []
    sizes: list[int] = []
    nested: dict[str, list[str]] = {}  # class folder -> its sub-folders, where it holds no image itself
    for name in classes:
        before = len(files)
        direct = False
        below: set[str] = set()
        for folder, folders, found in os.walk(root / name):
            folders.sort()
            for file in sorted(filter(is_image, found)):
                path = os.path.join(folder, file)
                files.append(os.path.relpath(path, root))
                sizes.append(os.stat(path).st_size)
                targets.append(name)
                direct |= folder == str(root / name)
                if folder != str(root / name):
                    below.add(os.path.relpath(folder, root / name).split(os.sep)[0])
        if len(files) > before and not direct:
            nested[name] = sorted(below)
    _check_level(root, classes, files, nested)
    names, templates = own_texts(root)
    return Source(
        name=root.resolve().name,
        root=root,
        files=files,
        read=lambda i: (root / files[i]).read_bytes(),
        targets=targets,
        names=names,
        templates=templates,
        sizes=sizes,
    )


def _check_level(root: Path, classes: list[str], files: list[str], nested: dict[str, list[str]]) -> None:
    here = [e.name for e in os.scandir(root) if e.is_file() and is_image(e.name)]
    if not files and here:
        raise UserError(
            f"{str(root)!r} holds {len(here)} images and no class folders: it is one class folder (give its parent) "
            "or a flat set (labels are looked for in LOC_val_solution.csv, labels.csv and val.txt; or give --labels)"
        )
    if not files:
        raise UserError(f"no images in {str(root)!r}; expected one folder per class with images in it")
    named = all(WNID.fullmatch(name) for name in nested)  # tiny-imagenet keeps its images in n01443537/images
    if nested and not named and len(nested) == len(set(classes) & {f.split(os.sep)[0] for f in files}):
        hint = max(nested, key=lambda name: len(nested[name]))
        raise UserError(
            f"{str(root)!r} is a level too high: its folders {', '.join(sorted(nested)[:4])} hold folders of images; "
            f"give one of them, e.g. {str(root / hint)!r}"
        )
