"""Every layout that ImageNet comes in gives the right accuracy, or a clear refusal.

The pictures are labelled so that the answer is known beforehand: OpenCLIP's own classifier over the 1,000 names says
what the model takes each picture for; three quarters get that class, the others a wrong one.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from clip_linear.errors import UserError
from clip_linear_eval.classnames import synsets
from clip_linear_eval.settings import Settings
from clip_linear_eval.zeroshot import evaluate, measure
from tests.eval.evalsets import image_bytes, write_tar


@dataclass
class Known:
    """Pictures by the index of their class among ImageNet's 1,000; ``right`` of them are classified so."""

    pictures: list[tuple[int, bytes]]
    right: int

    @property
    def classes(self) -> list[int]:
        return sorted({label for label, _ in self.pictures})


def label(guesses: list[int], data: list[bytes]) -> Known:
    """Every fourth picture gets the class of the one before it (another class), the rest what the model says."""
    labels = list(guesses)
    for i in range(3, len(labels), 4):
        labels[i] = next(g for g in guesses if g != guesses[i])
    return Known(list(zip(labels, data)), sum(a == b for a, b in zip(labels, guesses)))


def guess(clip, columns: list[int], data: list[bytes]) -> list[int]:
    """What the model takes pictures for among some of the 1,000 classes, by OpenCLIP's own classifier."""
    import torch
    from open_clip import IMAGENET_CLASSNAMES, build_zero_shot_classifier
    from PIL import Image

    model, preprocess, tokenizer = clip
    names = [IMAGENET_CLASSNAMES[c] for c in columns]
    classifier = build_zero_shot_classifier(model, tokenizer, names, ["a photo of a {}."], num_classes_per_batch=500)
    images = torch.stack([preprocess(Image.open(io.BytesIO(d)).convert("RGB")) for d in data])
    with torch.no_grad():
        return [columns[i] for i in (model.encode_image(images, normalize=True) @ classifier).argmax(1).tolist()]


DATA = [image_bytes(seed) for seed in range(24)]


@pytest.fixture(scope="module")
def known(clip) -> Known:
    found = label(guess(clip, list(range(1000)), DATA), DATA)
    assert len(found.classes) > 8 and 0 < found.right < len(DATA)
    return found


def top1(clip, root: Path, **settings) -> tuple[int, int]:
    rows = evaluate(*clip, root, templates="1", **settings)
    return rows[0]["correct"], rows[0]["n"]


def write_wnids(root: Path, known: Known, extra: tuple[str, ...] = ()) -> Path:
    for i, (c, data) in enumerate(known.pictures):
        folder = root / synsets("imagenet-1k")[c]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"ILSVRC2012_val_{i + 1:08d}.JPEG").write_bytes(data)
    for name in extra:
        (root / name).mkdir()
        (root / name / "x.jpg").write_bytes(DATA[0])
    return root


def test_some_of_the_1000_folders_are_scored_against_all(clip, known: Known, tmp_path: Path) -> None:
    evaluation = measure(*clip, write_wnids(tmp_path / "val", known), Settings(templates="1"))
    assert evaluation.rows[0]["correct"] == known.right and evaluation.rows[0]["n"] == 24
    assert evaluation.rows[0]["n_classes"] == 1000 and evaluation.rows[0]["names"] == "imagenet-1k:openai"
    assert any("1000 classes" in note and "have no image" in note for note in evaluation.notes)


def test_restrict_scores_against_the_present_ones(clip, known: Known, tmp_path: Path) -> None:
    few = known.classes[:6]
    found = label(guess(clip, few, DATA), DATA)
    whole = sum(g == c for g, (c, _) in zip(guess(clip, list(range(1000)), DATA), found.pictures))
    assert whole < found.right
    root = write_wnids(tmp_path / "val", found)
    assert top1(clip, root, restrict=True) == (found.right, 24)
    assert top1(clip, root) == (whole, 24)


