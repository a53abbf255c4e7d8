"""Thirty tiny faulty shards: what each must deliver, what must never come out, and what must be counted."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from clip_linear.data import read_samples

FOLDER = Path(__file__).parent / "shards"
CASES = json.loads((FOLDER / "expected.json").read_text())


def read(case, **options):
    faults = []
    samples = list(read_samples([str(FOLDER / u) for u in CASES[case]["urls"]], faults=faults, **options))
    return samples, Counter(f.reason for f in faults)


def named(caption):
    return "<huge>" if len(caption) > 100_000 else caption


@pytest.mark.parametrize("case", CASES)
def test_case_delivers_its_good_samples_and_names_each_loss(case):
    samples, faults = read(case)
    captions = Counter(named(s.caption) for s in samples)
    good = Counter(CASES[case]["good"])
    assert good <= captions
    assert set(captions - good) <= set(CASES[case]["optional"])
    assert not set(captions) & set(CASES[case]["must_not"])
    assert faults == CASES[case]["report"]
    assert all(s.image.mode == "RGB" for s in samples)


def odd_image(case):
    return np.asarray(next(s.image for s in read(case)[0] if s.key == "000000002")).astype(float)


def test_cmyk_keeps_its_colours():
    other = np.asarray(next(s.image for s in read("clean")[0] if s.key == "000000002")).astype(float)
    assert np.abs(odd_image("cmyk").mean((0, 1)) - other.mean((0, 1))).max() < 12


def test_sixteen_bit_grey_is_scaled():
    image = odd_image("png16")
    assert abs(image[:, :10].mean() - 78) < 3 and abs(image[:, -10:].mean() - 176) < 3


def test_transparent_pixels_become_white():
    assert (odd_image("png_alpha")[0, 0] == 255).all()


def test_exif_orientation_is_applied():
    image = odd_image("exif_rotated")
    assert image.shape == (48, 24, 3)
    top, bottom = image[:20].mean((0, 1)), image[-20:].mean((0, 1))
    assert (top[0] > 150 > top[1] and bottom.mean() > 200) or bottom[0] < 100


def test_filter_leaves_out_and_counts():
    samples, faults = read("unsafe_field", filters=["punsafe<0.5"])
    assert len(samples) == 4 and faults == {"filtered_punsafe": 1}
    assert len(read("unsafe_field", filters=["NSFW!=NSFW"])[0]) == 4
    assert len(read("unsafe_field", filters=["no_such_field<0.5"])[0]) == 5
