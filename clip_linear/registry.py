"""Which variants there are. A variant is a file in ``clip_linear/variants/``; nothing else has to be told about it.

What a variant declares (``info``, ``core``, ``paper``) is read from its source as literals, so that lists, plans and
profiles need no torch; a declaration that is computed instead of written down is imported.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import importlib.util
import pkgutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clip_linear.dress import Dress, Site, evaluate
from clip_linear.errors import UserError, unknown

if TYPE_CHECKING:
    from clip_linear.attention import Variant


@dataclass(frozen=True, kw_only=True)
class VariantInfo:
    """What the lists, tables and reports say of a variant; each variant file holds one.

    Formulas use the letters of ``Site.sizes`` and the signs of ``dress.evaluate``.
    """

    name: str
    equation: str  # one line, in the words of CONVENTIONS.md: φ, S, q, k, v, N
    source: str  # authors, year, arXiv id or venue
    bibtex: str = ""
    title: str = ""
    towers: tuple[str, ...] = ("image", "text")
    needs_grid: bool = False  # the core equation itself needs the 2-D grid (a dress may need it anyway)
    causal_source: str = "derived"  # "paper": the causal form is published; "derived": it is ours
    state_per_head: str = "D·E"  # numbers that the state of one head holds
    streams: tuple[tuple[str, str], ...] = (("D", "E"),)  # (features, values) of each call of the primitive, per head
    feature_macs: str = ""  # multiply–accumulates of one head to make the features, where that is a product
    macs: str = ""  # multiply–accumulates of one head instead of those of the streams, both causal and not
    tensors: dict[str, str] = field(default_factory=dict)  # the equation's own parameters -> how many numbers each
    options: dict[str, str] = field(default_factory=dict)  # option -> what it does, in a few words
    presets: tuple[str, ...] = ()  # filled by the registry


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """All that a variant file declares."""

    info: VariantInfo
    core: Dress = field(default_factory=Dress)
    paper: Dress | None = None

    def dress(self, preset: str, overrides: dict[str, Any]) -> Dress:
        """The dress of a preset with single parts overridden. Raises UserError (no such preset, no such part)."""
        if preset == "paper" and self.paper is None:
            raise UserError(
                f"variant {self.info.name!r} has no published module, so no preset 'paper'; use {self.info.name}"
            )
        parts = [f.name for f in dataclasses.fields(Dress)]
        for name in overrides:
            if name not in parts:
                raise unknown("part of a dress", name, parts, f"parts: {', '.join(parts)}")
        dress = self.paper if preset == "paper" else self.core
        assert dress is not None
        return dataclasses.replace(dress, **overrides)


def list_variants() -> list[str]:
    """Names of all variants, ``softmax`` (the control) first, the others in alphabetical order."""
    from clip_linear import variants

    names = [m.name for m in pkgutil.iter_modules(variants.__path__) if not m.name.startswith("_")]
    return sorted(names, key=lambda name: (name != "softmax", name))


@functools.cache
def variant_class(name: str) -> type[Variant]:
    """The class of a variant, remembered: every functional call asks. Raises UserError for an unknown name."""
    from clip_linear.attention import Variant

    _check(name)
    module = importlib.import_module(f"clip_linear.variants.{name}")
    classes = [
        c
        for c in vars(module).values()
        if isinstance(c, type) and issubclass(c, Variant) and c.__module__ == module.__name__
    ]
    if len(classes) != 1:
        raise UserError(f"{module.__file__} holds {len(classes)} Variant classes; a variant file holds exactly one")
    return classes[0]


def declaration(name: str) -> Declaration:
    """What a variant declares. Raises UserError for a name that is not known."""
    _check(name)
    spec = importlib.util.find_spec(f"clip_linear.variants.{name}")
    assert spec is not None and spec.origin is not None
    found = _read(Path(spec.origin))
    if found is None:
        cls = variant_class(name)
        found = Declaration(info=cls.info, core=cls.core, paper=cls.paper)
    presets = ("core",) if found.paper is None else ("core", "paper")
    return dataclasses.replace(found, info=dataclasses.replace(found.info, presets=presets))


def variant_info(name: str) -> VariantInfo:
    """The description of a variant, with its presets. Raises UserError for a name that is not known."""
    return declaration(name).info


def _check(name: str) -> None:
    if name not in list_variants():
        raise unknown("variant", name, list_variants(), "run: clip-linear list")


@functools.cache
def _read(path: Path) -> Declaration | None:
    """The declaration in a variant file, or None where it is not made of literals."""
    makers = {"info": VariantInfo, "core": Dress, "paper": Dress}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef):
            continue
        found: dict[str, Any] = {}
        for line in node.body:
            if not isinstance(line, ast.Assign | ast.AnnAssign):
                continue
            name, call = (
                getattr(line.target if isinstance(line, ast.AnnAssign) else line.targets[0], "id", ""),
                line.value,
            )
            if name in makers:
                if not isinstance(call, ast.Call) or getattr(call.func, "id", "") != makers[name].__name__ or call.args:
                    return None
                try:
                    found[name] = makers[name](**{str(k.arg): ast.literal_eval(k.value) for k in call.keywords})
                except ValueError:
                    return None
        if "info" in found:
            return Declaration(**found)
    return None


def own_parameters(info: VariantInfo, site: Site) -> dict[str, int]:
    """How many numbers each of the equation's own parameters holds in one layer."""
    return {name: evaluate(formula, site.sizes) for name, formula in info.tensors.items()}


def check_options(variant: str, known: tuple[str, ...], given: dict[str, Any]) -> None:
    """Raise UserError for an option that the variant does not have."""
    for name in given:
        if name not in known:
            hint = f"options of {variant}: {', '.join(known) or 'none'}"
            raise unknown(f"option of variant {variant}", name, known or ("none",), hint)
