"""The commands fit, power and report as a user meets them: flags, files, words, published laws."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from clip_linear.__main__ import main as clip_linear
from clip_linear_eval.commands import fit, power, report
from clip_linear_eval.laws_published import all_published, matching
from clip_linear_eval.plots import ticks
from clip_linear_eval.power import design, seeds_needed
from clip_linear_eval.report import write_report
from clip_linear_eval.results import make_row, write_rows

CASES = Path(__file__).parent / "cases" / "scaling"
FLAGS = {
    fit: "--bootstrap --budget --drop-top-y --form --frontier --group --hold-out --json --max-x --objective --out "
    "--predict --ref --seed --sigma --unit --where --x --x2 --y",
    power: "--delta --json --noise --power --sizes --variants",
    report: "--fit --out",
}


@pytest.mark.parametrize("command", FLAGS, ids=lambda c: c.__name__.rsplit(".", 1)[-1])
def test_flags_are_frozen(command):
    found = {s for a in command.parser()._actions for s in a.option_strings if s.startswith("--")}
    assert found == {*FLAGS[command].split(), "--help"}


@pytest.mark.parametrize("name", ["fit", "power", "report"])
def test_help_is_light(name):
    code = (
        "import sys; from clip_linear.__main__ import main\n"
        f"try: main([{name!r}, '--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'pandas', 'numpy', 'scipy', 'matplotlib', 'jinja2'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_fit_writes_its_file_and_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = str(CASES / "n06_variants_crossing.csv")
    argv = [rows, "--x", "n_params", "--y", "error", "--group", "variant", "--predict", "2e9"]
    assert fit.main([*argv, "--out", "out"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "wrote out/fit.json"
    assert sum(line.startswith(("softmax: exponent", "linear: exponent")) for line in lines) == 2
    assert any("would be" in line and "beyond the data" in line for line in lines)
    written = json.loads(Path("out/fit.json").read_text())
    assert fit.main([*argv, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    written["source"].pop("date")
    printed["source"].pop("date")
    assert printed == written and not Path("fit.json").exists()
    assert len(written["source"]["sha256"]) == 64 and "scipy" in written["source"]["versions"]


def test_every_key_of_fit_json_is_documented(capsys):
    rows = str(CASES / "n06_variants_crossing.csv")
    assert fit.main([rows, "--x", "n_params", "--y", "error", "--group", "variant", "--bootstrap", "20", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    iso = str(CASES / "s05a_isoflop_symmetric_exact.csv")
    assert fit.main([iso, "--x", "n_params", "--y", "loss", "--form", "isoflop", "--budget", "compute", "--json"]) == 0
    isoflop = json.loads(capsys.readouterr().out)["groups"]["all"]
    named = set(re.findall(r"`([A-Za-z_0-9]+)`", (Path(fit.__file__).parents[2] / "FIT.md").read_text()))
    for part in (found, found["groups"]["softmax"], found["comparison"][0], isoflop, isoflop["isoflop"]):
        assert set(part) <= named, set(part) - named


def test_isoflop_rejects_minima_at_an_edge(tmp_path, capsys):
    lines, sizes = ["c,n,loss"], np.geomspace(1e7, 1e9, 9)
    for budget, best in ((1e18, 1e8), (1e19, 2e8), (1e20, 4e8), (1e21, 5e9)):
        lines += [
            f"{budget * (1 + 0.01 * i % 0.03)},{n},{2 + 0.1 * np.log(n / best) ** 2}" for i, n in enumerate(sizes)
        ]
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    argv = [str(tmp_path / "rows.csv"), "--x", "n", "--y", "loss", "--form", "isoflop", "--budget", "c", "--json"]
    assert fit.main(argv) == 0
    found = json.loads(capsys.readouterr().out)["groups"]["all"]
    assert found["isoflop"]["n_used"] == 3 and "edge" in found["isoflop"]["rejected"][0]["rejected"]
    assert found["isoflop"]["a"] == pytest.approx(np.log10(2), rel=1e-2)
    assert found["isoflop"]["points"][0]["n_opt"] == pytest.approx(1e8, rel=1e-6)
    (tmp_path / "rows.csv").write_text("\n".join([lines[0], *lines[1:10]]) + "\n")
    assert fit.main(argv) == 2 and json.loads(capsys.readouterr().out)["code"] == "single_x"


def test_power_agrees_with_the_known_designs(capsys):
    vits = (21.8e6, 86.2e6, 304.1e6)
    for noise, seeds in ((0.01, 2), (0.02, 3), (0.03, 5)):
        assert seeds_needed(vits, noise, 0.03)[-1].seeds == seeds
    one = design(vits, 0.0092, 1, 0.03)
    assert one.half_width == pytest.approx(3.27 * 0.0092, rel=0.01), "one seed: 3.27 sigma"
    assert clip_linear(["power", "--sizes", "22e6,86e6,304e6", "--noise", "0.02"]) == 0
    assert "3 seeds (18 runs in all)" in capsys.readouterr().out
    assert clip_linear(["power", "--sizes", "22e6,86e6,304e6", "--noise", "0.02", "--json", "--variants", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["seeds"] >= 4


def test_power_is_what_simulation_finds():
    from clip_linear_eval.compare import compare_laws
    from clip_linear_eval.fit import fit_law

    rng, x = np.random.default_rng(0), np.repeat([22e6, 86e6, 304e6], 3)
    hits = 0
    for _ in range(300):
        laws = [fit_law(x, 90 * x**-a * np.exp(0.02 * rng.normal(size=9))) for a in (0.30, 0.27)]
        hits += compare_laws(*laws).equal_exponent["p"] < 0.05
    told = design([22e6, 86e6, 304e6], 0.02, 3, 0.03)
    assert hits / 300 == pytest.approx(told.power, abs=0.07)
    assert compare_laws(*laws).equal_exponent["se"] == pytest.approx(told.se, rel=0.5)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--sizes", "1e6", "--noise", "0.01"], "two or more"),
        (["--sizes", "a,b", "--noise", "0.01"], "list of numbers"),
        (["--sizes", "1e6,1e7", "--noise", "0"], "noise"),
        (["--sizes", "1e6,1e7", "--noise", "nan"], "noise"),
        (["--sizes", "1e6,1e7", "--noise", "0.1", "--delta", "-1"], "delta"),
        (["--sizes", "1e6,1e7", "--noise", "0.1", "--power", "1.5"], "power"),
        (["--sizes", "1e6,1.01e6", "--noise", "9", "--delta", "1e-4"], "seeds do not show"),
        (["--sizes", "1e6,1e7", "--noise", "0.1", "--variants", "1"], "at least 2"),
    ],
)
def test_power_mistakes(argv, words, capsys):
    assert clip_linear(["power", *argv]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


def test_published_laws_are_those_printed():
    laws = {(law.name, law.metric): law for law in all_published()}
    assert all(re.search(r"arXiv \d{4}\.\d{5}", law.source) and law.note for law in laws.values())
    softmax, linear = laws["softmax CLIP", "loss"], laws["linear-attention CLIP", "loss"]
    assert linear.predict(21.8e6) / softmax.predict(21.8e6) == pytest.approx(1.053, abs=5e-4)
    assert linear.predict(304.1e6) / softmax.predict(304.1e6) == pytest.approx(1.139, abs=5e-4)
    (clip,) = [
        law
        for law in matching("gmacs_total", "top1", "wds/imagenet1k", "fraction")
        if "DataComp-1.4B" in law.name and law.name.startswith("CLIP")
    ]
    assert 1 - clip.predict(87.73 * 12.8e9) == pytest.approx(0.796, abs=2e-3), "L/14 at 12.8B, GMACs doubled to GFLOPs"


def test_published_laws_match_only_the_same_thing():
    assert len(matching("gmacs_total", "top1", "imagenet1k", "fraction")) == 4
    assert len(matching("n_params_vision", "loss", "train", "loss")) == 2
    for other in (
        ("n_params_vision", "top1", "imagenet1k", "fraction"),
        ("gmacs_total", "top1", "imagenet1k", "percent"),
        ("gmacs_total", "top1", "imagenet_r", "fraction"),
        ("gmacs_total", "top5", "imagenet1k", "fraction"),
        ("n_params_total", "loss", "train", "loss"),
    ):
        assert matching(*other) == []


def test_published_laws_are_drawn_beside_ours(tmp_path):
    rows = [
        make_row(
            image_variant="mala", n_params_vision=86e6, gmacs_total=c, samples_seen=c / 20, dataset=name, metric="top1",
            value=1 - 6 * c**-0.11, unit="fraction", provenance="measured",
        )
        for c in np.geomspace(3e10, 3e12, 6)
        for name in ("imagenet1k", "flags")
    ]  # fmt: skip
    write_rows(tmp_path / "rows.csv", rows)
    where = ["--where", "dataset=imagenet1k", "--where", "metric=top1"]
    argv = ["--x", "gmacs_total", "--y", "error", "--group", "image_variant", "--out", str(tmp_path)]
    assert fit.main([str(tmp_path / "rows.csv"), *argv, *where]) == 0
    page = write_report(tmp_path).read_text()
    assert "OpenCLIP on LAION (published)" in page and "arXiv 2212.07143" in page
    assert page.count("OpenCLIP on LAION (published)") == 1, "not beside the other data set"


@pytest.mark.parametrize(("low", "high"), [(1, 1e6), (0.7, 0.98), (1e-3, 2e-3), (3e7, 4e8), (1.01, 1.02)])
def test_ticks_are_round_and_inside(low, high):
    at = ticks(low, high)
    assert 2 <= len(at) <= 8 and at.min() >= low * 0.998 and at.max() <= high * 1.002
