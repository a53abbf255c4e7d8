"""Class names: OpenCLIP's list, the synset lists and lemmas of the timm wheel, and files.

A name list has *keys* (class ids: wnids, folder names) or is plain (a position is the id). Keys let a folder be
found by what it is instead of where it sorts.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from clip_linear.errors import UserError, unknown

# list -> file of synsets in timm/data/_info; the comment says what the list is.
SYNSET_FILES = {
    "imagenet-1k": "imagenet_synsets.txt",  # 1,000, sorted
    "imagenet-a": "imagenet_a_synsets.txt",  # the 200 classes of ImageNet-A
    "imagenet-r": "imagenet_r_synsets.txt",  # the 200 classes of ImageNet-R
    "imagenet-12k": "imagenet12k_synsets.txt",  # 11,821, timm's subset of fall 2011
    "imagenet-21k-miil": "imagenet21k_miil_synsets.txt",  # 11,221, MIIL's subset of fall 2011
    "imagenet-21k-p": "imagenet21k_miil_w21_synsets.txt",  # 10,450, MIIL's subset of winter 2021
    "imagenet-22k": "imagenet22k_synsets.txt",  # 21,841, fall 2011
    "imagenet-21k-goog": "imagenet21k_goog_synsets.txt",  # 21,843, Google's
    "imagenet-22k-ms": "imagenet22k_ms_synsets.txt",  # 21,842, Microsoft's order
}
STYLES = ("openai", "lemma", "lemmas", "definition")


@dataclass(frozen=True, kw_only=True)
class NameList:
    """Names in the order of the classifier's columns. ``keys``: their class ids, or None for a plain list."""

    names: tuple[str, ...]
    keys: tuple[str, ...] | None
    source: str
    closed: bool = False  # a published list: scoring a subset of its classes against all of it is meaningful


@functools.cache
def synsets(name: str) -> tuple[str, ...]:
    """The wnids of a published list (a key of SYNSET_FILES), in its order."""
    return tuple(_info(SYNSET_FILES[name]).split())


@functools.cache
def _info(file: str) -> str:
    return (resources.files("timm") / "data" / "_info" / file).read_text(encoding="utf-8")


@functools.cache
def _table(file: str) -> dict[str, str]:
    return {row[0]: row[1] for row in csv.reader(_info(file).splitlines(), delimiter="\t")}


def imagenet_names(list_name: str, style: str) -> NameList:
    """Names of a published list: ``openai`` (OpenCLIP's 1,000), ``lemma`` (WordNet's first), ``lemmas`` (all) or
    ``definition`` (first lemma and definition). Raises UserError for an unknown list or style."""
    if list_name not in SYNSET_FILES:
        raise unknown("class list", list_name, SYNSET_FILES, f"write LIST or LIST:STYLE, styles: {', '.join(STYLES)}")
    if style not in STYLES:
        raise unknown("name style", style, STYLES, "e.g. --classnames imagenet-22k:lemma")
    keys = synsets(list_name)
    if style == "openai":
        from open_clip import IMAGENET_CLASSNAMES

        known = dict(zip(synsets("imagenet-1k"), IMAGENET_CLASSNAMES))
        if any(key not in known for key in keys):
            raise UserError(f"OpenAI's names cover ImageNet-1k only, not {list_name}; use {list_name}:lemma")
        names = [known[key] for key in keys]
    else:
        lemmas = _table("imagenet_synset_to_lemma.txt")
        names = [lemmas[key] if style == "lemmas" else lemmas[key].split(",")[0] for key in keys]
        if style == "definition":
            definitions = _table("imagenet_synset_to_definition.txt")
            names = [f"{name}: {definitions[key]}" for name, key in zip(names, keys)]
    return NameList(names=tuple(names), keys=keys, source=f"{list_name}:{style}", closed=True)


def default_style(list_name: str) -> str:
    """OpenAI's names where they exist (1k, A, R), WordNet's first lemma elsewhere."""
    return "openai" if list_name in ("imagenet-1k", "imagenet-a", "imagenet-r") else "lemma"


def list_of(wnids: Iterable[str]) -> str | None:
    """The published list that these wnids belong to: the one with exactly these, else ImageNet-1k, else fall 2011's
    21,841, else Google's 21,843; None where a wnid is in none of them."""
    present = set(wnids)
    for name in SYNSET_FILES:
        if present == set(synsets(name)):
            return name
    return next((n for n in ("imagenet-1k", "imagenet-22k", "imagenet-21k-goog") if present <= set(synsets(n))), None)


def load_names(source: str | Path | Sequence[str] | dict[str, str], wnids: Iterable[str] = ()) -> NameList:
    """Names from a list, a dictionary id → name, a file, or a NAME: ``LIST``, ``LIST:STYLE`` or ``STYLE``.

    A file holds one name a line, ``id<TAB>name`` a line, or JSON (a list, or a dictionary id → name). ``wnids`` (the
    folders that are there) choose the list where only a style is named. Raises UserError.
    """
    if isinstance(source, dict):
        return NameList(names=tuple(source.values()), keys=tuple(source), source="given")
    if not isinstance(source, str | Path):
        return NameList(names=tuple(source), keys=None, source="given")
    path = Path(source)
    if path.is_file():
        return _read_names(path)
    text = str(source)
    list_name, _, style = text.partition(":")
    if text in STYLES:
        list_name, style = list_of(wnids) or "imagenet-1k", text
    if list_name not in SYNSET_FILES:
        raise unknown(
            "class names", text, [*SYNSET_FILES, *STYLES], "give a file, or LIST[:STYLE], e.g. imagenet-1k:openai"
        )
    return imagenet_names(list_name, style or default_style(list_name))


def _read_names(path: Path) -> NameList:
    text = path.read_text(encoding="utf-8-sig")
    keys: tuple[str, ...] | None = None
    if path.suffix == ".json":
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"class names {str(path)!r} are not valid JSON ({error})") from None
        if not isinstance(value, list | dict):
            raise UserError(f"class names {str(path)!r} hold a {type(value).__name__}; give a list, or {{id: name}}")
        names = tuple(str(v) for v in (value.values() if isinstance(value, dict) else value))
        keys = tuple(value) if isinstance(value, dict) else None
    else:
        lines = text.splitlines()
        while lines and not lines[-1].strip():
            lines.pop()
        if lines and all("\t" in line for line in lines):
            keys = tuple(line.split("\t", 1)[0].strip() for line in lines)
            lines = [line.split("\t", 1)[1] for line in lines]
        names = tuple(line.strip() for line in lines)
    empty = [i for i, name in enumerate(names) if not name]
    if not names or empty:
        what = f"line {empty[0] + 1} is empty" if names else "there are none"
        raise UserError(f"class names {str(path)!r}: {what}; give one name a line, in the order of the class indices")
    return NameList(names=names, keys=keys, source=path.name)


def duplicate_names(names: Sequence[str]) -> dict[str, int]:
    """Names that several classes share, with how many; a model cannot tell such classes apart."""
    return {name: count for name, count in Counter(names).items() if count > 1}


def text_hash(lines: Iterable[str]) -> str:
    """A short content hash (16 hex digits of SHA-256) of a list of strings, order included."""
    return hashlib.sha256(json.dumps(list(lines), ensure_ascii=False).encode()).hexdigest()[:16]
