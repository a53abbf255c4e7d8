"""``clip-linear fit``: power laws of rows, per group, with intervals and comparison; writes fit.json."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from clip_linear.flags import Parser

FORMS = ("power", "saturating", "shifted", "chinchilla", "isoflop", "auto")
OBJECTIVES = ("gaussian", "huber", "chinchilla", "l1", "linear")
FRONTIERS = ("none", "pareto", "cherti", "nezhurina")


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="clip-linear fit",
        description="Power laws of rows, one per group, with intervals and comparison; writes fit.json.",
        epilog="forms: power y = A x^-alpha; saturating E + A x^-alpha; shifted E + A (x + B)^-alpha; chinchilla "
        "E + A x^-alpha + B x2^-beta; isoflop: the best x at each budget; auto: chosen by hold-out and AICc.",
    )
    p.add_argument("rows", metavar="ROWS", help="CSV, JSONL or parquet")
    p.add_argument("--x", required=True, metavar="COL", help="size, compute, samples or time, e.g. n_params_vision")
    p.add_argument("--y", required=True, metavar="COL", help="a loss or an error; 'error' is 1 - value of our rows")
    p.add_argument("--x2", metavar="COL", help="second factor of --form chinchilla")
    p.add_argument("--budget", metavar="COL", help="compute budget of --form isoflop")
    p.add_argument("--group", metavar="COL", help="one law per value, e.g. image_variant")
    p.add_argument("--ref", metavar="NAME", help="the group that the others are compared with (default: softmax)")
    p.add_argument("--unit", choices=("fraction", "percent", "loss"), help="unit of y; percent becomes a fraction")
    p.add_argument("--where", action="append", default=[], metavar="COL=VALUE", help="only these rows; repeatable")
    p.add_argument("--max-x", type=float, metavar="V", help="leave out rows with a larger x")
    p.add_argument("--drop-top-y", type=int, default=0, metavar="K", help="leave out the K rows with the highest y")
    p.add_argument("--frontier", choices=FRONTIERS, default="none", help="fit only the best runs by this rule")
    p.add_argument("--form", choices=FORMS, default="power", help="default: power")
    p.add_argument("--objective", choices=OBJECTIVES, default="gaussian", help="default: gaussian, on ln y")
    p.add_argument("--sigma", metavar="COL", help="standard deviation of ln y as weights; 'seeds': from replicates")
    p.add_argument("--predict", default="", metavar="X,…", help="y at these x (X:X2 for chinchilla), with intervals")
    p.add_argument("--hold-out", metavar="largest|K", help="predict the K largest sizes (largest: 1) from the rest")
    p.add_argument("--bootstrap", type=int, default=0, metavar="N", help="resample runs N times")
    p.add_argument("--seed", type=int, default=0, help="of the bootstrap (default: 0)")
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
        if not args.json:
            raise
        body = {"status": "refused", "code": refusal.code, "message": str(refusal), "missing": refusal.missing}
        print(json.dumps(body, indent=1, ensure_ascii=False))
        return 2
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
    from clip_linear_eval.fit import Options
    from clip_linear_eval.fit_input import Columns
    from clip_linear_eval.fit_read import read_table, source
    from clip_linear_eval.fit_table import fit_table

    for flag, form in (("x2", "chinchilla"), ("budget", "isoflop")):
        if (getattr(args, flag) is not None) != (args.form == form):
            raise UserError(f"--{flag} and --form {form} need each other; give both or neither")
    _check_together(args)
    for flag in ("bootstrap", "drop_top_y"):
        if getattr(args, flag) < 0:
            raise UserError(f"--{flag.replace('_', '-')} {getattr(args, flag)} is negative; give a number from 0")
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
    options = Options(
        form=args.form,
        objective=args.objective,
        frontier=args.frontier,
        predict=_predict(args.predict, args.form),
        hold_out=_hold_out(args.hold_out),
        bootstrap=args.bootstrap,
        seed=args.seed,
    )
    path = Path(args.rows)
    return fit_table(read_table(path), columns, options, args.ref).json | {"source": source(path)}


def _check_together(args: argparse.Namespace) -> None:
    """A flag that would be ignored is a mistake."""
    from clip_linear.errors import UserError

    if args.ref is not None and args.group is None:
        raise UserError(f"--ref {args.ref!r} needs --group COL, whose values are compared")
    alone = {
        "isoflop": ("predict", "hold_out", "bootstrap", "sigma", "frontier", "objective"),
        "chinchilla": ("frontier",),
    }
    plain = parser().parse_args([args.rows, "--x", args.x, "--y", args.y])
    for flag in alone.get(args.form, ()):
        if getattr(args, flag) != getattr(plain, flag):
            raise UserError(f"--{flag.replace('_', '-')} has no meaning with --form {args.form}; leave it out")


def _predict(text: str, form: str) -> tuple[Any, ...]:
    from clip_linear.errors import UserError

    wanted = 2 if form == "chinchilla" else 1
    try:
        found = [tuple(float(v) for v in part.split(":")) for part in text.split(",") if part.strip()]
    except ValueError:
        found = [()]
    if any(len(v) != wanted or min(v) <= 0 for v in found):
        example = "3e8:1e10,1e9:1e10" if wanted == 2 else "3e8,1e9"
        raise UserError(f"--predict {text!r} is not a list of positive numbers; e.g. --predict {example}")
    return tuple(found)


def _hold_out(text: str | None) -> int:
    from clip_linear.errors import UserError

    if text in (None, "largest"):
        return 0 if text is None else 1
    if not text.isdigit() or int(text) < 1:
        raise UserError(f"--hold-out {text!r} is neither 'largest' nor a number of sizes from 1")
    return int(text)
