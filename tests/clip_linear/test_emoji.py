"""The embedded data set: what it writes, that it writes the same twice, and never half of it."""

import errno
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
from PIL import Image

import clip_linear
from clip_linear.emoji import concepts, folder, models
from clip_linear.errors import RunError, UserError

ROOT = Path(__file__).resolve().parents[2]
CLASS_SETS = ("twemoji_objects", "twemoji_flags", "twemoji_people", "twemoji_unseen")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("emoji") / "data"
    return root, clip_linear.emoji.write(root)


def tree(root):
    return {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in root.rglob("*") if p.is_file()
    }


def members(tar_path):
    with tarfile.open(tar_path) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar}


def samples(root, folder):
    for path in sorted((root / folder).glob("*.tar")):
        files = members(path)
        for key in sorted({name.split(".")[0] for name in files}):
            yield path, key, files[key + ".jpg"], json.loads(files[key + ".json"]), files[key + ".txt"].decode()


def test_training_shards_are_shaped_as_img2dataset_writes_them(data):
    root, counts = data
    assert 7000 < counts["train"]["pairs"] < 7800
    found = list(samples(root, "train"))
    assert len(found) == counts["train"]["pairs"] == sum(counts["train"]["per_team"].values())
    sizes = json.loads((root / "train/sizes.json").read_text())
    assert sum(sizes.values()) == len(found) and len(sizes) == counts["train"]["shards"]
    for shard in sizes:
        stats = json.loads((root / "train" / shard.replace(".tar", "_stats.json")).read_text())
        assert stats["successes"] == stats["status_dict"]["success"] == sizes[shard]
    for path, key, jpeg, record, text in found:
        assert re.fullmatch(r"\d{9}", key) and int(key) // 10_000 == int(path.stem)
        assert record["key"] == key and record["caption"] == text and text.strip()
        assert record["sha256"] == hashlib.sha256(jpeg).hexdigest()
    image = Image.open(io.BytesIO(found[0][2]))
    assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (64, 64))


def test_images_and_captions_belong_together(data):
    """A pair's image is the tile of its own concept: compared with the sheet itself, by mean absolute difference."""
    root, _ = data
    sheets = {t: Image.open(ROOT / f"clip_linear/emoji/{t}.webp").convert("RGB") for t in concepts.TRAIN_TEAMS}
    table = {c.hexcode: c for c in concepts.load_concepts()}
    for _, _, jpeg, record, text in list(samples(root, "val")):
        concept, team = table[record["hexcode"]], record["vendor"]
        assert concept.name in text or all(k in concept.keywords for k in text.split(", "))
        x, y = concept.tiles[team] % 64 * 64, concept.tiles[team] // 64 * 64
        tile, image = sheets[team].crop((x, y, x + 64, y + 64)).tobytes(), Image.open(io.BytesIO(jpeg)).tobytes()
        assert sum(abs(a - b) for a, b in zip(tile, image)) / len(tile) < 5


def test_no_evaluation_image_is_trained_on(data):
    root, _ = data
    trained = {hashlib.sha256(s[2]).digest() for part in ("train", "val") for s in samples(root, part)}
    vendors = {s[3]["vendor"] for part in ("train", "val") for s in samples(root, part)}
    assert vendors == set(concepts.TRAIN_TEAMS)
    for image in (root / "eval/imagefolder").rglob("*.jpg"):
        assert hashlib.sha256(image.read_bytes()).digest() not in trained


def test_unseen_concepts_are_in_no_image_and_no_caption(data):
    root, _ = data
    unseen = (root / "eval/imagefolder/twemoji_unseen/classnames.txt").read_text().split("\n")
    found = [s for part in ("train", "val") for s in samples(root, part)]
    assert not {s[3]["label"] for s in found} & set(unseen)
    assert not {s[4] for s in found} & {t.format(c=name) for t in concepts.TEMPLATES for name in unseen}


def test_classes_that_are_evaluated_were_trained(data):
    root, _ = data
    trained = {s[3]["label"] for s in samples(root, "train")}
    for name in ("twemoji_objects", "twemoji_flags"):
        assert set((root / f"eval/imagefolder/{name}/classnames.txt").read_text().split("\n")) <= trained


@pytest.mark.parametrize("name", CLASS_SETS)
def test_both_layouts_of_a_set_agree(data, name):
    root, counts = data
    image_folder, wds = root / "eval/imagefolder" / name, root / "eval/wds" / f"wds_{name}"
    classes = (wds / "classnames.txt").read_text().split("\n")
    templates = (wds / "zeroshot_classification_templates.txt").read_text().split("\n")
    assert len(set(classes)) == len(classes) == counts["eval"][name]["classes"]
    assert templates and all("{c}" in t for t in templates)
    for file in ("classnames.txt", "zeroshot_classification_templates.txt"):
        assert (image_folder / file).read_bytes() == (wds / file).read_bytes()
    assert sorted(p.name for p in image_folder.iterdir() if p.is_dir()) == [f"{i:04d}" for i in range(len(classes))]
    assert (wds / "test/nshards.txt").read_text() == "1"
    files = members(wds / "test/0.tar")
    tarred = sorted((int(v), files[k[:-4] + ".jpg"]) for k, v in files.items() if k.endswith(".cls"))
    assert tarred == sorted((int(p.parent.name), p.read_bytes()) for p in image_folder.rglob("*.jpg"))
    assert len(tarred) == counts["eval"][name]["images"]


