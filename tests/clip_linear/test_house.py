"""The shape of the house: no stray packages, no heavy imports where they would be felt."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "clip_linear": "clip_linear",
    "clip_linear_kernels": "kernels/clip_linear_kernels",
    "clip_linear_launch": "launch/clip_linear_launch",
    "clip_linear_eval": "eval/clip_linear_eval",
}


@pytest.mark.parametrize("folder", ["kernels", "launch", "eval", "tests", "results"])
def test_source_roots_are_not_packages(folder):
    assert not (ROOT / folder / "__init__.py").exists()


def test_tests_are_not_packages():
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_no_file_holds_a_second_idea():
    long = {
        str(p.relative_to(ROOT)): n
        for root in PACKAGES.values()
        for p in (ROOT / root).rglob("*.py")
        if (n := len(p.read_text().splitlines())) > 400
    }
    assert not long, f"over 400 lines: {long}"


def test_no_machine_paths_or_workplace_words():
    words = ["/wo" + "rk/", "/ho" + "me/", "/tm" + "p/w/"]
    found = []
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".cff", ".cpp", ""} and path.is_file():
            text = path.read_text(errors="ignore")
            found += [f"{name}: {w}" for w in words if w in text]
    assert not found


@pytest.mark.parametrize(
    "module", ["clip_linear", "clip_linear_launch", "clip_linear_eval", "clip_linear.__main__", "clip_linear.names"]
)
def test_import_is_light(module):
    code = (
        f"import sys, {module}; print([m for m in ('torch', 'open_clip', 'pandas', 'matplotlib') if m in sys.modules])"
    )
    path = ":".join(str(ROOT / r) for r in (".", "kernels", "launch", "eval"))
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": path, "PATH": ""}
    )
    assert out.stdout.strip() == "[]", out.stdout + out.stderr
