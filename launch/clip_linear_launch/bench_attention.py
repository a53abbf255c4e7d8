"""``clip-linear bench attention``: every variant and backend beside softmax, after all of them proved right."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from clip_linear.errors import RunError, UserError
from clip_linear.flags import Parser

QUICK = {"variants": ["affine_eq7", "mala"], "lengths": [197, 1024, 4096], "budget_s": 0.15}


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``clip-linear bench attention``."""
    parser = Parser(
        prog="clip-linear bench attention",
        description="Time and memory of attention: variants on the chosen backend and in plain torch operators, beside "
        "fused (SDPA) and naive softmax, in turns. Speed is printed only after outputs and gradients agree with the "
        "float64 reference.",
    )
    parser.add_argument("--variants", nargs="+", default=["affine_eq4", "affine_eq7", "elu", "mala", "relu"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[197, 1024, 4096, 16384, 65536], metavar="N")
    parser.add_argument("--batch", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--heads", type=int, default=6, help="(%(default)s)")
    parser.add_argument("--head-dim", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--threads", type=int, help="of the CPU (default: torch's choice)")
    parser.add_argument("--causal", choices=["no", "yes", "both"], default="both", help="(%(default)s)")
    parser.add_argument("--mode", choices=["forward", "full", "both"], default="both", help="full: and backward")
    parser.add_argument("--budget-s", type=float, default=1.5, help="for one length, mode and variant (%(default)s)")
    parser.add_argument("--limit-s", type=float, default=4.0, help="leave out calls that take longer (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="two variants, three lengths: about two minutes")
    parser.add_argument("--peers", action="store_true", help="also flash-linear-attention (fla-core), on a GPU")
    parser.add_argument("--out", type=Path, default=Path("results/bench"), help="folder of CSV and plot (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    return parser


def main(argv: list[str]) -> int:
    """Check, measure, print, write; returns the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.quick:
        for name, value in QUICK.items():
            if getattr(args, name) == parser.get_default(name):
                setattr(args, name, value)
    for name in ("batch", "heads", "head_dim", *(["threads"] if args.threads is not None else [])):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}; give at least 1")
    if min(args.lengths) < 1 or args.budget_s <= 0 or args.limit_s <= 0:
        raise UserError("--lengths, --budget-s and --limit-s must be positive")
    args.lengths = sorted(set(args.lengths))

    import torch

    from clip_linear.registry import list_variants, variant_class

    for name in args.variants:
        variant_class(name)  # says what is known when it is not
        if name == "softmax":
            raise UserError("softmax is what variants are compared with; --variants takes: " + str(list_variants()[1:]))
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but this process sees no GPU; use --device cpu")
    if args.peers and args.device != "cuda":
        raise UserError("--peers needs a GPU: flash-linear-attention has no CPU kernels")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    from clip_linear_launch.bench_attention_measure import gate, measure, summarise

    wrong = gate(args)
    if wrong:
        raise RunError("no speed is shown, outputs or gradients are wrong: " + "; ".join(wrong))
    rows = measure(args, lambda line: sys.stderr.write(line + "\n"))
    summary = summarise(rows)
    stem = f"attention_{args.device}_{args.dtype}_b{args.batch}_h{args.heads}_d{args.head_dim}"
    if args.device == "cpu":
        stem += f"_t{torch.get_num_threads()}"
    command = "clip-linear bench attention " + " ".join(argv)
    _write(args.out, stem, rows, command)
    if args.json:
        sys.stdout.write(json.dumps({"command": command, "rows": rows, "summary": summary}) + "\n")
    else:
        sys.stdout.write(_table(rows, summary) + f"written: {args.out / stem}.csv and .svg\n")
    return 0


def _table(rows: list[dict[str, Any]], summary: list[dict[str, Any]]) -> str:
    lines = [
        "variant       provider   mode     causal       N   median ms [20 %, 80 %]       "
        " vs SDPA    best vs eager    MiB"
    ]
    for r in rows:
        spread = f"[{r['y_value_20']:.3g}, {r['y_value_80']:.3g}]"
        shown = (r["ratio_to_sdpa"], r["best_ratio_to_sdpa"], r["ratio_to_eager"])
        ratios = "  ".join("      -" if x is None else f"{x:7.2f}" for x in shown)
        memory = "-" if r["peak_mib"] is None else f"{r['peak_mib']:.0f}"
        lines.append(
            f"{r['kernel_name']:<13} {r['kernel_provider']:<10} {r['kernel_operation_mode']:<8} {r['causal']!s:<6} "
            f"{r['x_value']:>7} {r['y_value_50']:>11.3f} {spread:<18} {ratios} {memory:>6}"
        )
    lines.append(
        "\nratios: times of SDPA and of plain torch operators over this time; above 1 this is faster; "
        "best: of the fastest calls, which a busy machine disturbs least"
    )
    for s in summary:
        cross = "not in range" if s["crossover_n"] is None else f"N = {s['crossover_n']:.0f}"
        slope = "-" if s["slope"] is None else f"{s['slope']:.2f}"
        lines.append(
            f"{s['kernel_name']} {s['kernel_provider']} {s['mode']} causal={s['causal']}: "
            f"log-log slope {slope}, faster than SDPA from {cross}"
        )
    return "\n".join(lines) + "\n"


def _write(folder: Path, stem: str, rows: list[dict[str, Any]], command: str) -> None:
    import csv
    import io

    from clip_linear.files import replacing, write_text

    text = io.StringIO()
    text.write(f"# {command}\n")
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: "" if v is None else v for k, v in row.items()} for row in rows)
    write_text(folder / f"{stem}.csv", text.getvalue())
    with replacing(folder / f"{stem}.svg") as path:
        _plot(path, rows, command)


def _plot(path: Path, rows: list[dict[str, Any]], command: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    panels = sorted({(r["kernel_operation_mode"], r["causal"]) for r in rows})
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 4), sharey=True, squeeze=False)
    for axis, (mode, causal) in zip(axes[0], panels):
        here = [r for r in rows if (r["kernel_operation_mode"], r["causal"]) == (mode, causal)]
        for name, provider in sorted({(r["kernel_name"], r["kernel_provider"]) for r in here}):
            line = [r for r in here if (r["kernel_name"], r["kernel_provider"]) == (name, provider)]
            style = "k-" if name == "softmax" and provider == "sdpa" else "k:" if name == "softmax" else "-"
            style = "--" if provider == "eager" else style
            x, y = [r["x_value"] for r in line], [r["y_value_50"] for r in line]
            axis.loglog(x, y, style, marker=".", label=f"{name} ({provider})")
        axis.set(title=f"{mode}{', causal' if causal else ''}", xlabel="tokens N")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("ms a call (median)")
    axes[0][-1].legend(fontsize=7)
    r = rows[0]
    figure.suptitle(f"{r['device']}, {r['dtype']}, B={r['batch']}, H={r['heads']}, D={r['head_dim']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, format="svg", metadata={"Description": command, "Date": None})
    plt.close(figure)
