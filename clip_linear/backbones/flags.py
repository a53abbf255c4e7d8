"""Which variant each block has, and where windows lie. Nothing here imports torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from clip_linear.errors import UserError
from clip_linear.registry import declaration

SOFTMAX_LETTERS, VARIANT_LETTERS = "vs", "li"  # as the released codes write their flags


def expand_flags(flags: str | Sequence[Any], depths: Sequence[int], variant: str) -> list[list[str]]:
    """Which variant each block of each stage has.

    ``flags`` is a letter per stage (``"llvv"``: l or i = the backbone's variant, v or s = softmax), or a list with an
    entry per stage: a letter, a variant's name, or a list of those, one per block (longer ones are cut). Raises
    UserError.
    """
    if len(flags) != len(depths):
        raise UserError(f"flags {flags!r} name {len(flags)} stages, the backbone has {len(depths)}")

    def name(flag: str) -> str:
        if flag.lower() in VARIANT_LETTERS:
            return variant
        return "softmax" if flag.lower() in SOFTMAX_LETTERS else declaration(flag).info.name

    out = []
    for flag, depth in zip(flags, depths):
        blocks = [flag] * depth if isinstance(flag, str) else list(flag)[:depth]
        if len(blocks) < depth:
            raise UserError(f"flags {flag!r} name {len(blocks)} blocks of a stage of {depth}")
        out.append([name(block) for block in blocks])
    return out


def mixed_flags(attn_type: str, depths: Sequence[int]) -> list[list[str]]:
    """``LLSS``, or ``IIMS2``: in an M stage the first n blocks are linear, the rest softmax. Raises UserError."""
    found = re.fullmatch(r"([LlIiVvSsM]+)(\d*)", attn_type)
    letters, count = found.groups() if found else ("", "")
    if len(letters) != len(depths) or ("M" in letters) != bool(count):
        raise UserError(
            f"flags {attn_type!r} do not fit {len(depths)} stages; a letter for each: l or i linear, v or s softmax, "
            "e.g. llvv; or M and a number at the end for a stage with that many linear blocks first, e.g. IIMS2"
        )
    return [
        ["l"] * min(int(count), depth) + ["s"] * (depth - int(count)) if letter == "M" else [letter] * depth
        for letter, depth in zip(letters, depths)
    ]


def window_places(
    kinds: list[list[str]], size: tuple[int, int], patch: int, window: int, softmax_window: int | None
) -> list[tuple[int, int]]:
    """(window, shift) of every block of a windowed model at an image size.

    ``softmax_window`` None: 7, or 12 where ``window``, that of linear blocks, is above 56. Raises UserError where a
    window does not divide its grid.
    """
    small, out = softmax_window or (7 if window <= 56 else 12), []
    for i, stage in enumerate(kinds):
        grid = (size[0] // (patch * 2**i), size[1] // (patch * 2**i))
        for j, kind in enumerate(stage):
            w = small if kind == "softmax" else window
            shift = w // 2 if j % 2 else 0
            if min(grid) <= w:
                w, shift = min(grid), 0
            if w < 1 or grid[0] % w or grid[1] % w:
                raise UserError(
                    f"images of {size[0]}×{size[1]} give stage {i + 1} {grid[0]}×{grid[1]} tokens, not a multiple of "
                    f"its window {w}; choose another size (with softmax stages: a multiple of 224) or window_size"
                )
            out.append((w, shift))
    return out
