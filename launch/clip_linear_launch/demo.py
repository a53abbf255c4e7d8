"""``clip-linear demo``: the whole loop on embedded data, by the code that a cluster runs, only small."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import time
from pathlib import Path

from clip_linear.errors import RunError, UserError, unknown
from clip_linear.files import write_text
from clip_linear.flags import Parser
from clip_linear.provenance import available_cores

SWEEP = "sweep.toml"
_MOST_RUNS = 8  # at a time: each takes about a gigabyte of memory


def main(argv: list[str]) -> int:
    """Write the data, run the sweep, fit and report; prints the path of report.html. What is there is not redone."""
    args = _parser().parse_args(argv)
    from clip_linear import emoji
    from clip_linear_eval.results import ROW_FIELDS
    from clip_linear_launch import actions, collect, layout, local, rundir
    from clip_linear_launch.commands.gather import fit_and_report
    from clip_linear_launch.expand import expand
    from clip_linear_launch.sweep import load

    if args.x not in ROW_FIELDS:
        raise unknown("column", args.x, ROW_FIELDS, "give --x n_params_vision, gmacs_total or samples_seen")
    name = "demo-quick" if args.quick else "demo"
    out = Path(args.out or name).resolve()
    began = time.monotonic()
    text = sweep_text(name, args.samples, args.seeds)
    _check_folder(out)
    emoji.write(out / "data")
    write_text(out / SWEEP, text)
    sweep = load(out / SWEEP)
    runs = expand(sweep)
    folders = layout.lay_out(sweep, runs)
    with local.only_queue(sweep.folder):
        due, seen = actions.due(folders, sweep.limits.max_retries, retry_failed=True)
        say(actions.summary(seen, len(due)))
        actions.clear_end(due)
        cost = {r.run_id: r.gmacs_total for r in runs}
        due.sort(key=lambda folder: -cost[folder.name])  # the longest first: none is left to run alone at the end
        # One thread a run: a second would stand still while Python and the data load.
        limits = dataclasses.replace(sweep.limits, max_parallel=max(1, min(available_cores(), _MOST_RUNS)))
        ended = local.Queue(due, limits, say).run()
    if ended["stopped"]:
        say("stopped; the same command continues")
        return 130
    if ended["failed"]:
        failed = ended["failed"][0]
        reason = rundir.read(failed / rundir.FAILED).get("reason")
        raise RunError(f"{len(ended['failed'])} runs failed; first {failed.name}: {reason} (log: {failed / 'log'})")
    counting, _ = collect.collect(sweep.folder)
    say(f"{len(runs)} runs, {len(counting)} rows in {time.monotonic() - began:.0f} s")
    code = fit_and_report(sweep.folder, args.x, "top5", "twemoji_objects")
    say(str(out / "report.html"))
    return code


def say(text: str) -> None:
    """Print a line now, also into a pipe."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="clip-linear demo",
        description="Train small softmax and linear-attention CLIP models on embedded emoji, measure zero-shot "
        "accuracy on a design team never trained on, fit power laws and write report.html. Ten minutes on two cores; "
        "the same command continues what was interrupted.",
    )
    parser.add_argument("--out", metavar="DIR", help="where everything goes (default: demo, or demo-quick)")
    parser.add_argument("--quick", action="store_true", help="three variants at three sizes, in three minutes")
    parser.add_argument("--samples", type=int, metavar="N", help="samples seen by each run")
    parser.add_argument("--seeds", type=int, metavar="K", help="seeds of each model (default: 1)")
    parser.add_argument("--x", default="n_params_vision", help="what error is fitted against (a column of the rows)")
    return parser


def _check_folder(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {str(out)!r} is a file; give a folder")
    if (
        out.is_dir()
        and any(out.iterdir())
        and not (out / SWEEP).exists()
        and not (out / "data" / "emoji.json").exists()
    ):
        raise UserError(f"--out {str(out)!r} holds other files; give a new or empty folder, or one of an earlier demo")


def sweeps_folder() -> Path:
    """Where the sweeps that come with clip_linear lie: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).parent
    return next((p for p in (package / "sweeps", package.parent / "sweeps") if p.is_dir()), package / "sweeps")


def sweep_text(name: str, samples: int | None, seeds: int | None) -> str:
    """A packaged sweep as it stands in the demo's folder, with these samples and seeds. Raises UserError."""
    for flag, value in (("--samples", samples), ("--seeds", seeds)):
        if value is not None and value < 1:
            raise UserError(f"{flag} {value} must be at least 1")
    text = (sweeps_folder() / f"{name}.toml").read_text(encoding="utf-8")
    text = _replaced(text, r"^\[sweep\]$", '[sweep]\nfolder = "."')
    if samples is not None:
        text = _replaced(text, r"^samples = .*$", f"samples = [{samples}]")
    if seeds is not None:
        text = _replaced(text, r"^seed = .*$", f"seed = {list(range(seeds))}")
    return text


def _replaced(text: str, pattern: str, line: str) -> str:
    new, count = re.subn(pattern, line, text, flags=re.MULTILINE)
    assert count == 1, f"{pattern} stands {count} times in the packaged sweep"
    return new


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
