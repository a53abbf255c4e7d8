"""From class ids to columns of the classifier: by what a class is called, never by where it sorts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from clip_linear.errors import UserError
from clip_linear_eval.classnames import (
    SYNSET_FILES,
    NameList,
    default_style,
    duplicate_names,
    imagenet_names,
    list_of,
    load_names,
    synsets,
)
from clip_linear_eval.datasets.base import WNID, EvalSet, Source
from clip_linear_eval.datasets.flat import real_positives
from clip_linear_eval.prompts import load_templates


def resolve(
    source: Source, classnames: Any = None, templates: Any = None, restrict: bool = False, labels: str | None = None
) -> EvalSet:
    """A source with targets as a set to score. ``classnames`` and ``templates`` override the set's own; ``restrict``
    scores against the classes that are there only; ``labels="real"`` takes ReaL labels. Raises UserError."""
    present = sorted(set(source.targets or ()), key=lambda t: (len(t), t) if t.isdigit() else (0, t))
    names = _choose(source, present, classnames)
    column = _columns(names, present, restrict)
    keep = sorted(set(column.values())) if restrict else range(len(names.names))
    place = {old: new for new, old in enumerate(keep)}
    shown = tuple(names.names[i] for i in keep)
    chosen = load_templates(templates if templates is not None else source.templates or _default_templates(names))
    chosen.check(shown)
    ids = names.keys or tuple(map(str, range(len(names.names))))
    notes = []
    same = duplicate_names(shown)
    if same:
        few = ", ".join(f"{n!r} ×{c}" for n, c in list(same.items())[:5])
        notes.append(f"{len(same)} names are shared by several classes, which no model can tell apart: {few}")
    empty = len(keep) - len(set(column.values()))
    if empty:
        notes.append(f"scored against {len(keep)} classes, of which {empty} have no image here")
    out = EvalSet(
        name=source.name,
        files=source.files,
        read=source.read,
        labels=np.array([place[column[t]] for t in source.targets or ()], dtype=np.int64),
        classes=tuple(ids[i] for i in keep),
        names=shown,
        names_source=names.source + (" (present classes)" if restrict else ""),
        templates=chosen,
        faults=list(source.faults),
        notes=notes,
        sizes=source.sizes,
        border=source.border,
    )
    return _with_real(out) if labels == "real" else out


def _choose(source: Source, present: list[str], classnames: Any) -> NameList:
    wnids = [t for t in present if WNID.fullmatch(t)]
    if classnames is not None:
        return load_names(classnames, wnids)
    if source.names is not None:
        return source.names
    if wnids:
        list_name = list_of(wnids)
        if list_name is None:
            known = set(synsets("imagenet-21k-goog")) | set(synsets("imagenet-1k"))
            raise _unknown_classes([t for t in present if t not in known], "the wnids of any ImageNet list")
        for subset in ("imagenet-a", "imagenet-r"):  # a part of ImageNet-A looks like a part of ImageNet
            if source.name.lower().replace("_", "-").endswith(subset) and set(wnids) <= set(synsets(subset)):
                list_name = subset
        return imagenet_names(list_name, default_style(list_name))
    if all(t.isdigit() for t in present):
        if "imagenetv2" in re.sub(r"[^a-z0-9]", "", str(source.root.resolve()).lower()):
            return imagenet_names("imagenet-1k", "openai")
        raise UserError(
            f"the classes of {source.name!r} are numbers and there is no classnames.txt beside them; "
            "give --classnames FILE, or --classnames imagenet-1k:openai for ImageNet-V2"
        )
    return NameList(names=tuple(t.replace("_", " ") for t in present), keys=tuple(present), source="folder names")


def _columns(names: NameList, present: list[str], restrict: bool) -> dict[str, int]:
    """Class id → column. Raises UserError for unknown ids and for a count that does not fit."""
    count, numbers = len(names.names), all(t.isdigit() for t in present)
    if names.keys is not None and not (names.closed and numbers):
        column = {key: i for i, key in enumerate(names.keys)}
        return _only_known(column, present, f"the {count} ids of {names.source}")
    beyond = numbers and int(present[-1]) >= count
    wnid_list = None
    if all(WNID.fullmatch(t) for t in present):
        wnid_list = next(
            (n for n in SYNSET_FILES if len(synsets(n)) == count and set(present) <= set(synsets(n))), None
        )
    if beyond or (len(present) != count and not (restrict or names.closed or wnid_list)):
        raise UserError(
            f"class-count mismatch: {len(present)} classes here{f' (up to {present[-1]})' if numbers else ''} but "
            f"{count} names in {names.source}; give the names of this set"
            + ("" if beyond else "; if classes without images are meant, give JSON {id: name}, or --restrict")
        )
    if numbers:
        return {t: int(t) for t in present}
    if wnid_list:
        return {wnid: i for i, wnid in enumerate(synsets(wnid_list)) if wnid in set(present)}
    spelled = {_plain(name): i for i, name in enumerate(names.names)}
    column = {t: spelled[_plain(t)] for t in present if _plain(t) in spelled}
    what = f"the names of {names.source}, which have no ids; write id<TAB>name lines or JSON {{id: name}}"
    return _only_known(column, present, what)


def _plain(name: str) -> str:
    return name.lower().replace("_", " ")


def _only_known(column: dict[str, int], present: list[str], what: str) -> dict[str, int]:
    strange = [t for t in present if t not in column]
    if strange:
        raise _unknown_classes(strange, what)
    return {t: column[t] for t in present}


def _unknown_classes(strange: Sequence[str], what: str) -> UserError:
    more = f" and {len(strange) - 10} more" if len(strange) > 10 else ""
    return UserError(f"unknown classes {', '.join(map(repr, strange[:10]))}{more}: not among {what}")


def _default_templates(names: NameList) -> str:
    return "openai-80" if names.source.startswith("imagenet") else "1"


def _with_real(data: EvalSet) -> EvalSet:
    if data.classes != synsets("imagenet-1k"):
        raise UserError("ReaL labels are for ImageNet-1k's validation set, scored against all 1,000 classes")
    positives = real_positives(list(data.files))
    keep = [i for i, found in enumerate(positives) if found]
    return replace(
        data,
        name=f"{data.name}-real",
        files=[data.files[i] for i in keep],
        read=lambda i: data.read(keep[i]),
        labels=np.array([positives[i][0] for i in keep], dtype=np.int64),
        positives=[positives[i] for i in keep],
        sizes=[data.sizes[i] for i in keep] if data.sizes is not None else None,
        notes=[*data.notes, f"{len(positives) - len(keep)} images have no ReaL label and are not scored"],
    )


def read_label_path(labels: str | None) -> Path | None:
    """The path in ``--labels``, or None for ``real`` and for nothing. Raises UserError where it does not exist."""
    if labels in (None, "real"):
        return None
    if not Path(str(labels)).is_file():
        raise UserError(f"label file {labels!r} does not exist; give a file with columns file, class, or real")
    return Path(str(labels))
