"""The Triton kernels against the float64 reference, in Triton's interpreter: outputs and gradients, no GPU needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed; pip install triton")


@pytest.fixture(scope="module")
def rows():
    env = os.environ | {"TRITON_INTERPRET": "1", "CLIP_LINEAR_BACKEND": "triton"}
    script = Path(__file__).with_name("interpreted.py")
    run = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_the_kernels_served_every_case(rows):
    assert len(rows) > 50
    assert {row["backend"] for row in rows} == {"triton"}


def test_float32(rows):
    for row in rows:
        if row["dtype"] == "torch.float32":
            assert max(row["errors"].values()) < 1e-5, row


def test_half(rows):
    # Relative to the largest value; one unit in the last place of bfloat16 is 8e-3, of float16 1e-3.
    for row in rows:
        if row["dtype"] != "torch.float32":
            limit = 1.5e-2 if row["dtype"] == "torch.bfloat16" else 2e-3
            assert max(row["errors"].values()) < limit, row
