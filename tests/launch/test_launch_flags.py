"""Our flags are part of the contract: adding one is deliberate."""

import argparse

from clip_linear_launch import cli, demo

FLAGS = {
    "plan": "--backend --json --root --sbatch --simulate --test-only --yes",
    "run": "--backend --detach --dry-run --max-parallel --resubmit --retry-failed --root --yes",
    "retry": "--backend --detach --max-parallel --root --yes",
    "status": "--json --root --watch",
    "logs": "--follow --lines --rank --root -f -n",
    "cancel": "--root",
    "collect": "--json --root",
    "report": "--dataset --metric --root --x",
    "export": "--out --root",
    "clean": "--checkpoints --dry-run --root",
}


def flags(parser):
    return " ".join(sorted(s for a in parser._actions for s in a.option_strings if s not in ("-h", "--help")))


def test_launch():
    (actions,) = (a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction))
    assert {name: flags(p) for name, p in actions.choices.items()} == FLAGS


def test_demo():
    assert flags(demo._parser()) == "--out --quick --samples --seeds --x"