def test_five_folders(clip, known: Known, tmp_path: Path) -> None:
    five = known.classes[:5]
    part = Known([p for p in known.pictures if p[0] in five], 0)
    guesses = guess(clip, list(range(1000)), [data for _, data in part.pictures])
    expected = sum(g == c for g, (c, _) in zip(guesses, part.pictures))
    assert expected > 0
    assert top1(clip, write_wnids(tmp_path / "val", part)) == (expected, len(part.pictures))


@pytest.mark.parametrize("extra", ["n99999999", "misc"])
def test_an_unknown_folder_is_listed(clip, known: Known, tmp_path: Path, extra: str) -> None:
    root = write_wnids(tmp_path / "val", known, (extra,))
    with pytest.raises(UserError, match=rf"unknown classes '{extra}'"):
        evaluate(*clip, root)


def test_numeric_folders_of_v2(clip, known: Known, tmp_path: Path) -> None:
    for i, (c, data) in enumerate(known.pictures):  # 1, 10, 2, … would be the order of a sorted listing
        folder = tmp_path / "imagenetv2-matched-frequency-format-val" / str(c)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i}.jpeg").write_bytes(data)
    root = tmp_path / "imagenetv2-matched-frequency-format-val"
    assert top1(clip, root) == (known.right, 24)
    moved = root.rename(tmp_path / "numbers")
    assert top1(clip, moved, classnames="imagenet-1k:openai") == (known.right, 24)
    with pytest.raises(UserError, match="numbers and there is no classnames"):
        evaluate(*clip, moved)
    (moved / "1000").mkdir()
    (moved / "1000" / "0.jpeg").write_bytes(DATA[0])
    with pytest.raises(UserError, match=r"class-count mismatch.*1000"):
        evaluate(*clip, moved, classnames="imagenet-1k:openai")


def test_a_level_too_high_or_too_low(clip, known: Known, tmp_path: Path) -> None:
    root = write_wnids(tmp_path / "imagenet" / "val", known)
    write_wnids(tmp_path / "imagenet" / "train", known)
    with pytest.raises(UserError, match=r"level too high.*give one of them"):
        evaluate(*clip, tmp_path / "imagenet")
    with pytest.raises(UserError, match="the folder above if this is one class"):
        evaluate(*clip, next(p for p in root.iterdir() if p.is_dir()))
    with pytest.raises(UserError, match="no images"):
        (tmp_path / "empty" / "n01440764").mkdir(parents=True)
        evaluate(*clip, tmp_path / "empty")


def write_flat(root: Path, known: Known) -> Path:
    root.mkdir(parents=True)
    for i, (_, data) in enumerate(known.pictures):
        (root / f"ILSVRC2012_val_{i + 1:08d}.JPEG").write_bytes(data)
    return root


def test_flat_validation_with_labels(clip, known: Known, tmp_path: Path) -> None:
    root = write_flat(tmp_path / "ILSVRC" / "Data" / "CLS-LOC" / "val", known)
    with pytest.raises(UserError, match="no label file"):
        evaluate(*clip, root)
    rows = ["ImageId,PredictionString"]
    for i, (c, _) in reversed(list(enumerate(known.pictures))):
        rows.append(f"ILSVRC2012_val_{i + 1:08d},{synsets('imagenet-1k')[c]} 1 2 3 4 ")
    kaggle = tmp_path / "ILSVRC" / "LOC_val_solution.csv"
    kaggle.write_text("\n".join(rows))
    assert top1(clip, root) == (known.right, 24)
    kaggle.write_text("\n".join(rows[:-1]))
    with pytest.raises(UserError, match=r"1 of 24 images have no label"):
        evaluate(*clip, root)
    kaggle.unlink()
    numbers = tmp_path / "mine.txt"
    numbers.write_text("\n".join(f"ILSVRC2012_val_{i + 1:08d}.JPEG {c}" for i, (c, _) in enumerate(known.pictures)))
    settings = {"labels": str(numbers), "classnames": "imagenet-1k:openai"}
    assert top1(clip, root, **settings) == (known.right, 24)


