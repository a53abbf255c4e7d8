"""``clip-linear list``, the page made of it, and a variant that is one new file and nothing else."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clip_linear import list_variants
from clip_linear.__main__ import main
from clip_linear.dress import Site, dress_parameters, evaluate
from clip_linear.registry import declaration
from clip_linear.variants_page import _tensors

ROOT = Path(__file__).resolve().parents[2]


def test_variants_with_all_columns(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^{name}\b", out, re.M) for name in list_variants())
    assert "610,560" in out and "D·E + D + E" in out and "2507.00698" in out
    assert main(["list", "variants", "ala", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [v["name"] for v in found] == ["mala", "nala", "rala"]
    assert found[0]["parameters_per_image_layer_at_width_768"] == {"core": 0, "paper": 610560}


def test_models_bibtex_and_nothing_found(capsys):
    assert main(["list", "models", "SigLIP-256"]) == 0 and "ViT-B-16-SigLIP-256" in capsys.readouterr().out
    assert main(["list", "--bibtex"]) == 0
    entries = capsys.readouterr().out.strip().split("\n\n")
    assert len(entries) == len({re.match(r"@\w+\{(\w+),", e)[1] for e in entries}) >= 12
    assert all(e.count("{") == e.count("}") for e in entries)
    assert main(["list", "variants", "rellu"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_page_is_current(capsys):
    assert main(["list", "--markdown"]) == 0
    page = (ROOT / "docs" / "variants.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out == page, "run: clip-linear list --markdown > docs/variants.md"


@pytest.mark.parametrize("variant", list_variants())
def test_the_page_says_what_the_presets_own(variant):
    site = Site(width=48, num_heads=3, length=10, grid=(3, 3), prefix=1, mlp_width=192)
    known = declaration(variant)
    for preset in known.info.presets:
        written = sum(evaluate(size, site.sizes) for _, size in _tensors(known, preset))
        own = sum(evaluate(size, site.sizes) for size in known.info.tensors.values())
        assert written == own + sum(dress_parameters(known.dress(preset, {}), site).values())


def test_formulas_are_arithmetic_only():
    assert evaluate("2·D·E + N²", {"D": 2, "E": 3, "N": 4}) == 28
    for wrong in ("__import__('os')", "D.real", "x", "D if E else N"):
        with pytest.raises(ValueError, match="formula"):
            evaluate(wrong, {"D": 2, "E": 3, "N": 4})


@pytest.mark.slow
def test_a_new_variant_is_one_file(tmp_path):
    """The README's variant, in a copy of the sources: lists, profiles, models, the suite and sweeps know it by name."""
    for part in ("clip_linear", "kernels", "launch", "eval", "tests/clip_linear", "README.md", "pyproject.toml"):
        source, target = ROOT / part, tmp_path / part
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.so", "golden", "shards"))
        else:
            shutil.copy(source, target)
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests" / "conftest.py")
    readme = (tmp_path / "README.md").read_text(encoding="utf-8")
    code = next(c for c in re.findall(r"```python\n(.*?)```", readme, re.S) if "class Softplus" in c)
    (tmp_path / "clip_linear" / "variants" / "softplus.py").write_text(code, encoding="utf-8")
    roots = os.pathsep.join(str(tmp_path / r) for r in (".", "kernels", "launch", "eval"))
    environment = {**os.environ, "PYTHONPATH": roots}

    def run(*args):
        done = subprocess.run(
            [sys.executable, "-m", *args], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    assert "softplus" in run("clip_linear", "list")
    both, softmax = json.loads(run("clip_linear", "profile", "ViT-S-16+softplus+softplus", "ViT-S-16", "--json"))
    assert both["n_params_total"] == softmax["n_params_total"] and both["gmacs"] < softmax["gmacs"]
    files = (f"tests/clip_linear/test_{name}.py" for name in ("variants", "swap"))
    suite = run("pytest", "-q", "-k", "softplus", *files)
    assert int(re.search(r"(\d+) passed", suite)[1]) > 30
    sweep = tmp_path / "toy.toml"
    sweep.write_text(
        '[sweep]\nname = "toy"\n[base]\ntrain-data = "x.tar"\nbatch-size = 8\n'
        '[grid]\nmodel = ["ViT-S-16"]\nimage = ["softmax", "softplus"]\ntext = ["same"]\nsamples = [64]\nseed = [0]\n'
    )
    (tmp_path / "x.tar").write_bytes(b"")
    assert "softplus" in run("clip_linear", "launch", "plan", str(sweep))
