"""The wheel holds what it should, and works from a folder that is not the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return next(out.glob("*.whl"))


def test_wheel_contents(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {n.split("/")[0] for n in names}
    packages = {"clip_linear", "clip_linear_kernels", "clip_linear_launch", "clip_linear_eval"}
    assert {t for t in tops if not t.endswith(".dist-info")} == packages
    wanted = ["clip_linear/emoji/concepts.jsonl", "clip_linear/emoji/twemoji.webp", "clip_linear/variants/mala.py"]
    wanted += ["clip_linear_launch/sweeps/demo.toml", "clip_linear_eval/results.py"]
    assert not [w for w in wanted if w not in names]
    assert any(n.endswith("licenses/LICENSE") for n in names) and any(n.endswith("licenses/NOTICE") for n in names)


def test_wheel_runs_elsewhere(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(tmp_path / "site")}
    code = (
        "import clip_linear, clip_linear_eval, clip_linear_launch, clip_linear_kernels\n"
        "from clip_linear.__main__ import main\n"
        "print(clip_linear.__file__)\n"
        "print(clip_linear.list_variants())\n"
        "main(['--help'])\n"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert out.stdout.startswith(str(tmp_path)) and "mala" in out.stdout and "demo" in out.stdout