@pytest.mark.parametrize("subset", ["imagenet-a", "imagenet-r"])
def test_subsets_are_scored_among_their_200_classes(clip, tmp_path: Path, subset: str) -> None:
    columns = [synsets("imagenet-1k").index(wnid) for wnid in synsets(subset)]
    found = label(guess(clip, columns, DATA), DATA)
    whole = write_wnids(tmp_path / "whole", found)
    for wnid in synsets(subset):  # with a folder for each of the 200, the list is known by itself
        (whole / wnid).mkdir(exist_ok=True)
        (whole / wnid / "bad.jpg").write_bytes(b"")
    rows = evaluate(*clip, whole, templates="1", on_error="skip")
    assert (rows[0]["correct"], rows[0]["n"], rows[0]["n_classes"]) == (found.right, 24, 200)
    part = write_wnids(tmp_path / subset, found)  # a part is known by the folder's name, or by saying so
    assert top1(clip, part) == (found.right, 24)
    assert top1(clip, part.rename(tmp_path / "other"), classnames=subset) == (found.right, 24)


@pytest.mark.parametrize("name", ["val.tar", "val.tar.gz", "flat.tar"])
def test_tars_of_folders(clip, known: Known, tmp_path: Path, name: str) -> None:
    members = []
    for i, (c, data) in enumerate(known.pictures):
        folder = "" if name == "flat.tar" else f"val/{synsets('imagenet-1k')[c]}/"
        members.append((f"{folder}ILSVRC2012_val_{i + 1:08d}.JPEG", data))
    path = write_tar(tmp_path / name, members, "w:gz" if name.endswith("gz") else "w")
    if name == "flat.tar":
        rows = [f"ILSVRC2012_val_{i + 1:08d},{synsets('imagenet-1k')[c]}" for i, (c, _) in enumerate(known.pictures)]
        (tmp_path / "labels.csv").write_text("\n".join(rows))
    assert top1(clip, path) == (known.right, 24)


def test_laion_shards_with_cls(clip, known: Known, tmp_path: Path) -> None:
    members = []
    for i, (c, data) in enumerate(known.pictures):
        members += [(f"{i:09d}.jpg", data), (f"{i:09d}.json", b"{}"), (f"{i:09d}.txt", b"a caption")]
        members += [(f"{i:09d}.cls", str(c).encode())]
    write_tar(tmp_path / "shards" / "00000.tar", members[:48])
    write_tar(tmp_path / "shards" / "00001.tar", [*members[48:], ("x.cls", b"3"), ("y.jpg", DATA[0])])
    rows = evaluate(*clip, tmp_path / "shards", classnames="imagenet-1k", templates="1", on_error="skip")
    assert (rows[0]["correct"], rows[0]["n"]) == (known.right, 24)
    assert sorted(e["file"] for e in rows[0]["errors"]) == ["00001.tar/x", "00001.tar/y.jpg"]