def test_retrieval_set_has_its_captions_in_both_layouts(data):
    root, counts = data
    place, wds = root / "eval/imagefolder/twemoji_retrieval", root / "eval/wds/wds_twemoji_retrieval"
    rows = [json.loads(line) for line in (place / "captions.jsonl").read_text().splitlines()]
    files = members(wds / "test/0.tar")
    assert (wds / "dataset_type.txt").read_text() == "retrieval"
    for row, key in zip(rows, sorted({name.split(".")[0] for name in files}), strict=True):
        assert (place / row["image"]).read_bytes() == files[key + ".jpg"]
        assert row["captions"] == files[key + ".txt"].decode().split("\n")
        assert 1 <= len(row["captions"]) == len(set(row["captions"])) <= 5
    assert sum(len(r["captions"]) for r in rows) == counts["eval"]["twemoji_retrieval"]["captions"]


def test_same_bytes_again_and_a_complete_folder_is_left_alone(data, tmp_path):
    root, counts = data
    assert clip_linear.emoji.write(tmp_path / "deep/er/data") == counts
    assert tree(tmp_path / "deep/er/data") == tree(root)
    (tmp_path / "deep/er/data/mine.txt").write_text("a user's own file")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "deep").rglob("*")}
    assert clip_linear.emoji.write(tmp_path / "deep/er/data") == counts
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "deep").rglob("*")}


def test_documented_counts_are_the_written_ones(data):
    text = (ROOT / "clip_linear/emoji/README.md").read_text()
    assert json.loads(re.search(r"```json\n(.*?)```", text, re.S).group(1)) == data[1]


def test_a_damaged_folder_is_named_not_used(data, tmp_path):
    shutil.copytree(data[0], tmp_path / "d")
    victim = tmp_path / "d/val/00000.tar"
    content = bytearray(victim.read_bytes())
    content[1000] ^= 1
    victim.write_bytes(content)
    with pytest.raises(UserError, match=r"val/00000\.tar.*has changed"):
        clip_linear.emoji.write(tmp_path / "d")
    victim.unlink()
    with pytest.raises(UserError, match=r"val/00000\.tar.*is missing"):
        clip_linear.emoji.write(tmp_path / "d")


def test_other_settings_and_foreign_folders_are_refused_untouched(data, tmp_path):
    with pytest.raises(UserError, match="per_shard 1000, not 500"):
        clip_linear.emoji.write(data[0], per_shard=500)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/thesis.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    (tmp_path / "manifest").mkdir()
    (tmp_path / "manifest" / folder.MANIFEST).write_text("[1]")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / folder.MANIFEST).write_text((data[0] / folder.MANIFEST).read_text()[:1000])
    before = tree(tmp_path)
    for name in ("foreign", "file", "manifest", "torn"):
        with pytest.raises(UserError, match="not written by"):
            clip_linear.emoji.write(tmp_path / name)
    with pytest.raises(UserError, match="a part of its path is a file"):
        clip_linear.emoji.write(tmp_path / "file" / "data")
    assert tree(tmp_path) == before
    for bad in (0, -1, 10_001, 2.5, "many"):
        with pytest.raises(UserError, match="per_shard"):
            clip_linear.emoji.write(tmp_path / "new", per_shard=bad)
    assert not (tmp_path / "new").exists()


