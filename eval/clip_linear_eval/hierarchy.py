"""Hierarchy-aware accuracy for sets with inner classes (ImageNet-21k holds "dog" beside "beagle").

The tree is WordNet's: its ``data.noun`` (version 3.0, whose offsets are ImageNet's wnids) or ImageNet's
``wordnet.is_a.txt`` (a line "parent child" per edge).
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np

from clip_linear.errors import UserError


class Hierarchy:
    """Parents of every synset, and what follows from them for a list of classes."""

    def __init__(self, parents: dict[str, tuple[str, ...]], classes: tuple[str, ...]) -> None:
        self.parents = parents
        self.classes = classes
        self.ancestors = functools.cache(self._ancestors)
        self.heights: dict[str, int] = {}  # longest way down to a class of the list; only of its ancestors
        for name in classes:
            self._raise_heights(name)

    def _ancestors(self, name: str) -> frozenset[str]:
        """A synset and all above it."""
        out = {name}
        for parent in self.parents.get(name, ()):
            out |= self.ancestors(parent)
        return frozenset(out)

    def _raise_heights(self, name: str, height: int = 0) -> None:
        if self.heights.get(name, -1) >= height:
            return
        self.heights[name] = height
        for parent in self.parents.get(name, ()):
            self._raise_heights(parent, height + 1)

    def related(self, a: int, b: int) -> bool:
        """Whether class a is class b, or one lies above the other."""
        first, second = self.classes[a], self.classes[b]
        return first in self.ancestors(second) or second in self.ancestors(first)

    def lca_height(self, a: int, b: int) -> int:
        """Height of the lowest common ancestor of two classes: 0 for equal ones (Deng et al. 2010, section 6)."""
        if a == b:
            return 0
        shared = self.ancestors(self.classes[a]) & self.ancestors(self.classes[b])
        return min((self.heights[name] for name in shared), default=max(self.heights.values()) + 1)

    def measure(self, labels: np.ndarray, predicted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Per image: whether the prediction is the class or lies above or below it, and the height of their lowest
        common ancestor. Each pair of classes is looked at once."""
        pairs, where = np.unique(np.stack([labels, predicted], 1), axis=0, return_inverse=True)
        related = np.array([self.related(int(a), int(b)) for a, b in pairs], bool)
        heights = np.array([self.lca_height(int(a), int(b)) for a, b in pairs], np.int64)
        return related[where.ravel()], heights[where.ravel()]


def load_hierarchy(path: Path, classes: tuple[str, ...]) -> Hierarchy:
    """Read a hierarchy for the classes of a set. Raises UserError where it does not know them."""
    if not path.is_file():
        raise UserError(f"hierarchy {str(path)!r} does not exist; give WordNet 3.0's data.noun or wordnet.is_a.txt")
    parents = _read_wordnet(path) if path.name == "data.noun" else _read_edges(path)
    known = set(parents) | {parent for above in parents.values() for parent in above}
    missing = [name for name in classes if name not in known]
    if missing:
        raise UserError(f"hierarchy {str(path)!r} does not know {len(missing)} of the classes, e.g. {missing[0]!r}")
    return Hierarchy(parents, classes)


def _read_edges(path: Path) -> dict[str, tuple[str, ...]]:
    parents: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        fields = line.split()
        if len(fields) != 2:
            raise UserError(f"{str(path)!r} line {number}: {line[:60]!r} is not 'parent child'")
        parents[fields[1]] = (*parents.get(fields[1], ()), fields[0])
    return parents


def _read_wordnet(path: Path) -> dict[str, tuple[str, ...]]:
    """Hypernym pointers ("@", and "@i" for instances) of WordNet's noun file, format wndb(5WN)."""
    parents = {}
    for line in path.read_text(encoding="latin-1").splitlines():
        if line.startswith(" "):  # the licence at the top
            continue
        fields = line.split(" | ")[0].split()
        start = 4 + 2 * int(fields[3], 16)  # offset, file, type, number of words (hexadecimal), word and sense each
        pointers = fields[start + 1 : start + 1 + 4 * int(fields[start])]
        above = [pointers[i + 1] for i in range(0, len(pointers), 4) if pointers[i] in ("@", "@i")]
        parents[f"n{fields[0]}"] = tuple(f"n{offset}" for offset in above)
    return parents
