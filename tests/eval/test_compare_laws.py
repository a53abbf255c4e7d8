"""Comparing variants: what is said, and what is not said."""

import json

import numpy as np
import pytest

from clip_linear_eval.commands.fit import main
from clip_linear_eval.compare import compare_laws, holm
from clip_linear_eval.fit import fit_law
from clip_linear_eval.fit_read import read_table
from clip_linear_eval.report_words import comparison_sentences, conclusions

X = np.geomspace(1e7, 1e9, 8)


def draw(alpha, scale=95.0, noise=0.02, seed=0, floor=0.0):
    rng = np.random.default_rng(seed)
    return fit_law(
        X, (floor + scale * X**-alpha) * np.exp(noise * rng.normal(size=8)), "saturating" if floor else "power"
    )


def test_swapping_the_reference_mirrors_everything():
    a, b = draw(0.30, seed=1), draw(0.26, 60.0, seed=2)
    ab, ba = compare_laws(a, b), compare_laws(b, a)
    assert ab.equal_exponent["delta_alpha"] == pytest.approx(-ba.equal_exponent["delta_alpha"])
    assert ab.equal_exponent["F"] == pytest.approx(ba.equal_exponent["F"])
    assert ab.constant_multiplier["ratio"] == pytest.approx(1 / ba.constant_multiplier["ratio"])
    assert ab.crossover["x"] == pytest.approx(ba.crossover["x"], rel=1e-6)
    assert ab.crossover["set"]["x"] == pytest.approx(ba.crossover["set"]["x"], rel=1e-6)


def test_the_multiplier_means_what_it_says():
    a, b = draw(0.30, noise=0.0), draw(0.27, 70.0, noise=0.0)
    found = compare_laws(a, b).size_multiplier
    for point in found["curve"]:
        assert b.predict(point["ratio"] * point["x"]) == pytest.approx(a.predict(point["x"]), rel=1e-9)
    assert (found["xmin"], found["xmax"]) == (found["curve"][0]["ratio"], found["curve"][-1]["ratio"])


def test_multipliers_only_where_both_have_data():
    a = fit_law(X, 95 * X**-0.3)
    b = fit_law(X * 10, 90 * (X * 10) ** -0.3)
    assert compare_laws(a, b).size_multiplier["x_range"] == pytest.approx((1e8, 1e9))
    apart = compare_laws(a, fit_law(X * 1e4, 90 * (X * 1e4) ** -0.3))
    assert apart.size_multiplier["xmin"] is None and apart.size_multiplier["curve"] == []


def test_a_floor_that_is_never_reached_has_no_multiplier():
    low, high = draw(0.3, noise=0.001, floor=0.02), draw(0.3, noise=0.001, floor=0.3, seed=1)
    found = compare_laws(low, high).size_multiplier
    assert found["xmax"] is None and found["xmin"] > 1
    json.dumps(compare_laws(low, high).to_json(), allow_nan=False)


@pytest.mark.parametrize("floor", [0.0, 0.05])
def test_the_crossing_set_holds_the_crossing(floor):
    a, b = draw(0.24, 30.0, 0.003, 1, floor), draw(0.30, 30.0 * 1e8**0.06, 0.003, 2, floor)
    found = compare_laws(a, b).crossover
    assert found["set"]["kind"] == "interval" and found["in_range"]
    assert found["set"]["x"][0] < 1e8 < found["set"]["x"][1]
    assert found["set"]["x"][0] < found["x"] < found["set"]["x"][1]


def test_equal_laws_cross_nowhere_in_particular():
    kinds = {compare_laws(draw(0.3, seed=s), draw(0.3, seed=100 + s)).crossover["set"]["kind"] for s in range(40)}
    assert "whole_line" in kinds
    assert kinds <= {"interval", "complement", "whole_line"}


def test_a_large_p_is_not_called_equality():
    a, b = draw(0.30, seed=3), draw(0.30, seed=4)
    found = compare_laws(a, b, names=("softmax", "mala"))
    assert found.equal_exponent["p"] > 0.05
    text = " ".join(comparison_sentences(found.to_json(), "n_params_vision"))
    assert "cannot be concluded" in text and "would have shown" in text and "same" not in text.replace("same error", "")
    larger = compare_laws(draw(0.30), draw(0.30 + 2 * found.equal_exponent["detectable"], seed=1), names=("a", "b"))
    assert larger.equal_exponent["p"] < 0.01


def test_only_like_is_compared_with_like():
    a = draw(0.3)
    for other in (
        draw(0.3, floor=0.05),
        fit_law(X, 95 * X**-0.3, objective="linear"),
        fit_law(X, 95 * X**-0.3, sigma=X),
    ):
        with pytest.raises(ValueError, match="cannot compare"):
            compare_laws(a, other)


def test_holm():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([None, 0.5, 0.9]) == [None, 1.0, 1.0]


def test_pairs_by_seed_see_what_independent_fits_cannot(tmp_path, capsys):
    rng = np.random.default_rng(0)
    lines = ["image_variant,model,n_params_vision,seed,samples_seen,top1_error"]
    for i, size in enumerate((2e7, 8e7, 3e8)):
        for seed in range(3):
            luck = 0.05 * rng.normal()  # shared by both variants: same data order, same initial weights
            for variant, alpha in (("softmax", 0.30), ("mala", 0.28)):
                error = 95 * size**-alpha * np.exp(luck + 0.002 * rng.normal())
                n_params = size * (1.01 if variant == "mala" else 1)
                lines.append(f"{variant},m{i}+{variant}+{variant},{n_params},{seed},1000,{error}")
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    argv = [
        str(tmp_path / "rows.csv"),
        "--x",
        "n_params_vision",
        "--y",
        "top1_error",
        "--group",
        "image_variant",
        "--json",
    ]
    assert main(argv) == 0
    found = json.loads(capsys.readouterr().out)["comparison"][0]
    assert found["equal_exponent"]["p"] > 0.05 and found["paired"]["n"] == 9
    assert found["paired"]["p"] < 0.001 and found["paired"]["ci95"][0] < 0.02 < found["paired"]["ci95"][1]
    assert "run by run" in " ".join(comparison_sentences(found, "n_params_vision"))


def test_many_variants_share_the_error_rate(tmp_path, capsys):
    lines = ["v,x,y"]
    for k, variant in enumerate(("softmax", "a", "b", "c")):
        y = 95 * X**-0.3 * np.exp(0.02 * np.random.default_rng(k).normal(size=8))
        lines += [f"{variant},{x},{v}" for x, v in zip(X, y)]
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    assert main([str(tmp_path / "rows.csv"), "--x", "x", "--y", "y", "--group", "v", "--json"]) == 0
    fit = json.loads(capsys.readouterr().out)
    p = [c["equal_exponent"]["p"] for c in fit["comparison"]]
    assert [c["p_holm"] for c in fit["comparison"]] == pytest.approx(holm(p))
    assert all(c["ref"] == "softmax" for c in fit["comparison"]) and len(conclusions(fit)) == 4
    assert len(read_table(tmp_path / "rows.csv")) == 32
