"""``clip-linear power``: how many seeds per size show a difference of exponents between two variants."""

from __future__ import annotations

import argparse
import dataclasses
import json

from clip_linear.flags import Parser


def parser() -> argparse.ArgumentParser:
    p = Parser(prog="clip-linear power", description=__doc__)
    p.add_argument("--sizes", required=True, metavar="X,…", help="sizes of the sweep, e.g. 22e6,86e6,304e6")
    p.add_argument(
        "--noise", required=True, type=float, metavar="SD", help="sd of ln y between seeds, e.g. 0.02 for 2 %%"
    )
    p.add_argument("--delta", type=float, default=0.03, help="difference of exponents to show (default: 0.03)")
    p.add_argument("--power", type=float, default=0.8, help="wanted chance to show it (default: 0.8)")
    p.add_argument(
        "--variants", type=int, default=2, help="with the reference; more than 2 share the 5 %% (Bonferroni)"
    )
    p.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return p


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    from clip_linear.errors import UserError
    from clip_linear_eval.power import seeds_needed

    try:
        sizes = [float(v) for v in args.sizes.split(",") if v.strip()]
    except ValueError:
        raise UserError(f"--sizes {args.sizes!r} is not a list of numbers; e.g. --sizes 22e6,86e6,304e6") from None
    if args.variants < 2:
        raise UserError(f"--variants {args.variants}: a comparison needs at least 2")
    designs = seeds_needed(sizes, args.noise, args.delta, wanted=args.power, comparisons=args.variants - 1)
    if args.json:
        told = {
            "sizes": sizes,
            "noise": args.noise,
            "delta": args.delta,
            "wanted": args.power,
            "variants": args.variants,
        }
        table = [
            {k: v if v == v and abs(v) != float("inf") else None for k, v in dataclasses.asdict(d).items()}
            for d in designs
        ]
        print(json.dumps({**told, "seeds": designs[-1].seeds, "designs": table}, indent=1))
        return 0
    from clip_linear.table import render

    shown = designs if len(designs) <= 12 else [*designs[:5], *designs[-5:]]
    rows = [(f"{d.seeds}", f"{d.dof}", f"{d.power:.0%}", f"{d.half_width:.4f}", f"{d.detectable:.4f}") for d in shown]
    print(render(("seeds", "dof", f"power at {args.delta:g}", "95 % half-width", "detectable"), rows), end="")
    runs = designs[-1].seeds * len(sizes) * args.variants
    print(f"{designs[-1].seeds} seeds ({runs} runs in all) show a difference of {args.delta:g} with {args.power:.0%}.")
    return 0
