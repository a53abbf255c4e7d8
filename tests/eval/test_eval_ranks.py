"""Two processes give exactly what one gives: classification, retrieval, bad images."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.eval.evalsets import NAMES

KEYS = ("metric", "value", "n", "correct", "ci_low", "ci_high", "errors", "names_hash")


def start(argv: list[str], size: int) -> list[subprocess.CompletedProcess[str]]:
    """The command on ``size`` ranks, as torchrun would start it."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    processes = []
    for rank in range(size):
        env = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-m", "clip_linear", "eval", *argv]
        processes.append(subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    done = []
    for process in processes:
        out, err = process.communicate(timeout=240)
        done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return done


@pytest.fixture(scope="module")
def sets(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("ranks")
    broken = shutil.copytree(folder, root / "broken")
    (broken / "0003" / "2.jpg").write_bytes(b"torn")
    pairs = root / "pairs.csv"
    images = sorted(folder.glob("*/*.jpg"))
    rows = [f"{path},{NAMES[i % 7]} {i // 7}" for i, path in enumerate(images)]
    pairs.write_text("\n".join(["filepath,caption", *rows]))
    return broken, pairs


@pytest.mark.slow
def test_two_processes_equal_one(config: Path, weights: Path, sets: tuple[Path, Path]) -> None:
    argv = ["--model", str(config), "--pretrained", str(weights), "--json", "--batch-size", "5", "--on-error", "skip"]
    argv += ["--dataset", *map(str, sets)]
    (one,), (first, second) = start(argv, 1), start(argv, 2)
    assert (one.returncode, first.returncode, second.returncode) == (0, 0, 0), first.stderr + second.stderr
    assert second.stdout == ""
    alone, together = json.loads(one.stdout), json.loads(first.stdout)
    assert [[r.get(k) for k in KEYS] for r in together] == [[r.get(k) for k in KEYS] for r in alone]
    assert together[0]["n"] == 27 and together[0]["errors"][0]["file"] == "0003/2.jpg"
    assert together[-1]["n"] == 28 and together[0]["world_size"] == 2


@pytest.mark.slow
def test_all_ranks_stop_at_a_bad_image(config: Path, weights: Path, sets: tuple[Path, Path]) -> None:
    argv = ["--model", str(config), "--pretrained", str(weights), "--dataset", str(sets[0]), "--batch-size", "5"]
    for process in start(argv, 2):
        assert process.returncode == 1 and "0003/2.jpg" in process.stderr
