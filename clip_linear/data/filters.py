"""``--filter "punsafe<0.5"``: which samples to keep, by a field of their json or by the size of the image."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from clip_linear.errors import UserError

_EXPRESSION = re.compile(r"^\s*([A-Za-z_][\w.-]*?)\s*(<=|>=|==|!=|<|>|=)\s*(.+?)\s*$")
_ORDER: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
# Fields that are measured on the image itself, so that they need no json.
IMAGE_FIELDS: dict[str, Callable[[int, int], float]] = {
    "image_width": lambda w, h: w,
    "image_height": lambda w, h: h,
    "image_min_side": min,
    "image_max_side": max,
    "image_pixels": lambda w, h: w * h,
    "image_aspect": lambda w, h: max(w, h) / max(1, min(w, h)),
}


@dataclass(frozen=True)
class Filter:
    """Keeps a sample whose ``field`` compares so with ``value``; a sample without the field is kept."""

    field: str
    sign: str
    value: str

    @property
    def reason(self) -> str:
        """The name under which a sample that is left out is counted."""
        return f"filtered_{self.field}"

    def keeps(self, fields: Mapping[str, Any]) -> bool:
        """Whether a sample with these json fields is kept (absent, null and not comparable values are)."""
        found = fields.get(self.field)
        if found is None:
            return True
        if self.sign in _ORDER:
            number = _number(found)
            return number is None or _ORDER[self.sign](number, float(self.value))
        equal = any(_equal(found, option) for option in self.value.split("|"))
        return equal if self.sign in ("==", "=") else not equal


def parse_filters(expressions: Iterable[str]) -> tuple[Filter, ...]:
    """Parse ``FIELD OP VALUE`` (OP: < <= > >= == !=; ``a|b`` with == and != means any of these). Raises UserError."""
    return tuple(_parse(e) for e in expressions)


def _parse(expression: str) -> Filter:
    match = _EXPRESSION.match(expression)
    hint = "write FIELD OP VALUE with OP one of < <= > >= == !=, e.g. --filter 'punsafe<0.5'"
    if match is None:
        raise UserError(f"filter {expression!r} is not understood; {hint}")
    field, sign, value = match.groups()
    value = value.strip("'\"")
    if sign in _ORDER and _number(value) is None:
        raise UserError(f"filter {expression!r} compares with {value!r}, which is no number; {hint}")
    return Filter(field, sign, value)


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _equal(found: Any, option: str) -> bool:
    if isinstance(found, bool):
        return option.lower() == str(found).lower()
    number = _number(option)
    return str(found) == option or (number is not None and _number(found) == number)
