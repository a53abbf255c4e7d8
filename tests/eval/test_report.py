"""The report page of a small made-up sweep: self-contained, honest, and the same in Markdown."""

import json
import re
import xml.etree.ElementTree as ET

import pytest

from clip_linear.errors import UserError
from clip_linear_eval.commands.fit import main as fit_main
from clip_linear_eval.commands.report import main as report_main
from clip_linear_eval.report import write_report
from tests.eval.report_sweep import SIZES, write_sweep


def fit(folder):
    where = ["--where", "metric=top1", "--where", "dataset=objects"]
    argv = ["--x", "n_params_vision", "--y", "error", "--group", "image_variant", *where, "--out", str(folder)]
    assert fit_main([str(folder / "rows.csv"), *argv]) == 0


def test_a_sweep_becomes_one_page(tmp_path, capsys):
    write_sweep(tmp_path)
    fit(tmp_path)
    capsys.readouterr()
    assert report_main([str(tmp_path)]) == 0
    page = capsys.readouterr().out.strip()
    assert page == str(tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    assert not re.search(r'(?:src|href)="(?!#|data:)', html), "the page must not fetch anything"
    assert "http://" not in html.replace("http://www.w3.org", "")
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids)), "ids must be unique across inlined figures"
    for target in re.findall(r"url\(#([^)]+)\)", html) + re.findall(r'href="#([^"]+)"', html):
        assert target in ids
    assert "top1 on objects" in html and "top1 on flags" in html
    for name in ("law", "multiplier", "residuals", "forest", "loss", "speed"):
        assert f'id="figure-{name}"' in html
    law = json.loads((tmp_path / "fit.json").read_text())["groups"]["mala"]
    markdown = (tmp_path / "report.md").read_text()
    assert f"α = {law['params']['alpha']:.3g}" in html and f"α = {law['params']['alpha']:.3g}" in markdown
    assert "mini0+mala-s0" in html and "c0ffee" in html and "a CPU" in html
    assert "Synthetic" not in html
    ET.parse(tmp_path / "scaling.svg")


def test_figures_are_deterministic(tmp_path):
    for name in ("a", "b"):
        write_sweep(tmp_path / name)
        write_report(tmp_path / name)
    assert (tmp_path / "a/scaling.svg").read_bytes() == (tmp_path / "b/scaling.svg").read_bytes()


def test_synthetic_rows_say_so(tmp_path):
    write_sweep(tmp_path, provenance="synthetic")
    html = write_report(tmp_path).read_text()
    assert "Synthetic data" in html and "synthetic data" in (tmp_path / "scaling.svg").read_text()


@pytest.mark.parametrize("sizes", [SIZES[:1], SIZES[:2]])
def test_few_sizes_conclude_nothing(tmp_path, sizes):
    write_sweep(tmp_path, sizes=sizes)
    html = write_report(tmp_path).read_text()
    assert "concluded" in html


def test_rows_alone_and_other_tables(tmp_path):
    write_sweep(tmp_path / "sweep")
    html = write_report(tmp_path / "sweep/rows.csv", out=tmp_path / "out").read_text()
    assert (tmp_path / "out/report.md").is_file() and 'id="figure-law"' in html
    (tmp_path / "other.csv").write_text("a,b\n1,<b>x</b>\n")
    html = write_report(tmp_path / "other.csv").read_text()
    assert "&lt;b&gt;x" in html and "Nothing can be concluded" in html


def test_wrong_inputs_are_one_clear_line(tmp_path):
    with pytest.raises(UserError, match=r"no rows\.csv"):
        write_report(tmp_path)
    write_sweep(tmp_path)
    (tmp_path / "bad.json").write_text("[1]")
    for name, word in (("bad.json", "not a fit.json"), ("none.json", "cannot be read")):
        with pytest.raises(UserError, match=word):
            write_report(tmp_path, tmp_path / name)
