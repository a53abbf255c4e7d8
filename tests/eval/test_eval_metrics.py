"""Metrics and intervals against independent implementations and plain loops."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from clip_linear.errors import UserError
from clip_linear_eval import metrics
from clip_linear_eval.hierarchy import load_hierarchy

RNG = np.random.default_rng(7)
LABELS = RNG.integers(0, 6, 400)
GUESSES = np.where(RNG.random(400) < 0.6, LABELS, RNG.integers(0, 6, 400))
CONFIDENCE = RNG.random(400) ** 0.5


@pytest.mark.parametrize(("correct", "n"), [(0, 1), (1, 1), (0, 50), (50, 50), (1, 7), (137, 1644), (30000, 50000)])
def test_wilson(correct: int, n: int) -> None:
    expected = stats.binomtest(correct, n).proportion_ci(method="wilson")
    assert metrics.wilson(correct, n) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert 0 <= metrics.wilson(correct, n)[0] <= correct / n <= metrics.wilson(correct, n)[1] <= 1


def test_wilson_of_nothing_is_not_a_number() -> None:
    assert np.isnan(metrics.wilson(0, 0)).all()


def test_mean_per_class_recall() -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    ours = metrics.mean_per_class_recall(LABELS, LABELS == GUESSES, 9)  # three classes have no image
    assert ours == pytest.approx(sklearn.balanced_accuracy_score(LABELS, GUESSES), abs=1e-12)


def test_recall_interval_equals_resampling_the_images() -> None:
    right = LABELS == GUESSES
    rng = np.random.default_rng(1)
    means = []
    for _ in range(2000):
        pick = rng.integers(0, len(right), len(right))
        means.append(np.mean([right[pick][LABELS[pick] == c].mean() for c in np.unique(LABELS[pick])]))
    ours = metrics.recall_interval(LABELS, right, 6, draws=2000)
    assert ours == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), abs=0.005)


def test_reliability_is_the_sum_over_bins() -> None:
    right = GUESSES == LABELS
    expected = 0.0
    curve = metrics.reliability(CONFIDENCE, right)
    for b in range(metrics.BINS):
        low, high = b / metrics.BINS, (b + 1) / metrics.BINS
        inside = (low <= CONFIDENCE) & ((high > CONFIDENCE) | (b == metrics.BINS - 1))
        assert curve.n[b] == inside.sum()
        expected += inside.mean() * abs(right[inside].mean() - CONFIDENCE[inside].mean())
    assert curve.ece == pytest.approx(expected, abs=1e-12)
    low, high = metrics.ece_interval(CONFIDENCE, right)
    assert low < high and abs(low - curve.ece) < 0.1


def test_a_calibrated_model_has_no_calibration_error() -> None:
    assert metrics.reliability(np.array([1.0, 1.0, 0.0]), np.array([True, True, False])).ece == 0
    assert metrics.reliability(np.ones(4), np.zeros(4, bool)).ece == 1


def test_confused_pairs() -> None:
    pairs = metrics.confused_pairs(LABELS, GUESSES, top=5)
    counts = {(a, b): int(((a == LABELS) & (b == GUESSES)).sum()) for a in range(6) for b in range(6) if a != b}
    assert [counts[a, b] for a, b, _ in pairs] == sorted(counts.values(), reverse=True)[:5]
    assert all(counts[a, b] == n for a, b, n in pairs)
    assert metrics.confused_pairs(LABELS, LABELS) == []


def test_paired_comparison() -> None:
    table = pytest.importorskip("statsmodels.stats.contingency_tables")
    a = RNG.random(500) < 0.5
    b = np.where(RNG.random(500) < 0.7, a, RNG.random(500) < 0.7)
    result = metrics.compare_paired(a, b)
    cells = [[(a & b).sum(), (a & ~b).sum()], [(~a & b).sum(), (~a & ~b).sum()]]
    assert result["p_mcnemar"] == pytest.approx(table.mcnemar(cells, exact=True).pvalue, rel=1e-9)
    assert result["difference"] == pytest.approx(b.mean() - a.mean())
    # the interval of a paired difference, by the normal approximation of its variance
    d = b.astype(float) - a
    half = 1.96 * d.std() / 500**0.5
    assert (result["ci_low"], result["ci_high"]) == pytest.approx((d.mean() - half, d.mean() + half), abs=0.006)
    same = metrics.compare_paired(a, a)
    assert (same["difference"], same["p_mcnemar"], same["ci_low"], same["ci_high"]) == (0, 1, 0, 0)
    with pytest.raises(ValueError, match="same images"):
        metrics.compare_paired(a, b[:-1])


TREE = "animal dog\nanimal cat\ndog beagle\ndog poodle\nthing animal\nthing car\n"


def test_hierarchy_by_hand(tmp_path: Path) -> None:
    (tmp_path / "wordnet.is_a.txt").write_text(TREE)
    classes = ("dog", "beagle", "poodle", "cat", "car")
    tree = load_hierarchy(tmp_path / "wordnet.is_a.txt", classes)
    #        is:       dog beagle beagle beagle beagle car
    #        taken for: beagle dog poodle cat   car    car
    related, heights = tree.measure(np.array([0, 1, 1, 1, 1, 4]), np.array([1, 0, 2, 3, 4, 4]))
    assert related.tolist() == [True, True, False, False, False, True]
    assert heights.tolist() == [1, 1, 1, 2, 3, 0]  # dog is one above its leaves, animal two, thing three
    with pytest.raises(UserError, match=r"does not know 1 of the classes, e\.g\. 'boat'"):
        load_hierarchy(tmp_path / "wordnet.is_a.txt", (*classes, "boat"))
    (tmp_path / "bad.txt").write_text("a b c\n")
    with pytest.raises(UserError, match="line 1"):
        load_hierarchy(tmp_path / "bad.txt", classes)


def test_wordnets_own_file(tmp_path: Path) -> None:
    lines = [
        "  1 This software and database is being provided to you",
        "00001740 03 n 01 entity 0 002 ~ 00001930 n 0000 ~ 00002137 n 0000 | that which is perceived",
        "00001930 03 n 02 physical_entity 0 thing 0 001 @ 00001740 n 0000 | an entity",
        "00002137 03 n 01 abstraction 0 002 @ 00001740 n 0000 + 00692329 v 0101 | a general concept",
        "00003000 15 n 01 Rome 0 001 @i 00001930 n 0000 | a city",
    ]
    (tmp_path / "data.noun").write_text("\n".join(lines))
    tree = load_hierarchy(tmp_path / "data.noun", ("n00001930", "n00002137", "n00003000"))
    assert tree.related(0, 2) and not tree.related(0, 1)
    assert tree.lca_height(2, 1) == 2


@pytest.mark.parametrize("value", [False, True])
def test_recall_interval_of_all_alike_is_not_a_point(value) -> None:
    even = np.repeat(np.arange(5), 4)
    low, high = metrics.recall_interval(even, np.full(20, value), 5)
    assert (low, high) == pytest.approx(metrics.wilson(20 * value, 20))
    uneven = np.repeat(np.arange(2), [1, 19])  # the lone image is half of the mean
    wide = metrics.recall_interval(uneven, np.full(20, value), 2)
    assert wide[1] - wide[0] > 2 * (high - low)
