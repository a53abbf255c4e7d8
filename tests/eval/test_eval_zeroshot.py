"""Zero-shot accuracy: equal to an independent computation, in every layout, with honest refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from clip_linear.__main__ import main
from clip_linear.errors import RunError, UserError
from clip_linear_eval.zeroshot import evaluate
from tests.eval.evalsets import NAMES, by_hand, correct, image_bytes, value, write_folder, write_tar


def test_equals_an_independent_computation(clip, folder: Path) -> None:
    rows = evaluate(*clip, folder)
    top1, top5 = by_hand(clip, folder)
    assert 0 < top1 < 28  # a model that is always or never right would prove nothing
    assert (correct(rows, "top1"), correct(rows, "top5")) == (top1, top5)
    assert rows[0]["n"] == 28 and value(rows, "top1") == top1 / 28
    assert rows[0]["ci_low"] < rows[0]["value"] < rows[0]["ci_high"]


def test_equals_openclip(clip, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from open_clip import build_zero_shot_classifier
    from open_clip_train import zero_shot
    from torchvision.datasets import ImageFolder

    model, preprocess, tokenizer = clip
    templates = (folder / "zeroshot_classification_templates.txt").read_text().replace("{c}", "{}").split("\n")
    classifier = build_zero_shot_classifier(model, tokenizer, NAMES, templates)
    loader = torch.utils.data.DataLoader(ImageFolder(str(folder), transform=preprocess), batch_size=8)
    args = type("Args", (), {"device": "cpu", "precision": "fp32", "batch_size": 8})

    def accuracy(output, target, topk=(1,)):  # OpenCLIP 3.3's own fails under numpy 2.4
        found = output.topk(max(topk), 1).indices == target[:, None]
        return [found[:, :k].sum().item() for k in topk]

    monkeypatch.setattr(zero_shot, "accuracy", accuracy)
    rows = evaluate(*clip, folder, batch_size=5)
    assert zero_shot.run(model, classifier, loader, args) == (value(rows, "top1"), value(rows, "top5"))


def wds_twin(folder: Path, out: Path, order: int = 1) -> Path:
    """The same images in CLIP_benchmark's layout, split over two tars."""
    members = []
    for i, path in enumerate(sorted(folder.glob("*/*.jpg"))[::order]):
        members += [(f"s{i:07d}.cls", str(int(path.parent.name)).encode()), (f"s{i:07d}.jpg", path.read_bytes())]
    half = len(members) // 4 * 2
    write_tar(out / "test" / "0.tar", members[:half])
    write_tar(out / "test" / "1.tar", members[half:])
    (out / "test" / "nshards.txt").write_text("2")
    for name in ("classnames.txt", "zeroshot_classification_templates.txt"):
        shutil.copy(folder / name, out / name)
    return out


def test_webdataset_and_folder_agree(clip, folder: Path, tmp_path: Path) -> None:
    rows = evaluate(*clip, wds_twin(folder, tmp_path / "wds_tiny"))
    assert [r["dataset"] for r in rows] == ["wds_tiny"] * 4
    expected = evaluate(*clip, folder)
    for field in ("metric", "value", "n", "correct", "names_hash", "templates_hash", "ci_low", "ci_high"):
        assert [r[field] for r in rows] == [r[field] for r in expected]


@pytest.mark.parametrize("change", [NAMES[:-1], [*NAMES, "zebra"]])
@pytest.mark.parametrize("layout", ["folder", "wds"])
def test_class_count_mismatch_is_refused(clip, folder: Path, tmp_path: Path, change: list[str], layout: str) -> None:
    path = tmp_path / "names.txt"
    path.write_text("\n".join(change))
    data = folder if layout == "folder" else wds_twin(folder, tmp_path / "wds_tiny")
    with pytest.raises(UserError, match="class-count mismatch: 7 classes"):
        evaluate(*clip, data, classnames=path)


