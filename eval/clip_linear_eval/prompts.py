"""Prompt templates: OpenCLIP's lists, files, and prompts per class."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clip_linear.errors import UserError, unknown
from clip_linear_eval.classnames import text_hash

NAMES = ("openai-80", "simple-7", "1")
_PLACES = ("{c}", "{}", "{classname}", "{name}")


@dataclass(frozen=True, kw_only=True)
class Templates:
    """Templates for all classes (each with ``{c}``), or complete prompts per class name."""

    templates: tuple[str, ...]
    per_class: dict[str, tuple[str, ...]] | None
    source: str

    def prompts(self, name: str) -> tuple[str, ...]:
        """The prompts of one class."""
        if self.per_class is not None:
            return self.per_class[name]
        return tuple(template.replace("{c}", name) for template in self.templates)

    def check(self, names: Sequence[str]) -> None:
        """Raise UserError where prompts per class lack a class."""
        missing = [name for name in names if self.per_class is not None and not self.per_class.get(name)]
        if missing:
            raise UserError(f"templates {self.source} have no prompts for {_some(missing)}; add them")

    @property
    def hash(self) -> str:
        """Content hash of the templates."""
        if self.per_class is not None:
            return text_hash(f"{name}\t{p}" for name in sorted(self.per_class) for p in self.per_class[name])
        return text_hash(self.templates)


def load_templates(source: str | Path | Sequence[str] | dict[str, list[str]] | Templates) -> Templates:
    """Templates from a list, a dictionary (class name → prompts), a file, or one of NAMES.

    A file holds one template a line or JSON (list or dictionary). The place of the name is ``{c}``, ``{}``,
    ``{classname}`` or ``{name}``. Raises UserError.
    """
    if isinstance(source, Templates):
        return source
    if isinstance(source, dict):
        return _per_class(source, "given")
    if not isinstance(source, str | Path):
        return _checked(source, "given")
    path = Path(source)
    if path.is_file():
        return _read(path)
    if str(source) not in NAMES:
        raise unknown("templates", str(source), NAMES, "give a file with one template a line, or one of these names")
    return _builtin(str(source))


def _builtin(name: str) -> Templates:
    if name == "1":
        return _checked(["a photo of a {c}."], name)
    import open_clip

    functions = open_clip.OPENAI_IMAGENET_TEMPLATES if name == "openai-80" else open_clip.SIMPLE_IMAGENET_TEMPLATES
    return _checked([function("{c}") for function in functions], name)


def _read(path: Path) -> Templates:
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix != ".json":
        return _checked([line.strip() for line in text.splitlines() if line.strip()], path.name)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"templates {str(path)!r} are not valid JSON ({error})") from None
    if isinstance(value, dict):
        return _per_class(value, path.name)
    if not isinstance(value, list):
        raise UserError(f"templates {str(path)!r} hold a {type(value).__name__}; give a list or {{class: [prompts]}}")
    return _checked(value, path.name)


def _per_class(value: dict[str, list[str]], source: str) -> Templates:
    bad = [k for k, v in value.items() if not isinstance(v, list | tuple) or not all(isinstance(p, str) for p in v)]
    if bad:
        raise UserError(f"templates {source}: {_some(bad)} should hold a list of prompts")
    return Templates(templates=(), per_class={k: tuple(v) for k, v in value.items()}, source=source)


def _checked(lines: Sequence[str], source: str) -> Templates:
    templates = []
    for line in lines:
        place = next((p for p in _PLACES if p in line), None)
        if place is None:
            raise UserError(f"template {line!r} has no place for the class name; write {{c}} where it goes")
        templates.append(line.replace(place, "{c}"))
    if not templates:
        raise UserError(f"templates {source}: there are none; give one a line, e.g. a photo of a {{c}}.")
    return Templates(templates=tuple(templates), per_class=None, source=source)


def _some(values: Sequence[str], most: int = 5) -> str:
    more = f" and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(repr(v) for v in values[:most]) + more
