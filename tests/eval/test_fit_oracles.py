"""Our numbers against independent libraries: statsmodels for linear laws, lmfit for profile intervals."""

import numpy as np
import pytest

from clip_linear_eval.compare import compare_laws
from clip_linear_eval.fit import fit_law

X = np.geomspace(5e6, 2e9, 12)
POWER = 593 * X**-0.362 * np.exp(0.02 * np.random.default_rng(1).normal(size=12))


@pytest.mark.parametrize("weighted", [False, True])
def test_statsmodels_agrees_on_a_power_law(weighted):
    sm = pytest.importorskip("statsmodels.api")
    sigma = np.linspace(0.5, 2, 12) if weighted else None
    law = fit_law(X, POWER, sigma=sigma)
    weights = np.ones(12) if sigma is None else 1 / sigma**2
    theirs = sm.WLS(np.log(POWER), sm.add_constant(np.log(X)), weights=weights).fit()
    assert law.params["alpha"] == pytest.approx(-theirs.params[1], rel=1e-10)
    assert law.se["alpha"] == pytest.approx(theirs.bse[1], rel=1e-9)
    assert law.ci95["alpha"] == pytest.approx(-theirs.conf_int()[1][::-1], rel=1e-9)
    assert law.ci95["A"] == pytest.approx(np.exp(theirs.conf_int()[0]), rel=1e-8)
    assert law.sigma == pytest.approx(np.sqrt(theirs.scale), rel=1e-9)
    k, n = 3, 12  # statsmodels leaves sigma out of its count
    assert law.bic == pytest.approx(-2 * theirs.llf + k * np.log(n), rel=1e-9)
    assert law.aicc == pytest.approx(-2 * theirs.llf + 2 * k + 2 * k * (k + 1) / (n - k - 1), rel=1e-9)
    if not weighted:
        press = sm.OLS(np.log(POWER), sm.add_constant(np.log(X))).fit().get_influence().resid_press
        assert law.loo == pytest.approx(np.sqrt(np.mean(press**2)), rel=1e-9)
    bands = theirs.get_prediction(sm.add_constant(np.log(X))).conf_int()
    np.testing.assert_allclose(np.transpose(law.band(X)), np.exp(bands), rtol=1e-9)


def test_statsmodels_agrees_on_the_comparison():
    sm = pytest.importorskip("statsmodels.api")
    other = 400 * X**-0.34 * np.exp(0.02 * np.random.default_rng(2).normal(size=12))
    found = compare_laws(fit_law(X, POWER), fit_law(X, other))
    u, z = np.tile(np.log(X), 2), np.repeat([0.0, 1.0], 12)
    both = np.log(np.concatenate([POWER, other]))
    full = sm.OLS(both, np.stack([np.ones(24), u, z, z * u], axis=1)).fit()
    equal = sm.OLS(both, np.stack([np.ones(24), u, z], axis=1)).fit()
    one = sm.OLS(both, np.stack([np.ones(24), u], axis=1)).fit()
    f, p, _ = full.compare_f_test(equal)
    assert (found.equal_exponent["F"], found.equal_exponent["p"]) == pytest.approx((f, p), rel=1e-8)
    assert found.equal_exponent["lr_p"] == pytest.approx(full.compare_lr_test(equal)[1], rel=1e-8)
    assert found.equal_exponent["ci95"] == pytest.approx(full.conf_int()[3], rel=1e-8)
    assert found.equal_law["p"] == pytest.approx(full.compare_f_test(one)[1], rel=1e-8)
    common = found.constant_multiplier
    assert common["ratio"] == pytest.approx(np.exp(equal.params[2] / -equal.params[1]), rel=1e-8)
    half = 0.5 * np.log(common["ci95"][1] / common["ci95"][0])
    slope = np.array([0, equal.params[2] / equal.params[1] ** 2, -1 / equal.params[1]])
    se = np.sqrt(slope @ equal.cov_params() @ slope)
    from scipy.stats import t

    assert half == pytest.approx(t.ppf(0.975, 21) * se, rel=1e-7)


@pytest.mark.parametrize("form", ["saturating", "shifted", "chinchilla"])
def test_lmfit_agrees_on_profiles(form):
    lmfit = pytest.importorskip("lmfit")
    rng = np.random.default_rng(3)
    x, x2 = (g.ravel() for g in np.meshgrid(np.geomspace(1e8, 1e12, 6), np.geomspace(1e9, 1e12, 4)))
    if form == "chinchilla":
        y = (1.8 + 480 * x**-0.35 + 2000 * x2**-0.37) * np.exp(0.003 * rng.normal(size=24))
    else:
        shift = 1e9 if form == "shifted" else 0.0
        y = (0.12 + 30 * (x + shift) ** -0.21) * np.exp(0.002 * rng.normal(size=24))
    law = fit_law(x, y, form, x2=x2 if form == "chinchilla" else None)

    def residual(p):
        if form == "chinchilla":
            f = p["E"] + np.exp(p["lnA"]) * x ** -p["alpha"] + np.exp(p["lnB"]) * x2 ** -p["beta"]
        else:
            f = p["E"] + np.exp(p["lnA"]) * (x + (1e9 * p["B"] if form == "shifted" else 0)) ** -p["alpha"]
        return np.log(y) - np.log(f)

    start = lmfit.Parameters()
    start.add("E", law.params["E"] * 1.01, min=1e-9)
    start.add("lnA", np.log(law.params["A"]) * 1.01)
    start.add("alpha", law.params["alpha"] * 0.99)
    if form == "chinchilla":
        start.add("lnB", np.log(law.params["B"]))
        start.add("beta", law.params["beta"])
    if form == "shifted":
        start.add("B", law.params["B"] / 1e9, min=0)
    fitter = lmfit.Minimizer(residual, start)
    theirs = fitter.minimize(method="leastsq", ftol=1e-14, xtol=1e-14)
    assert law.params["alpha"] == pytest.approx(theirs.params["alpha"].value, rel=2e-5)
    assert 2 * law.cost <= theirs.chisqr * (1 + 1e-9)
    wanted = ["alpha", "E"] if form != "chinchilla" else ["alpha"]
    for name in wanted:
        ends = lmfit.conf_interval(fitter, theirs, p_names=[name], sigmas=[0.95])[name]
        assert law.ci95[name] == pytest.approx((ends[0][1], ends[2][1]), rel=2e-4)
