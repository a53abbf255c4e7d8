"""What every layout is turned into: a list of images with their targets, readable in any order."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from clip_linear_eval.classnames import NameList
from clip_linear_eval.prompts import Templates

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
WNID = re.compile(r"n\d{8}")  # ImageNet's class ids: WordNet 3.0 noun synsets
# What reading or decoding a damaged file may raise; each such file is counted and named.
DECODE_ERRORS = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError)


@dataclass(kw_only=True)
class Source:
    """Images of one data set as a layout module found them, before classes are resolved.

    ``targets`` holds one class id per image as text (folder name, ``.cls``, label); ``captions`` holds the captions
    per image for retrieval. ``names`` and ``templates`` come from the set's own files. ``faults`` are samples that
    were already lost while listing, as ``{file, reason}``.
    """

    name: str
    root: Path
    files: Sequence[str]
    read: Callable[[int], bytes]
    targets: Sequence[str] | None = None
    captions: Sequence[list[str]] | None = None
    names: NameList | None = None
    templates: Templates | None = None
    faults: list[dict[str, str]] = field(default_factory=list)
    sizes: Sequence[int] | None = None
    border: int = 0  # pixels to crop on each side (ObjectNet's red frame)


@dataclass(kw_only=True)
class EvalSet:
    """A classification set ready to score: column ``labels[i]`` of the classifier is right for image i.

    ``positives[i]``, where given, lists all columns that count as right (ReaL); ``labels[i]`` is then the first.
    """

    name: str
    files: Sequence[str]
    read: Callable[[int], bytes]
    labels: np.ndarray
    classes: tuple[str, ...]
    names: tuple[str, ...]
    names_source: str
    templates: Templates
    positives: list[tuple[int, ...]] | None = None
    faults: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sizes: Sequence[int] | None = None
    border: int = 0

    def limited(self, limit: int | None) -> EvalSet:
        """At most ``limit`` images, evenly spaced over the set (so that sorted classes stay represented)."""
        keep = evenly(len(self.files), limit)
        if len(keep) == len(self.files):
            return self
        return replace(
            self,
            files=[self.files[i] for i in keep],
            read=lambda i: self.read(keep[i]),
            labels=self.labels[keep],
            positives=[self.positives[i] for i in keep] if self.positives else None,
            sizes=[self.sizes[i] for i in keep] if self.sizes is not None else None,
            notes=[*self.notes, f"limited to {len(keep)} of {len(self.files)} images"],
        )

    def fingerprint(self) -> str:
        """Hash of the file names, sizes and labels: two equal ones hold the same images for all we can see."""
        return digest(list(self.files), list(self.sizes or ()), self.labels.tolist(), self.positives)


def evenly(n: int, limit: int | None) -> list[int]:
    """Indices of at most ``limit`` of n items, evenly spaced."""
    if limit is None or limit >= n:
        return list(range(n))
    return [i * n // limit for i in range(limit)]


def digest(*parts: Any) -> str:
    """A content hash (16 hex digits of SHA-256) of anything that ``repr`` shows in full."""
    state = hashlib.sha256()
    for part in parts:
        state.update(repr(part).encode())
    return state.hexdigest()[:16]


def is_image(name: str) -> bool:
    """Whether a file's name says that it is an image; hidden files (``._x.jpg`` of macOS) are none."""
    base = os.path.basename(name)
    return base.lower().endswith(IMAGE_SUFFIXES) and not base.startswith(".")


def own_texts(folder: Path) -> tuple[NameList | None, Templates | None]:
    """Names and templates from a set's own ``classnames.txt`` and ``zeroshot_classification_templates.txt``."""
    from clip_linear_eval.classnames import load_names
    from clip_linear_eval.prompts import load_templates

    names, templates = folder / "classnames.txt", folder / "zeroshot_classification_templates.txt"
    return (
        load_names(names) if names.is_file() else None,
        load_templates(templates) if templates.is_file() else None,
    )