def test_a_corrupt_image_is_named(clip, folder: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    whole = (broken / "0003" / "2.jpg").read_bytes()
    (broken / "0003" / "2.jpg").write_bytes(whole[: len(whole) // 2])
    rows = evaluate(*clip, broken, on_error="skip")
    assert [row["n"] for row in rows] == [27] * 4
    assert [e["file"] for e in rows[0]["errors"]] == ["0003/2.jpg"]
    (broken / "0003" / "2.jpg").unlink()
    without = evaluate(*clip, broken)
    assert [(r["value"], r["correct"]) for r in rows] == [(r["value"], r["correct"]) for r in without]
    (broken / "0003" / "2.jpg").write_bytes(b"")
    with pytest.raises(RunError, match=r"0003/2\.jpg.*--on-error skip"):
        evaluate(*clip, broken)


def test_mode_and_random_state_are_left_alone(clip, folder: Path) -> None:
    import torch

    model = clip[0].train()
    before = torch.get_rng_state()
    evaluate(*clip, folder, limit=3)
    assert model.training and torch.equal(before, torch.get_rng_state())
    model.eval()


def test_limit_spreads_over_the_classes(clip, folder: Path) -> None:
    rows = evaluate(*clip, folder, limit=7)
    assert rows[0]["n"] == 7
    assert evaluate(*clip, folder, limit=99)[0]["n"] == 28


def test_command_prints_rows(config: Path, weights: Path, folder: Path, capsys, clip) -> None:
    assert main(["eval", "--model", str(config), "--pretrained", str(weights), "--dataset", str(folder), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [r["metric"] for r in rows] == ["top1", "top5", "mean_per_class_recall", "ece"]
    assert {r["unit"] for r in rows} == {"fraction"} and {r["samples_seen"] for r in rows} == {640}
    assert correct(rows) == correct(evaluate(*clip, folder))
    assert rows[0]["errors"] == [] and len(rows[0]["names_hash"]) == 16


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--pretrained", "random", "--dataset", "nowhere"], "'nowhere'"),
        (["--pretrained", "nothing.pt", "--dataset", "FOLDER"], "nothing.pt"),
        (["--dataset", "FOLDER"], "--pretrained"),
        (["--pretrained", "random", "--dataset", "FOLDER", "--precision", "fp31"], "fp31"),
        (["--pretrained", "random", "--dataset", "FOLDER", "--templates", "simple-8"], "simple-7"),
        (["--pretrained", "random", "--dataset", "FOLDER", "--batch-size", "0"], "--batch-size"),
        (["--pretrained", "random", "--dataset", "FOLDER", "--device", "cudo"], "cudo"),
        (["--pretrained", "random", "--dataset", "FOLDER", "--out", "rows.txt"], "rows.txt"),
    ],
)
def test_mistakes_give_one_line(config: Path, folder: Path, capsys, flags: list[str], words: str) -> None:
    assert main(["eval", "--model", str(config), *[str(folder) if f == "FOLDER" else f for f in flags]]) == 2
    err = capsys.readouterr().err.strip().splitlines()
    assert words in err[-1] and not any("Traceback" in line for line in err)


def test_weights_of_another_model_are_refused(config: Path, folder: Path, tmp_path: Path, capsys) -> None:
    import torch

    torch.save({"state_dict": {"logit_scale": torch.zeros([])}}, tmp_path / "other.pt")
    (tmp_path / "torn.pt").write_bytes(b"PK\x03\x04 torn")
    for name in ("other.pt", "torn.pt"):
        flags = ["--model", str(config), "--pretrained", str(tmp_path / name), "--dataset", str(folder)]
        assert main(["eval", *flags]) == 2
        assert name in capsys.readouterr().err.splitlines()[-1]


def test_an_unreadable_set_says_so(clip, tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set", ["cat", "dog"], 1)
    for path in root.glob("*/*.jpg"):
        path.write_bytes(b"no image")
    with pytest.raises(RunError, match="no image of 'set' could be read"):
        evaluate(*clip, root, on_error="skip")
    assert image_bytes(1)


def test_a_model_at_chance_is_pointed_out(clip, tmp_path: Path) -> None:
    from clip_linear_eval.settings import Settings
    from clip_linear_eval.zeroshot import measure

    root = write_folder(tmp_path / "set", [str(i) for i in range(len(NAMES))], 15, NAMES)
    evaluation = measure(*clip, root, Settings())
    assert evaluation.rows[0]["ci_low"] <= 1 / 7
    assert any("may be chance (14.29 %)" in note for note in evaluation.notes)
    # Names that fit what the model says: the class of each picture is what it is taken for.
    assert evaluation.scores is not None
    for i, top in zip(evaluation.scores.index, evaluation.scores.top[:, 0]):
        old = root / evaluation.data.files[i]
        (root / str(top) / f"as_{i}.jpg").write_bytes(old.read_bytes())
        old.unlink()
    for c in range(7):  # a class that nothing is taken for still needs its folder
        (root / str(c) / "one.jpg").write_bytes(image_bytes(c))
    assert not any("chance" in note for note in measure(*clip, root, Settings()).notes)
