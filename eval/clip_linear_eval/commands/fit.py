"""``clip-linear fit``: power laws of rows, per group, with intervals and comparison; writes fit.json."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

FORMS = ("power", "saturating", "shifted", "chinchilla", "isoflop")
OBJECTIVES = ("gaussian", "huber", "chinchilla", "l1", "linear")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="clip-linear fit", description=__doc__)
    p.add_argument("rows", metavar="ROWS", help="CSV, JSONL or parquet")
    p.add_argument("--x", required=True, metavar="COL", help="size, compute, samples or time, e.g. n_params_vision")
    p.add_argument(
        "--y", required=True, metavar="COL", help="what falls: a loss, an error; 'error' = 1 - value of our rows"
    )
    p.add_argument("--x2", metavar="COL", help="second factor of --form chinchilla")
    p.add_argument("--group", metavar="COL", help="one law per value, e.g. image_variant")
    p.add_argument("--ref", metavar="NAME", help="the group that the others are compared with (default: softmax)")
    p.add_argument("--unit", choices=("fraction", "percent", "loss"), help="unit of y; percent becomes a fraction")
    p.add_argument("--where", action="append", default=[], metavar="COL=VALUE", help="only these rows; repeatable")
    p.add_argument("--max-x", type=float, metavar="V", help="leave out rows with a larger x")
    p.add_argument("--drop-top-y", type=int, default=0, metavar="K", help="leave out the K rows with the highest y")
    p.add_argument("--form", choices=FORMS, default="power")
    p.add_argument("--budget", metavar="COL", help="compute budget of --form isoflop (the best x at each budget)")
    p.add_argument("--objective", choices=OBJECTIVES, default="gaussian")
    p.add_argument("--sigma", metavar="COL", help="standard deviation of ln y, as weights")
    p.add_argument("--predict", default="", metavar="X,…", help="y at these x, with intervals")
    p.add_argument("--json", action="store_true", help="print fit.json instead of a line per group")
    p.add_argument("--out", type=Path, metavar="DIR", help="where fit.json goes (default: here; nowhere with --json)")
    return p


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    from clip_linear.files import write_json
    from clip_linear_eval.fit_screen import FitRefused
    from clip_linear_eval.report_words import describe

    try:
        result = run(args)
    except FitRefused as refusal:
        if args.json:
            body = {"status": "refused", "code": refusal.code, "message": str(refusal), "missing": refusal.missing}
            json.dump(body, sys.stdout, indent=1)
            print()
            return 2
        raise
    if args.out is not None or not args.json:
        out = (args.out or Path()) / "fit.json"
        write_json(out, result)
    if args.json:
        json.dump(result, sys.stdout, indent=1, ensure_ascii=False, allow_nan=False)
        print()
    else:
        print("\n".join(describe(result)))
        print(f"wrote {out}")
    return 0


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The content of fit.json for parsed arguments."""
    from clip_linear.errors import UserError
    from clip_linear_eval.fit_input import Columns, read_table
    from clip_linear_eval.fit_table import fit_table

    try:
        predict = [float(v) for v in args.predict.split(",") if v.strip()]
    except ValueError:
        raise UserError(f"--predict {args.predict!r} is not a list of numbers; e.g. --predict 3e8,1e9") from None
    for flag, form in (("x2", "chinchilla"), ("budget", "isoflop")):
        if (getattr(args, flag) is not None) != (args.form == form):
            raise UserError(f"--{flag} and --form {form} need each other; give both or neither")
    columns = Columns(
        x=args.x,
        y=args.y,
        x2=args.x2,
        budget=args.budget,
        sigma=args.sigma,
        group=args.group,
        where=tuple(args.where),
        unit=args.unit,
        max_x=args.max_x,
        drop_top_y=args.drop_top_y,
    )
    fits = fit_table(
        read_table(args.rows), columns, form=args.form, objective=args.objective, ref=args.ref, predict=predict
    )
    return fits.json
