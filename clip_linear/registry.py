"""Which variants there are. A variant is a file in ``clip_linear/variants/``; nothing else has to be told about it."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clip_linear.errors import UserError, unknown

if TYPE_CHECKING:
    from clip_linear.attention import Variant


@dataclass(frozen=True, kw_only=True)
class VariantInfo:
    """What the lists, tables and reports say of a variant; each variant file holds one."""

    name: str
    equation: str  # one line, in the words of CONVENTIONS.md: φ, S, q, k, v, N
    source: str  # authors, year, arXiv id or venue
    bibtex: str = ""
    title: str = ""
    towers: tuple[str, ...] = ("image", "text")
    needs_grid: bool = False  # the core equation itself needs the 2-D grid (a dress may need it anyway)
    causal_source: str = "derived"  # "paper": the causal form is published; "derived": it is ours
    state_per_head: str = "D·E"  # size of the state of one head as a formula in D (head_dim) and E (value dim)
    complexity: str = "N·D²"
    options: dict[str, str] = field(default_factory=dict)  # option -> what it does, in a few words
    presets: tuple[str, ...] = ()  # filled by the registry from the class


def list_variants() -> list[str]:
    """Names of all variants, ``softmax`` (the control) first, the others in alphabetical order."""
    from clip_linear import variants

    names = [m.name for m in pkgutil.iter_modules(variants.__path__) if not m.name.startswith("_")]
    return sorted(names, key=lambda name: (name != "softmax", name))


def variant_class(name: str) -> type[Variant]:
    """The class of a variant. Raises UserError for a name that is not known."""
    from clip_linear.attention import Variant

    if name not in list_variants():
        raise unknown("variant", name, list_variants(), "run: clip-linear list")
    module = importlib.import_module(f"clip_linear.variants.{name}")
    classes = [
        c
        for c in vars(module).values()
        if isinstance(c, type) and issubclass(c, Variant) and c.__module__ == module.__name__
    ]
    if len(classes) != 1:
        raise UserError(f"{module.__file__} holds {len(classes)} Variant classes; a variant file holds exactly one")
    return classes[0]


def variant_info(name: str) -> VariantInfo:
    """The description of a variant, with its presets. Raises UserError for a name that is not known."""
    import dataclasses

    cls = variant_class(name)
    return dataclasses.replace(cls.info, presets=cls.presets())