def test_parquet_and_csv(clip, known: Known, tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    from open_clip import IMAGENET_CLASSNAMES

    images = [{"bytes": data, "path": None} for _, data in known.pictures]
    table = pa.table({"image": images, "label": [c for c, _ in known.pictures]})
    features = {"info": {"features": {"label": {"names": list(IMAGENET_CLASSNAMES), "_type": "ClassLabel"}}}}
    folder = tmp_path / "hf"
    folder.mkdir()
    for part in range(2):
        piece = table.slice(12 * part, 12).replace_schema_metadata({"huggingface": json.dumps(features)})
        pq.write_table(piece, folder / f"val-{part}.parquet", row_group_size=5)
    assert top1(clip, folder) == (known.right, 24)
    assert evaluate(*clip, folder, templates="1", limit=5)[0]["names"] == "parquet features"

    rows = ["label,filepath"]
    for i, (c, data) in enumerate(known.pictures):
        (tmp_path / f"{i}.jpg").write_bytes(data)
        rows.append(f"{synsets('imagenet-1k')[c]},{i}.jpg")
    (tmp_path / "list.csv").write_text("\n".join(rows))
    assert top1(clip, tmp_path / "list.csv") == (known.right, 24)
    (tmp_path / "list.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="columns a, b"):
        evaluate(*clip, tmp_path / "list.csv")


def test_real_labels(clip, known: Known, tmp_path: Path) -> None:
    from importlib import resources

    table = json.loads((resources.files("timm") / "data/_info/imagenet_real_labels.json").read_text())
    guesses = guess(clip, list(range(1000)), DATA)
    used = {table.index([])}  # the first image without a label
    for i, g in enumerate(guesses):  # file numbers whose ReaL labels hold the guess, or not
        wanted = (j for j, found in enumerate(table) if (g in found) == (i % 3 > 0) and found and j not in used)
        number = next(wanted) if i != 5 else table.index([])
        used.add(number)
        folder = tmp_path / "val" / synsets("imagenet-1k")[0]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"ILSVRC2012_val_{number + 1:08d}.JPEG").write_bytes(DATA[i])
    rows = evaluate(*clip, tmp_path / "val", templates="1", labels="real")
    assert (rows[0]["correct"], rows[0]["n"], rows[0]["dataset"]) == (15, 23, "val-real")


def test_objectnet(clip, tmp_path: Path) -> None:
    """Its own mapping files: 2 of 3 folders overlap ImageNet; a red frame of two pixels is cropped."""
    from PIL import Image

    from clip_linear_eval.features import decode

    maps = tmp_path / "objectnet-1.0" / "mappings"
    maps.mkdir(parents=True)
    folders = {"alarm_clock": "Alarm clock", "backpack": "Backpack", "zipper_bag": "Zipper bag"}
    (maps / "folder_to_objectnet_label.json").write_text(json.dumps(folders))
    (maps / "objectnet_to_imagenet_1k.json").write_text(
        json.dumps({"Backpack": "backpack, back pack", "Alarm clock": "analog clock; digital clock"})
    )
    for i, folder in enumerate(folders):
        (tmp_path / "objectnet-1.0" / "images" / folder).mkdir(parents=True)
        for j in range(3):
            frame = Image.new("RGB", (44, 44), (255, 0, 0))
            frame.paste(Image.open(io.BytesIO(DATA[3 * i + j])).resize((40, 40)), (2, 2))
            frame.save(tmp_path / "objectnet-1.0" / "images" / folder / f"{j}.png")
    for root in (tmp_path / "objectnet-1.0", tmp_path):
        data = measure(*clip, root, Settings(templates="1")).data
        assert data is not None and data.names == ("alarm clock", "backpack") and len(data.files) == 6
        assert data.labels.tolist() == [0, 0, 0, 1, 1, 1]
        image = decode(data.read(0), data.border)
        assert image.size == (40, 40) and image.getpixel((0, 0)) != (255, 0, 0)


def test_names_of_folders_serve_where_there_are_no_others(clip, tmp_path: Path) -> None:
    for folder in ("red_car", "cat"):
        (tmp_path / "mine" / folder).mkdir(parents=True)
        (tmp_path / "mine" / folder / "0.jpg").write_bytes(DATA[0])
    data = measure(*clip, tmp_path / "mine", Settings()).data
    assert data is not None and data.names == ("cat", "red car") and data.names_source == "folder names"
    with pytest.raises(UserError, match="unknown classes 'red_car'"):
        evaluate(*clip, tmp_path / "mine", classnames=["cat", "blue car"])
    rows = evaluate(*clip, tmp_path / "mine", classnames={"red_car": "a red car", "cat": "cat", "dog": "dog"})
    assert rows[0]["n_classes"] == 3


@pytest.mark.parametrize("name", ["imagenet-22k", "imagenet-21k-p", "imagenet-21k-miil"])
def test_21k_folders_find_their_list(name: str, tmp_path: Path) -> None:
    from clip_linear_eval.datasets import open_source, resolve

    only = next(wnid for wnid in synsets(name) if wnid not in synsets("imagenet-1k"))
    for wnid in (only, synsets(name)[3]):
        (tmp_path / "set" / wnid).mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / wnid / "0.jpg").write_bytes(b"")
    data = resolve(open_source(tmp_path / "set"), classnames=f"{name}:definition")
    assert len(data.names) == len(synsets(name)) and ": " in data.names[0]
    for label, file in zip(data.labels, data.files):
        assert data.classes[label] == Path(file).parts[0] == synsets(name)[label]
    assert resolve(open_source(tmp_path / "set")).names_source == "imagenet-22k:lemma"
