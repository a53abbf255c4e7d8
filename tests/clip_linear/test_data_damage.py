"""Damage of all kinds, made here: no good sample lost, no image with another's caption, each loss named."""

import bz2
import gzip
import io
import json
import lzma
import random
import re
import tarfile
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from clip_linear.data import read_groups, read_samples

STRIDE = 3584  # bytes of one sample in a shard made by pack(members(…))
COLOURS = [[n * 37 % 256, n * 91 % 256, n * 151 % 256] for n in range(32)]


def picture(number, kind="JPEG", size=24, **options):
    """An image whose colour tells its number, so that a wrong pairing shows."""
    buffer = io.BytesIO()
    Image.new("RGB", (size, size), tuple(COLOURS[number])).save(buffer, kind, **options)
    return buffer.getvalue()


def members(numbers, with_json=True):
    found = []
    for n in numbers:
        found.append((f"{n:09d}.jpg", picture(n, quality=95)))
        if with_json:
            found.append((f"{n:09d}.json", json.dumps({"key": f"{n:09d}"}).encode()))
        found.append((f"{n:09d}.txt", f"number {n}".encode()))
    return found


def pack(entries, format=tarfile.USTAR_FORMAT):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for name, content in entries:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def read(tmp_path, *shards):
    paths = []
    for i, content in enumerate(shards):
        paths.append(tmp_path / f"{i:05d}.tar")
        paths[-1].write_bytes(content)
    faults = []
    samples = list(read_samples([str(p) for p in paths], faults=faults))
    return samples, dict(Counter(f.reason for f in faults))


def numbers(samples):
    return [int(s.caption.split()[1]) for s in samples]


def assert_pairs_match(samples):
    for sample in samples:
        n = int(sample.caption.split()[1])
        seen = np.asarray(sample.image).reshape(-1, 3).mean(0)
        assert np.abs(seen - COLOURS[n]).max() < 6, sample.caption


def header_of(content, name):
    return content.index(name.encode())


def flip(content, at):
    return content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]


@pytest.mark.parametrize("extension", ["jpg", "json", "txt"])
def test_one_flipped_byte_in_a_header_costs_one_sample(tmp_path, extension):
    content = pack(members(range(5)))
    samples, faults = read(tmp_path, flip(content, header_of(content, f"000000002.{extension}") + 110))
    assert numbers(samples) == [0, 1, 2, 3, 4] if extension == "json" and len(samples) == 5 else [0, 1, 3, 4]
    assert faults == {"corrupt_shard": 1}


def test_a_flipped_size_does_not_swallow_what_follows(tmp_path):
    content = pack(members(range(5)))
    samples, faults = read(tmp_path, flip(content, header_of(content, "000000001.jpg") + 130))
    assert numbers(samples) == [0, 2, 3, 4] and faults == {"corrupt_shard": 1}


def test_first_and_last_header_damaged(tmp_path):
    content = pack(members(range(5)))
    samples, faults = read(tmp_path, flip(flip(content, 3), header_of(content, "000000004.txt") + 3))
    assert numbers(samples) == [1, 2, 3] and faults == {"corrupt_shard": 1}


@pytest.mark.parametrize("lost", [1, 100, 512, 700, 1500])
def test_lost_bytes_inside_a_member(tmp_path, lost):
    entries = members(range(6))
    entries[6] = (entries[6][0], picture(2, "PNG", 24) + bytes(range(256)) * 12)
    content = pack(entries)
    at = header_of(content, "000000002.jpg") + 512 + 600
    samples, faults = read(tmp_path, content[:at] + content[at + lost :])
    assert set(numbers(samples)) >= {0, 1, 3, 4, 5} and faults["corrupt_shard"] == 1
    assert_pairs_match([s for s in samples if s.caption != "number 2"])


