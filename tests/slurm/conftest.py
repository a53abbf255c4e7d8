"""Tests against a real Slurm: the one that tests/slurm/run brings up on this machine."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster

SMALL_CONF = Path("/var/lib/slurm-sbx-small/etc/slurm.conf")


def _answers(env=None):
    if shutil.which("scontrol") is None:
        return False
    try:
        done = subprocess.run(["scontrol", "ping"], capture_output=True, timeout=20, env=env)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


@pytest.fixture(scope="session")
def slurm():
    """The local Slurm, or a skip that says how to get it."""
    if not _answers():
        pytest.skip("no Slurm answers here; run: make test-slurm (as root on Debian)")


@pytest.fixture
def cluster(slurm, tmp_path):
    """A sweep folder whose jobs go to nodes 1 and 2; what is left in the queue is cancelled at the end."""
    made = Cluster(tmp_path)
    yield made
    made.end()


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The second cluster: one node, no accounting, MaxArraySize 4."""
    env = os.environ | {"SLURM_CONF": str(SMALL_CONF)}
    if not SMALL_CONF.exists() or not _answers(env):
        pytest.skip("the second local Slurm does not answer; run: make test-slurm (as root on Debian)")
    monkeypatch.setenv("SLURM_CONF", str(SMALL_CONF))
    made = Cluster(tmp_path, exclude=())
    yield made
    made.end()
