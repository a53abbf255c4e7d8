"""The dress of a published module, and the place where it sits: what it adds in parameters and work. Without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from clip_linear.errors import unknown


@dataclass(frozen=True)
class Dress:
    """What a published module puts round its equation."""

    rope: bool = False
    local: str | None = None  # a key of LOCALS
    norm: bool = False
    gate: str | None = None  # None, "linear" or "silu"
    mlp_conv: bool = False  # 3×3 depth-wise convolution in the block's MLP
    table: bool = False  # a learned positional encoding of the keys


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a body sits; all that is known when it is built."""

    width: int
    num_heads: int
    length: int = 0  # tokens at build time: prefix + H·W, or context_length
    grid: tuple[int, int] | None = None  # None: text
    prefix: int = 0
    causal: bool = False
    mlp_width: int = 0  # hidden width of the block's MLP; 0: there is none to put a convolution in

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    @property
    def sizes(self) -> dict[str, int]:
        """The letters of the formulas: C width, H heads, D and E head_dim, N tokens, G grid tokens, M MLP width."""
        grid = self.length if self.grid is None else self.grid[0] * self.grid[1]
        D = self.head_dim
        return {"C": self.width, "H": self.num_heads, "D": D, "E": D, "N": self.length, "G": grid, "M": self.mlp_width}


@dataclass(frozen=True, kw_only=True)
class Local:
    """One local term: parameters and multiply–accumulates per layer, over a grid and over text (causal, 1-D)."""

    image_parameters: str
    image_macs: str
    text_parameters: str
    text_macs: str


LOCALS = {
    "dw5": Local(
        image_parameters="26·C", image_macs="25·G·C", text_parameters="6·C", text_macs="5·N·C"
    ),  # 5×5 (5 taps) and a bias for each channel
    "dw5_shared": Local(
        image_parameters="26·D", image_macs="25·G·C", text_parameters="6·D", text_macs="5·N·C"
    ),  # one head's filters serve all heads
    "dynamic3": Local(
        image_parameters="10·C·(D + 1)",
        image_macs="10·C·D + 9·G·C",
        text_parameters="4·C·(D + 1)",
        text_macs="4·N·C·D + 3·N·C",
    ),  # 3×3 (3 taps) made from the mean of the input
}
GATES = ("linear", "silu")

_NUMBER_OR_NAME = re.compile(r"[A-Z]|\d+|[-+*/() ]")


def evaluate(formula: str, sizes: dict[str, int]) -> int:
    """A formula such as ``"2·D·E + N²"`` at given sizes. Raises ValueError for anything but + − · / ( ) and letters."""
    text = formula.replace("·", "*").replace("²", "**2").replace("−", "-")
    if _NUMBER_OR_NAME.sub("", text):
        raise ValueError(f"formula {formula!r} holds more than numbers, single letters and + − · / ² ( )")
    return int(eval(text, {"__builtins__": {}}, dict(sizes)))


def dress_parameters(dress: Dress, site: Site) -> dict[str, int]:
    """Learned numbers of each part of a dress in one layer; parts without any are left out. Raises UserError."""
    found = {}
    if dress.local is not None:
        local = local_of(dress.local)
        found["local"] = local.image_parameters if site.grid is not None else local.text_parameters
    if dress.norm:
        found["norm"] = "2·C"
    if dress.gate is not None:
        found["gate"] = "C·C + C"
    if dress.table:
        found["table"] = "N·C"
    if dress.mlp_conv and site.mlp_width:
        found["mlp_conv"] = "10·M" if site.grid is not None else "4·M"
    return {part: evaluate(formula, site.sizes) for part, formula in found.items()}


def dress_macs(dress: Dress, site: Site) -> int:
    """Multiply–accumulates of a dress in one layer, for one sample. Raises UserError for an unknown local term."""
    found = ["0"]
    if dress.local is not None:
        local = local_of(dress.local)
        found.append(local.image_macs if site.grid is not None else local.text_macs)
    if dress.gate is not None:
        found.append("N·C·C")
    if dress.mlp_conv and site.mlp_width:
        found.append("9·G·M" if site.grid is not None else "3·N·M")
    return sum(evaluate(formula, site.sizes) for formula in found)


def local_of(kind: str) -> Local:
    """A local term by name. Raises UserError for one that is not known."""
    if kind not in LOCALS:
        raise unknown("local term", kind, LOCALS, f"known: {', '.join(LOCALS)}")
    return LOCALS[kind]