@pytest.mark.parametrize("cut", ["pair", "padding", "marker", "zero_marker"])
def test_truncation_is_named_once(tmp_path, cut):
    content = pack(members(range(4), with_json=False))
    last = header_of(content, "000000003.txt")
    at = {"pair": last, "padding": last + 512 + 8, "marker": last + 1024, "zero_marker": last + 1024 + 100}[cut]
    samples, faults = read(tmp_path, content[:at])
    assert numbers(samples) == ([0, 1, 2] if cut == "pair" else [0, 1, 2, 3]) and faults == {"truncated_shard": 1}


def test_a_real_lack_beside_a_truncation_is_named_too(tmp_path):
    entries = [e for e in members(range(5), with_json=False) if e[0] != "000000001.txt"]
    content = pack(entries)
    samples, faults = read(tmp_path, content[: header_of(content, "000000004.txt") + 200])
    assert numbers(samples) == [0, 2, 3] and faults == {"missing_caption": 1, "truncated_shard": 1}


def test_members_may_stand_anywhere_in_the_shard(tmp_path):
    entries = sorted(members(range(5)), key=lambda e: e[0].split(".")[1])
    samples, faults = read(tmp_path, pack(entries))
    assert sorted(numbers(samples)) == [0, 1, 2, 3, 4] and faults == {}
    assert_pairs_match(samples)


def test_a_truncated_unsorted_shard_blames_the_truncation(tmp_path):
    content = pack(sorted(members(range(5), with_json=False), key=lambda e: e[0].split(".")[1]))
    samples, faults = read(tmp_path, content[: header_of(content, "000000003.txt") + 100])
    assert numbers(samples) == [0, 1, 2] and faults == {"truncated_shard": 1}


def test_a_shard_never_completes_a_sample_of_another(tmp_path):
    first = pack([*members([0, 1]), ("000000002.jpg", picture(2))])
    second = pack([("000000002.txt", b"number 9"), *members([3, 4])])
    samples, faults = read(tmp_path, first, second)
    assert numbers(samples) == [0, 1, 3, 4] and faults == {"missing_caption": 1, "missing_image": 1}


def test_a_key_that_comes_again(tmp_path):
    samples, faults = read(tmp_path, pack([*members([0, 1, 2]), *members([1])]))
    assert numbers(samples) == [0, 1, 2] and faults == {"duplicate_key": 1}


def test_two_archives_in_one_file_may_use_the_same_keys(tmp_path):
    other = [(f"{n - 5:09d}.{name.split('.')[1]}", c) for n in (5, 6, 7) for name, c in members([n])]
    samples, faults = read(tmp_path, pack(members([0, 1, 2])) + pack(other))
    assert numbers(samples) == [0, 1, 2, 5, 6, 7] and faults == {"data_after_end": 1}
    samples, faults = read(tmp_path, pack(members([0, 1, 2])) * 2)
    assert numbers(samples) == [0, 1, 2] and faults == {"data_after_end": 1, "duplicate_key": 3}


def test_a_sample_is_not_joined_over_the_seam_of_two_archives(tmp_path):
    content = pack([*members([0]), ("000000001.jpg", picture(1))]) + pack([("000000001.txt", b"number 9")])
    samples, faults = read(tmp_path, content)
    assert numbers(samples) == [0] and faults == {"data_after_end": 1, "missing_caption": 1, "missing_image": 1}


def test_rubbish_after_the_end_marker_costs_nothing(tmp_path):
    samples, faults = read(tmp_path, pack(members(range(3))) + b"signature" * 50)
    assert numbers(samples) == [0, 1, 2] and faults == {"data_after_end": 1}


def test_names_with_folders_dots_capitals_and_length(tmp_path):
    deep = "a-very-long-folder-name/" * 12
    entries = [(f"{deep}{n:03d}.JPG" if i % 2 == 0 else f"{deep}{n:03d}.Txt", c)
               for n in range(3) for i, (_, c) in enumerate(members([n], with_json=False))]  # fmt: skip
    for format in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        samples, faults = read(tmp_path, pack(entries, format))
        assert numbers(samples) == [0, 1, 2] and faults == {}
        assert samples[0].key == "000"