def test_nothing_is_left_when_writing_fails(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    split = folder.split_pairs
    monkeypatch.setattr(folder, "split_pairs", lambda all_: tuple(pairs[:20] for pairs in split(all_)))
    monkeypatch.setattr(folder, "write_sets", full)  # after the shards, before the rest
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty"):
        with pytest.raises(OSError, match="No space left"):
            clip_linear.emoji.write(tmp_path / name)
    assert [p.name for p in tmp_path.rglob("*")] == ["empty"]


def test_two_writers_of_one_folder_both_succeed(data, tmp_path, monkeypatch):
    """The slower one finds the folder complete when it renames its own."""
    root, counts = data

    def overtaken(out, per_shard):
        shutil.copytree(root, tmp_path / "d")
        shutil.copytree(root / "configs", out / "configs")
        return counts

    monkeypatch.setattr(folder, "_fill", overtaken)
    assert clip_linear.emoji.write(tmp_path / "d") == counts
    assert tree(tmp_path / "d") == tree(root)
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_others_may_read_what_is_written(data):
    umask = os.umask(0)
    os.umask(umask)
    for path in [data[0], *data[0].rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~umask, path


def test_importing_loads_nothing_heavy():
    code = (
        "import sys, clip_linear.emoji; from clip_linear.emoji import models; models.small_vocabulary();"
        "print([m for m in ('torch', 'open_clip', 'PIL') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_vocabulary_is_a_prefix_of_openclips(data):
    from open_clip.tokenizer import default_bpe

    small = gzip.decompress((data[0] / "configs" / models.BPE_FILE).read_bytes()).decode()
    assert gzip.decompress(Path(default_bpe()).read_bytes()).decode().startswith(small + "\n")


def test_a_missing_merge_list_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RunError, match="open_clip_torch"):
        models.small_vocabulary()


def test_openclip_itself_loads_every_config(data, monkeypatch):
    import open_clip
    import torch

    monkeypatch.chdir(data[0] / "configs")  # OpenCLIP alone resolves bpe_path from the working folder
    for path in sorted(Path(".").glob("*.json")):
        open_clip.add_model_config(path)
        width = int(path.stem.removeprefix("ViT-emoji-w"))
        model = open_clip.create_model(path.stem)
        tokenizer = open_clip.get_tokenizer(path.stem)
        tokens = tokenizer(["flag: Wales", "an icon of grinning face " * 9])
        assert tokens.shape == (2, 24) and tokens.max() == tokenizer.eot_token_id == tokenizer.vocab_size - 1 == 4095
        assert (tokens == 4095).sum(1).tolist() == [1, 1]
        assert model.visual.positional_embedding.shape == (65, width)
        assert model.token_embedding.weight.shape == (4096, width)
        image, text, _ = model(torch.zeros(2, 3, 32, 32), tokens)
        assert image.shape == text.shape == (2, 64)


def test_context_cuts_no_prompt_and_few_captions(data):
    from open_clip.tokenizer import SimpleTokenizer

    root, _ = data
    tokenizer = SimpleTokenizer(bpe_path=str(root / "configs" / models.BPE_FILE))

    def cut(texts):
        return sum(len(tokenizer.encode(t)) + 2 > models.CONTEXT_LENGTH for t in texts)

    for name, most in zip(CLASS_SETS, (0, 0, 0, 1)):
        names = (root / f"eval/imagefolder/{name}/classnames.txt").read_text().split("\n")
        assert cut(t.format(c=n) for n in names for t in concepts.TEMPLATES) <= most, name
    captions = [s[4] for s in samples(root, "train")]
    assert 0 < cut(captions) < 0.02 * len(captions)


@pytest.mark.parametrize("part", ["train", "val"])
def test_openclips_reader_functions_deliver_every_pair(data, part):
    """OpenCLIP's own grouping and filter, fed with the members of the shards, keep every sample in order."""
    from open_clip_train.data import filter_no_caption_or_no_image, get_dataset_size, group_by_keys_nothrow

    root, counts = data
    pattern = f"{root / part}/{{00000..{counts[part]['shards'] - 1:05d}}}.tar"
    size, shards = get_dataset_size(pattern)
    assert (size, shards) == (counts[part]["pairs"], counts[part]["shards"])
    total = 0
    for path in sorted((root / part).glob("*.tar")):
        stream = ({"fname": n, "data": d, "__url__": str(path)} for n, d in members(path).items())
        grouped = list(group_by_keys_nothrow(stream))
        assert all(filter_no_caption_or_no_image(s) and len(s["__key__"]) == 9 for s in grouped)
        total += len(grouped)
    assert total == counts[part]["pairs"]


@pytest.mark.parametrize("name, runs", [("demo", 16), ("demo-quick", 9)])
def test_packaged_sweeps_name_what_is_written(data, name, runs):
    sweep = tomllib.loads((ROOT / f"launch/sweeps/{name}.toml").read_text())
    assert set(sweep) <= {"sweep", "base", "grid", "resources", "limits", "eval"}
    grid, here = sweep["grid"], data[0].parent  # the folder in which data/ lies
    assert len(grid["model"]) * len(grid["image"]) * len(grid["seed"]) == runs
    assert set(grid["image"]) <= set(clip_linear.list_variants()) and grid["text"] == ["same"]
    for path in (*grid["model"], *sweep["eval"]["datasets"]):
        assert (here / path).exists(), path
    assert list(here.glob(sweep["base"]["train-data"]))
    assert all(s % sweep["base"]["batch-size"] == 0 for s in grid["samples"])


def test_notice_names_every_source_and_the_texts_are_there():
    notice = (ROOT / "NOTICE").read_text()
    for word in ("Noto Emoji", "Fluent Emoji (flat)", "Fluent Emoji (color)", "Twemoji", "CC BY 4.0", "emojibase-data"):
        assert word in notice
    for path in re.findall(r"clip_linear/emoji/licenses/\S+?\.txt", notice):
        assert (ROOT / path).stat().st_size > 500
    assert {p.name for p in (ROOT / "clip_linear/emoji/licenses").iterdir()} == {
        os.path.basename(p) for p in re.findall(r"licenses/(\S+?\.txt)", notice)
    }
