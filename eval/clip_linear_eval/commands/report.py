"""``clip-linear report``: one self-contained HTML page, the same in Markdown, and its first figure as SVG."""

from __future__ import annotations

import argparse
from pathlib import Path

from clip_linear.flags import Parser


def parser() -> argparse.ArgumentParser:
    p = Parser(prog="clip-linear report", description=__doc__)
    p.add_argument("source", metavar="DIR|ROWS", type=Path, help="a sweep's folder (rows.csv, fit.json, runs/) or rows")
    p.add_argument(
        "--fit", type=Path, metavar="FIT.json", help="the fit to show (default: DIR/fit.json, else fits made here)"
    )
    p.add_argument("--out", type=Path, metavar="DIR", help="where report.html, report.md and scaling.svg go")
    return p


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    from clip_linear_eval.report import write_report

    print(write_report(args.source, args.fit, args.out))
    return 0