def test_folders_hold_apart_or_hold_halves(tmp_path):
    apart = [(f"{d}/0.{e}", c) for d, n in (("a", 0), ("b", 1)) for e, c in zip(("jpg", "txt"), pair(n))]
    samples, faults = read(tmp_path, pack(apart))
    assert sorted(numbers(samples)) == [0, 1] and faults == {}
    assert_pairs_match(samples)
    halves = [
        (f"{'img' if e == 'jpg' else 'txt'}/{n}.{e}", c) for n in range(3) for e, c in zip(("jpg", "txt"), pair(n))
    ]
    samples, faults = read(tmp_path, pack(halves))
    assert sorted(numbers(samples)) == [0, 1, 2] and faults == {}


def pair(n):
    return picture(n, quality=95), f"number {n}".encode()


@pytest.mark.parametrize("pack_file", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_shards_whatever_their_name(tmp_path, pack_file):
    samples, faults = read(tmp_path, pack_file(pack(members(range(4)))))
    assert numbers(samples) == [0, 1, 2, 3] and faults == {}


def test_cut_and_damaged_gzip(tmp_path):
    content = gzip.compress(
        pack([(n, c + random.Random(n).randbytes(2000) * n.endswith("jpg")) for n, c in members(range(20))])
    )
    samples, faults = read(tmp_path, content[: len(content) // 2])
    assert 5 <= len(samples) <= 12 and faults == {"truncated_shard": 1}
    samples, faults = read(tmp_path, flip(content, len(content) - 6))
    assert len(samples) == 20 and faults == {"corrupt_shard": 1}


@pytest.mark.parametrize(
    ("extra", "report"),
    [
        ([("7.gif", picture(7, "GIF")), ("7.txt", b"number 7")], {"unsupported_extension": 1}),
        ([("7.v1.jpg", picture(7)), ("7.v1.txt", b"number 7")], {}),
        ([("7.jpg", picture(7)), ("7.txt", b" \n\t ")], {"empty_caption": 1}),
        ([("7.jpg", picture(7)), ("7.txt", "über".encode("latin-1"))], {"caption_not_utf8": 1}),
        ([("7.jpg", b"<html>404</html>"), ("7.txt", b"number 7")], {"image_decode_error": 1}),
        ([("7.jpg", picture(7)), ("7.cls", b"7")], {"missing_caption": 1}),
        ([("7.jpg", picture(7)), ("7.json", b"{")], {"missing_caption": 1, "bad_json": 1}),
        ([("7.jpg", picture(7)), ("7.json", b"[1]")], {"missing_caption": 1}),
        ([("7.jpg", picture(7)), ("7.json", b'{"caption": " "}')], {"empty_caption": 1}),
        ([("._7.jpg", b"x"), (".DS_Store", b"x"), ("__MACOSX/7.jpg", b"x"), ("LICENSE", b"x"), ("n.db", b"x")], {}),
    ],
)
def test_odd_samples_are_left_out_by_name(tmp_path, extra, report):
    samples, faults = read(tmp_path, pack([*members([0, 1]), *extra, *members([2])]))
    assert numbers(samples) == [0, 1, 2] and faults == report


@pytest.mark.parametrize(
    "extra",
    [
        [("7.jpg", picture(7)), ("7.txt", b"\xef\xbb\xbfnumber 7")],
        [("7.jpeg", picture(7)), ("7.json", b'{"caption": "number 7"}')],
        [("7.JPEG", picture(7)), ("7.TXT", b"number 7")],
        [("7.png", picture(7, "PNG")), ("7.gif", picture(8, "GIF")), ("7.txt", b"number 7")],
    ],
)
def test_odd_samples_that_are_good(tmp_path, extra):
    samples, faults = read(tmp_path, pack([*members([0]), *extra]))
    assert numbers(samples) == [0, 7] and faults == {}
    assert samples[1].caption == "number 7"


def test_a_hard_link_has_the_content_of_its_target(tmp_path):
    buffer = io.BytesIO(pack(members([0], with_json=False)))
    with tarfile.open(fileobj=buffer, mode="a") as tar:
        info = tarfile.TarInfo("5.jpg")
        info.type, info.linkname = tarfile.LNKTYPE, "000000000.jpg"
        tar.addfile(info)
        info = tarfile.TarInfo("5.txt")
        info.size = 8
        tar.addfile(info, io.BytesIO(b"number 0"))
    samples, faults = read(tmp_path, buffer.getvalue())
    assert len(samples) == 2 and faults == {}
    assert_pairs_match(samples)


def test_random_damage_never_mixes_pairs_and_always_shows(tmp_path):
    content = pack(members(range(12)))
    rng = random.Random(0)
    for _ in range(150):
        at, n = rng.randrange(len(content) - 2000), rng.randrange(1, 1500)
        damaged = rng.choice(
            [
                content[:at] + content[at + n :],
                content[:at] + rng.randbytes(n) + content[at + n :],
                content[:at] + rng.randbytes(n) + content[at:],
                content[:at] + bytes(n) + content[at + n :],
                content[: at + 1],
            ]
        )
        samples, faults = read(tmp_path, damaged)
        keys = [int(s.key) for s in samples]
        assert len(set(keys)) == len(keys) and set(keys) <= set(range(12))
        # At most the samples whose bytes were touched, and the one after, are lost; a cut loses what follows it.
        last = 11 if damaged == content[: at + 1] else (at + n) // STRIDE + 1
        assert set(range(12)) - set(keys) <= set(range(at // STRIDE, last + 1)), (at, n, faults)
        assert faults or len(samples) == 12
        for sample in samples:
            said = re.fullmatch(r"number (\d+)", sample.caption)
            seen = np.asarray(sample.image).reshape(-1, 3).mean(0)
            shown = [k for k in range(12) if np.abs(seen - COLOURS[k]).max() < 6]
            assert said is None or int(said[1]) == int(sample.key)
            assert shown in ([], [int(sample.key)])


def test_groups_of_any_extension_for_evaluation(tmp_path):
    path = tmp_path / "0.tar"
    path.write_bytes(pack([("s0.cls", b"3"), ("s0.jpg", b"a"), ("s1.jpg", b"b"), ("s1.cls", b"4"), ("s1.v.npy", b"c")]))
    assert list(read_groups(str(path))) == [
        ("s0", {"cls": b"3", "jpg": b"a"}),
        ("s1", {"jpg": b"b", "cls": b"4", "v.npy": b"c"}),
    ]
    faults = []
    assert list(read_groups(str(tmp_path / "none.tar"), faults=faults)) == [] and faults[0].reason == "missing_shard"


def test_palette_and_grey_transparency_become_white(tmp_path):
    buffer = io.BytesIO()
    image = Image.new("P", (8, 8), 0)
    image.putpalette([0, 0, 0, 200, 10, 10])
    image.putpixel((4, 4), 1)
    image.save(buffer, "PNG", transparency=0)
    grey = io.BytesIO()
    Image.new("LA", (8, 8), (0, 0)).save(grey, "PNG")
    entries = [("1.png", buffer.getvalue()), ("1.txt", b"a"), ("2.png", grey.getvalue()), ("2.txt", b"b")]
    samples, _ = read(tmp_path, pack(entries))
    assert samples[0].image.getpixel((0, 0)) == (255, 255, 255) and samples[0].image.getpixel((4, 4)) == (200, 10, 10)
    assert samples[1].image.getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_exif_orientation(tmp_path, orientation):
    from PIL import ImageOps

    pixels = np.random.default_rng(0).integers(0, 255, (16, 24, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", exif=exif, quality=95)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(buffer.getvalue())))
    samples, _ = read(tmp_path, pack([("1.jpg", buffer.getvalue()), ("1.txt", b"a")]))
    assert np.array_equal(np.asarray(samples[0].image), np.asarray(expected))
