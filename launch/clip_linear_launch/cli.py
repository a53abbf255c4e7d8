"""``clip-linear launch``: plan, run, status, logs, cancel, retry, collect, report, export and clean a sweep."""

from __future__ import annotations

import argparse
import sys

from clip_linear.flags import Parser

_HELP = {
    "plan": "the runs of a sweep as a table, with costs; starts nothing",
    "run": "start what is due: new, interrupted, lost and retriable runs; finished and live ones are left",
    "status": "the state of every run, from the run folders and one look at the scheduler",
    "logs": "the log of a run",
    "cancel": "cancel runs; they stay cancelled until `run --resubmit`",
    "retry": "start failed runs again",
    "collect": "gather the rows of all finished runs into rows.csv",
    "report": "collect, fit and report in one go",
    "export": "write plain sbatch scripts, for sites where submitit is not allowed",
    "clean": "remove what finished runs no longer need",
}


def main(argv: list[str]) -> int:
    """Run one subcommand; returns its exit code."""
    args = _parser().parse_args(argv)
    from clip_linear_launch.commands import action

    return action(args.action)(args)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="clip-linear launch", description="Sweeps over models, variants and samples seen: here or on a cluster."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(name: str) -> argparse.ArgumentParser:
        p = actions.add_parser(name, help=_HELP[name], description=_HELP[name][0].upper() + _HELP[name][1:] + ".")
        p.add_argument("sweep", metavar="SWEEP.toml", help="the sweep file")
        p.add_argument("--root", metavar="DIR", help="use this folder instead of [sweep] root")
        return p

    backends = ("local", "slurm", "auto")
    plan = add("plan")
    plan.add_argument("--json", action="store_true", help="print the runs as a JSON list")
    plan.add_argument("--backend", choices=backends, help="instead of [sweep] backend")
    plan.add_argument("--sbatch", action="store_true", help="also print the sbatch text of each resource group")
    plan.add_argument("--test-only", action="store_true", help="also ask Slurm whether it would take the jobs")
    plan.add_argument("--simulate", nargs="*", metavar="KEY=VALUE", help="replay the sweep on a model cluster")
    plan.add_argument("--yes", action="store_true", help="plan above [limits] max_gpu_hours too")
    for name in ("run", "retry"):
        run = add(name)
        if name == "retry":
            run.add_argument(
                "runs", nargs="*", metavar="RUN", help="run ids or parts of them; default: all failed ones"
            )
        else:
            run.add_argument("--dry-run", action="store_true", help="say what would start, and stop")
            run.add_argument("--retry-failed", action="store_true", help="also start runs that failed with an error")
            run.add_argument("--resubmit", action="store_true", help="also start cancelled runs")
        run.add_argument("--backend", choices=backends, help="instead of [sweep] backend")
        run.add_argument("--max-parallel", type=int, metavar="N", help="local: runs at a time")
        run.add_argument("--detach", action="store_true", help="local: go on in the background, also after logging out")
        run.add_argument("--yes", action="store_true", help="start a sweep above [limits] max_gpu_hours")
    status = add("status")
    status.add_argument("--json", action="store_true", help="print a JSON list")
    status.add_argument("--watch", nargs="?", type=float, const=10.0, metavar="S", help="print again every S seconds")
    logs = add("logs")
    logs.add_argument("run", nargs="?", metavar="RUN", help="run id or a part of it; default: the one that ran last")
    logs.add_argument("-f", "--follow", action="store_true", help="go on as the log grows")
    logs.add_argument("--rank", type=int, default=0, help="which rank's log")
    logs.add_argument("-n", "--lines", type=int, default=40, help="how many lines of the end")
    cancel = add("cancel")
    cancel.add_argument("runs", nargs="*", metavar="RUN", help="run ids or parts of them; default: all")
    add("collect").add_argument("--json", action="store_true", help="print the rows as a JSON list")
    report = add("report")
    report.add_argument("--x", default="n_params_vision", help="what error is fitted against")
    report.add_argument("--metric", default="top1", help="what is fitted: 1 - METRIC (default: top1)")
    report.add_argument("--dataset", help="on which evaluation set (default: the first)")
    export = add("export")
    export.add_argument("--out", metavar="DIR", help="where to write (default: the sweep's folder/sbatch)")
    clean = add("clean")
    clean.add_argument("--checkpoints", action="store_true", help="also remove the checkpoints of finished runs")
    clean.add_argument("--dry-run", action="store_true", help="say what would be removed")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
