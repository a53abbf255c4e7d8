"""Time block sizes and warps of the Triton kernels on this GPU and print the entries that beat the table.

    PYTHONPATH=.:kernels python kernels/bench/tune.py --width 64 --length 16384

Nothing is changed: put a line that wins into kernels/clip_linear_kernels/gpu/configs.py, where the offline compile test
checks it for spills. Each candidate passes the correctness gate before it is timed.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from typing import Any


def main(argv: list[str]) -> int:
    """Print a line per kernel; 1 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, choices=[64, 128], default=64)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--rows", type=int, default=48, help="B·H")
    args = parser.parse_args(argv)
    import torch

    if not torch.cuda.is_available():
        print("no GPU here: there is nothing to tune", file=sys.stderr)
        return 1
    from clip_linear_kernels.gpu import configs

    major, minor = torch.cuda.get_device_capability()
    table = configs.TABLES[configs.generation(10 * major + minor)]
    for kernel in (k for k in table if args.width in table[k] and not k.endswith("_den") and k != "causal_suffix"):
        causal = kernel.startswith("causal")
        before = table[kernel][args.width]
        best, fastest = before, _seconds(args, causal)
        for block, warps, stages in product((16, 32, 64, 128), (4, 8), (1, 2, 3)):
            table[kernel][args.width] = configs.Config(block, warps, stages)
            seconds = _try(args, causal)
            if seconds is not None and seconds < 0.98 * fastest:
                best, fastest = table[kernel][args.width], seconds
        table[kernel][args.width] = best
        print(f"{kernel} {args.width}: {before} -> {best}, forward and backward {fastest * 1e3:.3f} ms", flush=True)
    return 0


def _try(args: argparse.Namespace, causal: bool) -> float | None:
    from triton.runtime.errors import OutOfResources

    from clip_linear_kernels import linear_attention
    from clip_linear_kernels.testing import Case, errors

    try:
        case = Case(length=333, width=args.width, value_width=64, causal=causal, normaliser="mala")
        return _seconds(args, causal) if max(errors(linear_attention, case, "cuda").values()) < 1e-3 else None
    except OutOfResources:
        return None


def _seconds(args: argparse.Namespace, causal: bool) -> float:
    import torch

    from clip_linear_kernels import linear_attention
    from clip_linear_kernels.timing import interleave

    def draw(width: int) -> Any:
        return torch.randn(1, args.rows, args.length, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    q, k, v = draw(args.width), draw(args.width), draw(64)
    g = torch.randn_like(v)

    def step() -> object:
        out = linear_attention(q, k, v, feature="elu1", normaliser="mala", causal=causal)
        return torch.autograd.grad(out, (q, k, v), g)

    return interleave({"step": step}, budget_s=0.2, device="cuda")["step"].median


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
