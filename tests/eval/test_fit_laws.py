"""Laws through Python: invariances, robust objectives, frontiers, bootstrap, hold-out, choice of form."""

import json

import numpy as np
import pytest

from clip_linear_eval import frontier
from clip_linear_eval.fit import Law, fit_law
from clip_linear_eval.laws import FORMS, Points

RNG = np.random.default_rng


def saturating(n=20, decades=3.0, noise=0.01, seed=0):
    x = np.geomspace(1e8, 10 ** (8 + decades), n)
    return x, (0.12 + 30 * x**-0.21) * np.exp(noise * RNG(seed).normal(size=n))


def test_analytic_jacobians():
    x, x2 = np.geomspace(1e6, 1e10, 7), np.geomspace(1e9, 1e12, 7)
    theta = {"A": 3.0, "alpha": 0.2, "E": -2.0, "B": 16.0, "beta": 0.3}
    for form in FORMS.values():
        at = np.array([theta[p] for p in form.params])
        _, jac = form.log_y_jac(at, x, x2)
        for j in range(form.k):
            step = np.zeros(form.k)
            step[j] = 1e-6
            slope = (form.log_y_jac(at + step, x, x2)[0] - form.log_y_jac(at - step, x, x2)[0]) / 2e-6
            np.testing.assert_allclose(jac[:, j], slope, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("form", ["power", "saturating", "shifted"])
@pytest.mark.parametrize("objective", ["gaussian", "huber", "l1"])
def test_units_of_x_and_y_only_rescale(form, objective):
    x, y = saturating()
    law, other = fit_law(x, y, form, objective=objective), fit_law(x / 1e6, 100 * y, form, objective=objective)
    assert law.certificate["ok"] and other.certificate["ok"]
    alpha = law.params["alpha"]
    assert other.params["alpha"] == pytest.approx(alpha, rel=1e-5)
    assert other.params["A"] == pytest.approx(100 * law.params["A"] * 1e6**-alpha, rel=1e-4)
    if "E" in law.params:
        assert other.params["E"] == pytest.approx(100 * law.params["E"], rel=1e-4)
    assert other.cost == pytest.approx(law.cost, rel=1e-7)


def test_order_and_replicates():
    x, y = saturating()
    shuffled = RNG(1).permutation(20)
    assert fit_law(x[shuffled], y[shuffled], "saturating").to_json() == fit_law(x, y, "saturating").to_json()
    x2, y2 = np.repeat(x, 3), np.repeat(y, 3) * np.tile([0.99, 1.0, 1.01], 20)
    law = fit_law(x2, y2)
    assert {w.code for w in law.warnings} == {"duplicate_x"} and law.n == 60
    x2 = np.tile(x, 3)
    y2 = (0.12 + 30 * x2**-0.21) * np.exp(0.01 * RNG(7).normal(size=60))
    assert fit_law(x2, y2).lack_of_fit["p"] < 1e-6, "a power law must be seen to misfit saturating data"
    assert fit_law(x2, y2, "saturating").lack_of_fit["p"] > 0.05


def test_weights():
    rng = RNG(3)
    x = np.geomspace(1e7, 1e10, 12)
    sigma = np.where(np.arange(12) % 3 == 0, 0.1, 0.005)
    y = 95 * x**-0.3 * np.exp(sigma * rng.normal(size=12))
    plain, weighted = fit_law(x, y), fit_law(x, y, sigma=sigma)
    assert abs(weighted.params["alpha"] - 0.3) < abs(plain.params["alpha"] - 0.3)
    assert fit_law(x, y, sigma=7 * sigma).ci95["alpha"] == pytest.approx(weighted.ci95["alpha"], rel=1e-9)


def test_robust_objectives_shrug_off_an_outlier():
    x, y = saturating(n=16, noise=0.005)
    y[7] *= 1.5
    spoiled = {o: fit_law(x, y, "saturating", objective=o) for o in ("gaussian", "huber", "chinchilla", "l1")}
    for objective in ("huber", "chinchilla", "l1"):
        assert abs(spoiled[objective].params["alpha"] - 0.21) < 0.02 < abs(spoiled["gaussian"].params["alpha"] - 0.21)
    assert "outlier" in {w.code for w in spoiled["gaussian"].warnings}
    assert spoiled["gaussian"].without_outlier["alpha"] == pytest.approx(0.21, abs=0.02)
    assert spoiled["huber"].ci95 is not None, "Huber has profile intervals"
    assert spoiled["l1"].ci95 is None and spoiled["l1"].identified["E"] is None
    assert fit_law(x, y, "saturating", objective="l1", bootstrap=100).ci95["alpha"][0] < 0.21


def test_clean_draws_are_not_called_outliers():
    x = np.geomspace(1e7, 1e10, 15)
    flagged = [
        bool(fit_law(x, 95 * x**-0.3 * np.exp(0.02 * RNG(s).normal(size=15))).without_outlier) for s in range(300)
    ]
    assert np.mean(flagged) < 0.03


def test_bands_widen_outside_and_hold_new_points():
    x, y = saturating(n=30)
    law = fit_law(x, y, "saturating")
    at = np.array([1e9, 1e11, 1e14])
    lo, hi = law.band(at)
    widths = np.log(hi / lo)
    assert widths[2] > 2 * widths[1]
    wide = law.band(at, prediction=True)
    assert (wide[0] < lo).all() and (wide[1] > hi).all()
    new_x, new_y = saturating(n=30, seed=9)
    lo, hi = law.band(new_x, prediction=True)
    assert ((lo < new_y) & (new_y < hi)).mean() >= 0.85
    assert law.local_slope([1e8])[0] > law.local_slope([1e11])[0] > 0


def test_json_holds_the_whole_law():
    law = fit_law(*saturating(), "saturating", predict=(3e12,))
    told = json.loads(json.dumps(law.to_json(), allow_nan=False))
    again = Law.from_json(told)
    at = np.geomspace(1e7, 1e13, 5)
    np.testing.assert_array_equal(again.predict(at), law.predict(at))
    np.testing.assert_array_equal(again.band(at), law.band(at))
    point = told["predictions"][0]
    assert point["extrapolated"] and point["pi95"][0] < point["ci95"][0] < point["y"] < point["ci95"][1]


def test_bootstrap_is_seeded_and_agrees_with_theory():
    x, y = saturating(n=24, noise=0.02)
    law = fit_law(x, y, bootstrap=400, seed=5)
    assert law.bootstrap == fit_law(x, y, bootstrap=400, seed=5).bootstrap
    assert law.bootstrap != fit_law(x, y, bootstrap=400, seed=6).bootstrap
    x = np.geomspace(1e8, 1e11, 60)
    law = fit_law(x, 9 * x**-0.2 * np.exp(0.03 * RNG(0).normal(size=60)), bootstrap=1000)
    assert law.bootstrap["se"]["alpha"] == pytest.approx(law.se["alpha"], rel=0.2)
    runs = np.repeat(np.arange(15), 4)  # four checkpoints of a run that share its luck
    shared = np.repeat(0.05 * RNG(1).normal(size=15), 4)
    y = 9 * x**-0.2 * np.exp(shared + 0.001 * RNG(2).normal(size=60))
    by_run, by_row = (fit_law(x, y, bootstrap=500, runs=r).bootstrap for r in (runs, None))
    assert by_run["clusters"] == 15 and by_run["se"]["alpha"] > 1.5 * by_row["se"]["alpha"]


def test_hold_out_predicts_the_largest():
    x, y = saturating(n=14)
    held = fit_law(x, y, "saturating", hold_out=2).hold_out
    assert [p["x"] for p in held["points"]] == list(x[-2:]) and held["n_fit"] == 12
    assert all(p["extrapolated"] and p["inside"] for p in held["points"])
    assert 3 * held["rms_log"] < fit_law(x, y, "power", hold_out=2).hold_out["rms_log"]


def test_auto_takes_the_form_that_extrapolates():
    x = np.geomspace(1e8, 1e12, 17)
    power = 9 * x**-0.2 * np.exp(0.01 * RNG(4).normal(size=17))
    assert fit_law(x, power, "auto").form == "power"
    law = fit_law(*saturating(n=17, decades=4), "auto")
    assert law.form == "saturating" and "hold-out" in law.selection["decided_by"]
    few = fit_law(*saturating(n=7, decades=4), "auto")
    assert few.form == "power" and "cannot select" in few.selection["decided_by"]
    assert fit_law(*saturating(n=5), "auto").form == "power"


def test_frontier_rules():
    x = np.array([1.0, 1.0, 2.0, 3.0, 4.0, 8.0, 8.0, 16.0])
    y = np.array([0.9, 0.8, 0.85, 0.7, 0.7, 0.5, 0.6, 0.55])
    best = frontier.pareto(Points.of(x, y, row=np.arange(1, 9)))
    assert list(best.x) == [1.0, 3.0, 8.0] and list(best.y) == [0.8, 0.7, 0.5] and list(best.row) == [2, 4, 6]
    centres = frontier.cherti(Points.of(x, y))
    assert centres.n == 5 and np.allclose(np.diff(np.log(centres.x)), np.log(16) / 5)
    assert list(centres.y) == [0.8, 0.7, 0.7, 0.5, 0.55]
    with pytest.raises(ValueError, match="pareto"):
        frontier.rule("paretto")


def test_nezhurinas_bins():
    rng = RNG(0)
    x = np.geomspace(1e6, 1e12, 300)
    y = np.clip((0.1 + 60 * (x + 1e8) ** -0.23) * (1 + 0.3 * rng.random(300)), 0, 0.99)
    y[-1] = 0.95  # a diverged large run
    chosen = frontier.nezhurina(Points.of(x, y))
    assert (np.diff(chosen.y) < 0).all() and chosen.n <= int(np.log2(1e12 / 1500)) and 0.95 not in chosen.y
    half = frontier.rule("nezhurina", "gmacs_total")(Points.of(x / 2, y))
    np.testing.assert_allclose(half.x * 2, chosen.x)


def test_a_frontier_is_fitted_and_its_bootstrap_selects_again():
    rng = RNG(1)
    x = np.repeat(np.geomspace(1e8, 1e11, 10), 6)
    y = 9 * x**-0.2 * np.exp(np.tile(np.linspace(0, 0.25, 6), 10) + 0.02 * rng.normal(size=60))
    law = fit_law(x, y, frontier="pareto", bootstrap=200)
    assert law.n < 20 and law.n_rows == 60 and "frontier" in law.interval_method
    assert sum("frontier" in d.reason for d in law.dropped) == 60 - law.n
    assert law.ci95["alpha"][0] < 0.2 < law.ci95["alpha"][1]


def test_twelve_digits_survive_a_chinchilla_grid():
    n, d = (g.ravel() for g in np.meshgrid(np.geomspace(5e7, 1e10, 7), np.geomspace(1e9, 4e11, 7)))
    law = fit_law(n, 1.8172 + 482.01 / n**0.3478 + 2085.43 / d**0.3658, "chinchilla", x2=d, objective="l1")
    assert law.certificate["ok"] and law.params["B"] == pytest.approx(2085.43, rel=1e-7)
    assert law.predict(1e9, 1e11) == pytest.approx(1.8172 + 482.01 / 1e9**0.3478 + 2085.43 / 1e11**0.3658, rel=1e-9)
