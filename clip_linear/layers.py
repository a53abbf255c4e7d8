"""Which blocks of a tower a spec means."""

from __future__ import annotations

from clip_linear.errors import UserError


def chosen_layers(layers: str | list[int], depth: int) -> list[int]:
    """``"all"``, ``[0, 1]`` or ``"0-8"`` (inclusive) as block numbers. Raises UserError for what does not fit."""
    if layers == "all":
        return list(range(depth))
    try:
        if isinstance(layers, str):
            first, last = layers.split("-")
            chosen = list(range(int(first), int(last) + 1))
        else:
            chosen = sorted({int(i) for i in layers})
    except (ValueError, TypeError):
        chosen = []
    if not chosen or chosen[0] < 0 or chosen[-1] >= depth:
        raise UserError(
            f'layers {layers!r} do not fit {depth} blocks; write "all", "0-{depth - 1}" or a list of numbers'
        )
    return chosen
