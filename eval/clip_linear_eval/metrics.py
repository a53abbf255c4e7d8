"""What is computed from predictions: accuracies, intervals, calibration, confusions, and paired comparisons.

Everything here takes numpy arrays and is exact: the counts do not depend on batch size or world size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

BINS = 15  # equal-width confidence bins, as in Guo et al. 2017 (arXiv 1706.04599), eq. 3


def wilson(correct: float, n: float, level: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval for a proportion (Wilson 1927); (nan, nan) for n = 0."""
    if n == 0:
        return math.nan, math.nan
    from statistics import NormalDist

    z = NormalDist().inv_cdf(0.5 + level / 2)
    p = correct / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # The exact ends at 0 and n of n are 0 and 1; rounding would put them just beside.
    return (0.0 if correct == 0 else centre - half), (1.0 if correct == n else centre + half)


def class_counts(labels: np.ndarray, correct: np.ndarray, n_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """(images per class, correct per class), each [C]."""
    n = np.bincount(labels, minlength=n_classes)
    return n, np.bincount(labels, weights=correct.astype(float), minlength=n_classes).astype(np.int64)


def mean_per_class_recall(labels: np.ndarray, correct: np.ndarray, n_classes: int) -> float:
    """Mean over the classes that have images of the share of their images that are right."""
    n, right = class_counts(labels, correct, n_classes)
    return float(np.mean(right[n > 0] / n[n > 0])) if n.any() else math.nan


def recall_interval(
    labels: np.ndarray, correct: np.ndarray, n_classes: int, draws: int | None = None
) -> tuple[float, float]:
    """Percentile bootstrap (over images, 95 %) of the mean per-class recall.

    Resampling images is a multinomial draw over the cells (class, right or wrong), so no image is touched; a class
    that a draw leaves out does not count in it. 500 draws, or as few as 200 where there are many classes. Where all
    images are right, or all wrong, every draw is alike: then Wilson's interval of C²/Σ_c 1/n_c images, the number
    that gives a plain accuracy the variance of this mean.
    """
    n, right = class_counts(labels, correct, n_classes)
    total = int(n.sum())
    if total == 0:
        return math.nan, math.nan
    seen = n > 0
    if right.sum() in (0, total):
        alike = int(seen.sum()) ** 2 / float((1 / n[seen]).sum())
        return wilson(alike if right.any() else 0, alike)
    cells = np.concatenate([right[seen], (n - right)[seen]])
    draws = draws or int(np.clip(2_000_000 // len(cells), 200, 500))
    drawn = np.random.default_rng(0).multinomial(total, cells / total, size=draws)  # [draws, 2C]
    hit, miss = np.split(drawn, 2, axis=1)
    size = hit + miss
    recall = np.divide(hit, size, out=np.zeros(size.shape), where=size > 0)
    means = recall.sum(1) / np.maximum((size > 0).sum(1), 1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """Calibration per confidence bin: counts, mean confidence and accuracy (nan where empty), each [BINS]."""

    n: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray
    ece: float


def reliability(confidence: np.ndarray, correct: np.ndarray) -> Reliability:
    """Reliability curve and expected calibration error Σ_b (n_b/n)·|accuracy_b − confidence_b| (Guo et al. 2017)."""
    bins = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    n = np.bincount(bins, minlength=BINS)
    conf_sum = np.bincount(bins, weights=confidence.astype(float), minlength=BINS)
    right_sum = np.bincount(bins, weights=correct.astype(float), minlength=BINS)
    with np.errstate(invalid="ignore"):
        conf, acc = conf_sum / n, right_sum / n
    ece = float(np.abs(right_sum - conf_sum).sum() / max(len(confidence), 1)) if len(confidence) else math.nan
    return Reliability(n=n, confidence=conf, accuracy=acc, ece=ece)


def ece_interval(confidence: np.ndarray, correct: np.ndarray, draws: int = 200) -> tuple[float, float]:
    """Percentile bootstrap (over images, 95 %) of the expected calibration error.

    The error is an absolute value, so resampling biases it upwards: the interval can lie above the estimate where
    the bins are nearly empty.
    """
    if len(confidence) == 0:
        return math.nan, math.nan
    bins = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    gap = correct.astype(float) - confidence.astype(float)
    rng = np.random.default_rng(0)
    values = np.empty(draws)
    for i in range(draws):
        pick = rng.integers(0, len(gap), len(gap))
        values[i] = np.abs(np.bincount(bins[pick], weights=gap[pick], minlength=BINS)).sum() / len(gap)
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def confused_pairs(labels: np.ndarray, predicted: np.ndarray, top: int = 20) -> list[tuple[int, int, int]]:
    """The commonest mistakes as (true class, predicted class, count), most frequent first."""
    wrong = labels != predicted
    pairs, counts = np.unique(np.stack([labels[wrong], predicted[wrong]], 1), axis=0, return_counts=True)
    order = np.lexsort((pairs[:, 1], pairs[:, 0], -counts))[:top]
    return [(int(pairs[i, 0]), int(pairs[i, 1]), int(counts[i])) for i in order]


def compare_paired(a: np.ndarray, b: np.ndarray, draws: int = 2000) -> dict[str, Any]:
    """Two models on the same images (boolean arrays: right or wrong): McNemar's exact test and a paired bootstrap.

    ``difference`` is accuracy(b) − accuracy(a); its interval is the percentile bootstrap over images, drawn from the
    four cells (both right, only a, only b, both wrong). ``p_mcnemar`` is the two-sided exact binomial test of the
    discordant images (McNemar 1947). Raises ValueError where the lengths differ.
    """
    from scipy.stats import binomtest

    if a.shape != b.shape:
        raise ValueError(f"paired comparison needs the same images: {len(a)} and {len(b)}")
    n = len(a)
    only_a, only_b = int((a & ~b).sum()), int((b & ~a).sum())
    cells = np.array([only_a, only_b, n - only_a - only_b])
    drawn = np.random.default_rng(0).multinomial(n, cells / n, size=draws) if n else np.zeros((1, 3))
    low, high = np.quantile((drawn[:, 1] - drawn[:, 0]) / max(n, 1), [0.025, 0.975])
    discordant = only_a + only_b
    return {
        "n": n,
        "only_a": only_a,
        "only_b": only_b,
        "difference": (only_b - only_a) / max(n, 1),
        "ci_low": float(low),
        "ci_high": float(high),
        "p_mcnemar": float(binomtest(only_b, discordant).pvalue) if discordant else 1.0,
    }
