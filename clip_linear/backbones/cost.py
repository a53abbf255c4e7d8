"""Parameters and multiply–accumulates of the registered sizes in closed form. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from clip_linear.backbones.flags import expand_flags, window_places
from clip_linear.backbones.sizes import size_of
from clip_linear.dress import Dress, Site, dress_macs, dress_parameters
from clip_linear.profile import core_macs
from clip_linear.registry import declaration, own_parameters


@dataclass
class Cost:
    """Learned numbers, and multiply–accumulates of one forward pass of one image."""

    parameters: int = 0
    macs: int = 0
    tower: int = 0  # parameters without the classifier
    linear_blocks: int = 0
    blocks: int = 0

    def conv(self, cin: int, cout: int, kernel: int, pixels: int, groups: int = 1) -> None:
        """A convolution with bias and this many output pixels."""
        weight = cout * cin // groups * kernel * kernel
        self.parameters += weight + cout
        self.macs += weight * pixels

    def linear(self, cin: int, cout: int, tokens: int, bias: bool = True) -> None:
        """A linear layer on tokens."""
        self.parameters += cin * cout + cout * bias
        self.macs += cin * cout * tokens

    def norm(self, width: int) -> None:
        """LayerNorm or BatchNorm; its element-wise work is not counted."""
        self.parameters += 2 * width

    def attention(self, kind: str, dress: Dress, site: Site, windows: int = 1) -> None:
        """Projections, equation and dress, in each of some windows."""
        C, info = site.width, declaration(kind).info
        self.linear(C, 4 * C, windows * site.length)
        self.parameters += sum(own_parameters(info, site).values()) + sum(dress_parameters(dress, site).values())
        self.macs += windows * (site.num_heads * core_macs(info, site) + dress_macs(dress, site))
        self.blocks += 1
        self.linear_blocks += kind != "softmax"

    def mlp(self, width: int, hidden: int, tokens: int) -> None:
        """Two linear layers."""
        self.linear(width, hidden, tokens)
        self.linear(hidden, width, tokens)


def cost(name: str, classes: int = 1000) -> Cost:
    """The cost of a registered size (``mavit_tiny``, ``mavit_tiny_linear``) at its own image size. Raises KeyError."""
    size, args = size_of(name)
    total = Cost()
    width = {"hierarchy": _hierarchy, "pvt": _pyramid, "swin": _windowed, "deit": _plain}[size.skeleton](total, args)
    total.tower = total.parameters
    total.linear(width, classes, 1)
    return total


def _published_dress(variant: str) -> Dress:
    return declaration(variant).dress("paper", {})


def _hierarchy(total: Cost, args: dict[str, Any]) -> int:
    dims, side, second = args["embed_dims"], args["img_size"], args["nala"]
    dress = _published_dress("nala" if second else "mala")
    pixels = [(-(-side // 2**i)) ** 2 for i in range(1, 3 + len(dims))]
    half = dims[0] // 2
    for cin, cout, area in ((3, half, 0), (half, half, 0), (half, half, 0), (half, dims[0], 1)):
        total.conv(cin, cout, 3, pixels[area])
        total.norm(cout)
    for i, kinds in enumerate(expand_flags(args["flags"], args["depths"], args["variant"])):
        C, N, grid = dims[i], pixels[i + 1], -(-side // 2 ** (i + 2))
        site = Site(width=C, num_heads=args["num_heads"][i], grid=(grid, grid), length=N)
        for kind in kinds:
            for _ in range(2 if second else 1):
                total.conv(C, C, 3, N, groups=C)
            hidden = int(args["mlp_ratios"][i] * C)
            total.attention(kind, dress, site)
            total.mlp(C, hidden, N)
            total.conv(hidden, hidden, 3, N, groups=hidden)
            total.parameters += 2 * 2 * C + (2 * C if args["layer_scale"][i] is not None else 0)
        if i + 1 < len(dims):
            total.conv(C, dims[i + 1], 3, pixels[i + 2])
            total.norm(dims[i + 1])
    total.linear(dims[-1], args["projection"], pixels[len(dims)])
    total.norm(args["projection"])
    return args["projection"]


def _pyramid(total: Cost, args: dict[str, Any]) -> int:
    cin, grid = 3, args["img_size"]
    for i, kinds in enumerate(expand_flags(args["flags"], args["depths"], args["variant"])):
        C, patch = args["embed_dims"][i], 4 if i == 0 else 2
        grid //= patch
        N = grid * grid
        total.conv(cin, C, patch, N)
        total.norm(C)
        total.parameters += N * C
        site = Site(width=C, num_heads=args["num_heads"][i], grid=(grid, grid), length=N)
        for kind in kinds:
            total.attention(kind, _published_dress(kind), site)
            total.mlp(C, int(args["mlp_ratios"][i] * C), N)
            total.parameters += 2 * 2 * C
        cin = C
    return cin


def _windowed(total: Cost, args: dict[str, Any]) -> int:
    C, grid = args["embed_dim"], args["img_size"] // 4
    total.conv(3, C, 4, grid * grid)
    total.norm(C)
    stages = expand_flags(args["flags"], args["depths"], args["variant"])
    places = iter(window_places(stages, (args["img_size"],) * 2, 4, args["window_size"], None))
    for i, kinds in enumerate(stages):
        for kind in kinds:
            w, _ = next(places)
            N = grid * grid
            site = Site(width=C, num_heads=args["num_heads"][i], grid=(w, w), length=w * w)
            total.attention(kind, Dress() if kind == "softmax" else _published_dress(kind), site, N // (w * w))
            total.mlp(C, int(args["mlp_ratio"] * C), N)
            total.parameters += 2 * 2 * C + ((2 * w - 1) ** 2 * site.num_heads if kind == "softmax" else 0)
        if i + 1 < len(stages):
            grid //= 2
            total.norm(4 * C)
            total.linear(4 * C, 2 * C, grid * grid, bias=False)
            C *= 2
    total.norm(C)
    return C


def _plain(total: Cost, args: dict[str, Any]) -> int:
    C, grid = args["embed_dim"], args["img_size"] // 16
    N = grid * grid + 1
    total.conv(3, C, 16, grid * grid)
    total.parameters += C + N * C
    site = Site(width=C, num_heads=args["num_heads"], grid=(grid, grid), length=N, prefix=1)
    (kinds,) = expand_flags(args["flags"], (args["depth"],), args["variant"])
    for kind in kinds:
        total.attention(kind, _published_dress(kind), site)
        total.mlp(C, int(args["mlp_ratio"] * C), N)
        total.parameters += 2 * 2 * C
    total.norm(C)
    return C
