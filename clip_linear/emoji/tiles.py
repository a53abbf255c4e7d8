"""The images: each design team's sheet is decoded once, each tile encoded once as JPEG."""

from __future__ import annotations

import io
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

TILE = 64  # pixels on a side
_PER_ROW = 64
_QUALITY = 95


class Tiles:
    """Tiles of the sheets as JPEG bytes, TILE × TILE pixels, RGB."""

    def __init__(self) -> None:
        self._sheets: dict[str, Image.Image] = {}
        self._jpegs: dict[tuple[str, int], bytes] = {}

    def jpeg(self, team: str, number: int) -> bytes:
        """The tile with this number on the team's sheet (row by row)."""
        if (team, number) not in self._jpegs:
            left, top = number % _PER_ROW * TILE, number // _PER_ROW * TILE
            out = io.BytesIO()
            self._sheet(team).crop((left, top, left + TILE, top + TILE)).save(out, "JPEG", quality=_QUALITY)
            self._jpegs[team, number] = out.getvalue()
        return self._jpegs[team, number]

    def _sheet(self, team: str) -> Image.Image:
        from PIL import Image

        if team not in self._sheets:
            with files("clip_linear.emoji").joinpath(f"{team}.webp").open("rb") as f:
                self._sheets[team] = Image.open(f).convert("RGB")
        return self._sheets[team]
