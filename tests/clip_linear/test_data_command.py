"""``clip-linear data check|write`` and ``bench data`` as a user types them."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from clip_linear.__main__ import main
from clip_linear.data import count_samples, read_samples

FOLDER = Path(__file__).parent / "shards"
CASES = json.loads((FOLDER / "expected.json").read_text())


def run(capsys, *args):
    code = main([str(a) for a in args])
    out, err = capsys.readouterr()
    return code, out, err


def check(capsys, *args):
    code, out, _ = run(capsys, "data", "check", "--json", "--workers", 1, *args)
    return code, json.loads(out)


@pytest.mark.parametrize("case", CASES)
def test_check_json_of_every_case(capsys, case):
    expected = CASES[case]
    urls = [str(FOLDER / u) for u in expected["urls"]]
    code, found = check(capsys, *urls, "--captions")
    assert found["shards"] == len(urls) and found["faults"] == expected["report"]
    n = len(expected["good"])
    assert n <= found["samples"] <= n + len(expected["optional"])
    assert list(found["per_shard"]) == urls
    captions = [c if len(c) < 1000 else "<huge>" for u in urls for c in found["per_shard"][u]["captions"]]
    assert set(expected["good"]) <= set(captions) and len(captions) == found["samples"]
    assert sum(s["samples"] for s in found["per_shard"].values()) == found["samples"]
    costs = [r for r in expected["report"] if r not in ("bad_json", "data_after_end")]
    assert code == (1 if costs else 0)


def test_check_in_parallel_and_later(capsys, tmp_path):
    urls = sorted(str(p) for p in FOLDER.glob("*.tar"))
    _, one = check(capsys, *urls)
    _, two = check(capsys, *urls, "--workers", 2)
    assert one == two
    state = tmp_path / "state.jsonl"
    check(capsys, *urls[:10], "--resume", state)
    assert len(state.read_text().splitlines()) == 10
    state.write_text(state.read_text() + '{"torn')
    _, three = check(capsys, *urls, "--resume", state)
    assert three == one
    size = state.stat().st_size
    assert check(capsys, *urls, "--resume", state)[1] == one and state.stat().st_size == size
    # Other options or another file under the same name are scanned again.
    assert check(capsys, *urls, "--resume", state, "--filter", "image_width>500")[1]["samples"] < one["samples"]


def test_check_rescans_a_shard_that_changed(capsys, tmp_path):
    shard, state = tmp_path / "a.tar", tmp_path / "state"
    shard.write_bytes((FOLDER / "clean.tar").read_bytes())
    assert check(capsys, shard, "--resume", state)[1]["samples"] == 5
    shard.write_bytes((FOLDER / "dup_keys_a.tar").read_bytes())
    assert check(capsys, shard, "--resume", state)[1]["samples"] == 3


def test_check_text_names_the_first_of_each_kind(capsys):
    code, out, err = run(capsys, "data", "check", FOLDER / "clean.tar", FOLDER / "jpeg_truncated.tar")
    assert code == 1 and "9 good samples" in out and "image_decode_error" in out and "000000002" in out
    assert "4 samples repeat the image of another" in out and "--max-fault-rate" in err
    assert run(capsys, "data", "check", FOLDER / "jpeg_truncated.tar", "--max-fault-rate", 0.3)[0] == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["check", "nowhere/*.tar"], "no file matches"),
        (["check", "a.tar", "--filter", "punsafe"], "not understood"),
        (["check", "a.tar", "--filter", "punsafe<high"], "no number"),
        (["check", "{0..3.tar"], "braces"),
        (["check", "a.tar", "--captions"], "--json"),
        (["check", "a.tar", "--workers", "0"], "at least 1"),
        (["check", "a.tar", "--max-fault-rate", "nan"], "from 0 to 1"),
        (["check", "a.tar", "--max-fault-rate", "2"], "from 0 to 1"),
        (["check", "a.tar", "--max-image-pixels", "-5"], "at least 1"),
        (["check"], "required: shards"),
        (["write", "nowhere", "--out", "x"], "does not exist"),
        (["write", ".", "--out", "."], "also a source"),
        (["write", ".", "--out", "x", "--csv-separator", "ab"], "one character"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(capsys, args, words):
    code, _, err = run(capsys, "data", *args)
    assert code == 2 and words in err and err.count("\n") == 1


def png(colour):
    buffer = io.BytesIO()
    Image.new("RGB", (9, 7), colour).save(buffer, "PNG")
    return buffer.getvalue()


def test_write_from_a_folder(capsys, tmp_path):
    source, out = tmp_path / "in" / "deep", tmp_path / "out"
    source.mkdir(parents=True)
    for i in range(7):
        (source / f"{i}.png").write_bytes(png((i, 0, 0)))
        (source / f"{i}.txt").write_text(f"picture {i}")
    (source / "7.bmp").write_bytes(bmp())
    (source / "7.json").write_text('{"caption": "a bitmap"}')
    (source / "8.png").write_bytes(png((8, 0, 0)))
    (source / "9.png").write_bytes(b"broken")
    (source / "9.txt").write_text("broken")
    code, text, err = run(capsys, "data", "write", tmp_path / "in", "--out", out, "--samples-per-shard", 5, "--json")
    found = json.loads(text)
    assert code == 0 and found["faults"] == {"missing_caption": 1, "image_decode_error": 1}
    assert found["samples"] == 8 and found["shards"] == 2 and err.count("\n") == 2
    samples = list(read_samples(str(out)))
    assert [s.caption for s in samples] == [*(f"picture {i}" for i in range(7)), "a bitmap"]
    assert [s.key for s in samples[:2]] == ["000000000", "000000001"] and samples[5].key == "000010000"
    assert json.loads((out / "sizes.json").read_text()) == {"00000.tar": 5, "00001.tar": 3}
    assert count_samples([str(p) for p in sorted(out.glob("*.tar"))]) == 8
    assert check(capsys, out)[1]["faults"] == {}
    code, _, err = run(capsys, "data", "write", tmp_path / "in", "--out", out)
    assert code == 2 and "holds shards already" in err


def bmp():
    buffer = io.BytesIO()
    Image.new("RGB", (5, 5), (1, 2, 3)).save(buffer, "BMP")
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet", "hf"])
def test_write_from_a_table(capsys, tmp_path, kind):
    for i in range(4):
        (tmp_path / f"{i}.png").write_bytes(png((i, 0, 0)))
    rows = [{"filepath": f"{i}.png", "title": f"row {i}"} for i in range(4)]
    rows += [{"filepath": "none.png", "title": "x"}, {"filepath": "0.png", "title": " "}]
    if kind in ("csv", "tsv"):
        table = tmp_path / f"t.{kind}"
        with open(table, "w", newline="") as file:
            writer = csv.DictWriter(file, ["filepath", "title"], delimiter="," if kind == "csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
    else:
        pa = pytest.importorskip("pyarrow", reason="needs pyarrow; run: pip install -e .[parquet]")
        import pyarrow.parquet as pq

        table = tmp_path / "t.parquet"
        if kind == "hf":
            rows = [{"filepath": {"bytes": png((i, 0, 0)), "path": None}, "title": f"row {i}"} for i in range(4)]
            rows += [{"filepath": {"bytes": None, "path": "none.png"}, "title": "x"}]
            rows += [{"filepath": {"bytes": png((0, 0, 0)), "path": None}, "title": ""}]
        pq.write_table(pa.Table.from_pylist(rows), table)
    code, out, _ = run(capsys, "data", "write", table, "--out", tmp_path / "out", "--shuffle", 1, "--json")
    assert code == 0 and json.loads(out)["faults"] == {"missing_image": 1, "empty_caption": 1}
    captions = [s.caption for s in read_samples(str(tmp_path / "out"))]
    assert sorted(captions) == [f"row {i}" for i in range(4)] != captions
    code, _, err = run(capsys, "data", "write", table, "--out", tmp_path / "o2", "--csv-img-key", "image")
    assert code == 2 and "'title'" in err and not (tmp_path / "o2").exists()


def test_sizes_from_the_notes_of_other_writers(tmp_path):
    for name in ("00000", "00001"):
        (tmp_path / f"{name}.tar").write_bytes(b"")
    urls = [str(tmp_path / f"{name}.tar") for name in ("00000", "00001")]
    assert count_samples(urls) is None
    (tmp_path / "__len__").write_text("17")
    assert count_samples(urls) == 17
    for name, n in (("00000", 3), ("00001", 4)):
        (tmp_path / f"{name}_stats.json").write_text(json.dumps({"count": 9, "successes": n}))
    assert count_samples(urls) == 7
    (tmp_path / "sizes.json").write_text(json.dumps({"00000.tar": 5, "00001.tar": 5}))
    assert count_samples(urls) == 10
    assert count_samples(["s3://bucket/0.tar"]) is None


def test_shard_lists(tmp_path, monkeypatch):
    from clip_linear.data import expand

    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.tar").write_bytes(b"")
    names = [str(tmp_path / f"{n}.tar") for n in "abc"]
    assert expand(str(tmp_path)) == names == expand(str(tmp_path / "*.tar"))
    assert expand(str(tmp_path / "{c,a}.tar")) == [names[2], names[0]]
    assert expand(f"{names[1]}::{names[0]}") == names[1::-1] == expand([names[1], names[0]])
    (tmp_path / "list.txt").write_text("# a list\nb.tar\n\n" + names[2] + "\n")
    assert expand(str(tmp_path / "list.txt")) == names[1:]
    assert expand("s3://b/{0..1}.tar::pipe:cat {x,y}.tar") == [
        *("s3://b/0.tar", "s3://b/1.tar"),
        *("pipe:cat x.tar", "pipe:cat y.tar"),
    ]
    monkeypatch.chdir(tmp_path)
    assert expand("a.tar") == ["a.tar"] and expand("none.tar") == ["none.tar"]


def test_help_is_quick_and_reading_needs_neither_torch_nor_webdataset():
    code = (
        "import sys, runpy; sys.argv = ['x', 'data', 'check', '--json', sys.argv[1]]\n"
        "try: runpy.run_module('clip_linear', run_name='__main__')\n"
        "except SystemExit as e: print(e.code, [m for m in ('torch', 'webdataset', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(FOLDER / "clean.tar")], capture_output=True, text=True, env={**os.environ}
    )
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout + done.stderr


@pytest.mark.slow
def test_bench_data_checks_and_measures(capsys, tmp_path):
    args = ["bench", "data", "--count", 64, "--side", 40, "--image-size", 32, "--batch-size", 8, "--batches", 2]
    code, out, _ = run(capsys, *args, "--rounds", 2, "--workers", 0, "--json", "--out", tmp_path / "rows.csv")
    result = json.loads(out)["results"][0]
    assert code == 0 and result["samples_checked"] == 64 and result["ratio"]["median"] > 0
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 3
    code, _, err = run(capsys, *args, "--train-data", FOLDER / "png_alpha.tar", "--workers", 0)
    assert code == 1 and "differ" in err


def test_a_foreign_file_is_not_resumed_from(capsys, tmp_path):
    table = tmp_path / "mine.csv"
    table.write_text("a,b\n1,2\n")
    code, _, err = run(capsys, "data", "check", str(FOLDER / "clean.tar"), "--workers", 1, "--resume", table)
    assert code == 2 and "mine.csv" in err and table.read_text() == "a,b\n1,2\n"


def test_writing_nothing_leaves_nothing(capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    code, _, _ = run(capsys, "data", "write", tmp_path / "empty", "--out", tmp_path / "out")
    assert code != 0 and not list((tmp_path / "out").glob("*"))
