"""A sweep file is strict, and expands to the runs that it says."""

import json

import pytest

from clip_linear.errors import UserError
from clip_linear.profile import profile
from clip_linear_launch import spec
from clip_linear_launch.expand import expand
from clip_linear_launch.sweep import load, profiles_folder

GRID = 'model = ["ViT-S-32", "ViT-B-32"]\nimage = ["softmax", "mala"]'


def runs_of(bench, **how):
    bench.write(**how)
    return expand(load(bench.toml))


def test_grid_is_the_product_with_stable_ids(bench):
    runs = runs_of(bench, grid=GRID + "\nseed = [0, 1]")
    assert len(runs) == 8 and len({r.run_id for r in runs}) == 8
    assert [r.run_id for r in runs] == [r.run_id for r in expand(load(bench.toml))]
    assert {(r.model, r.image, r.text) for r in runs} >= {("ViT-S-32+mala+mala", "mala", "mala")}
    assert all(r.steps == 5 and r.samples == 320 for r in runs)


def test_ids_do_not_depend_on_resources_or_place(bench, tmp_path):
    a = runs_of(bench, more='[resources]\ntime = 10\npartition = "x"')
    b = runs_of(bench, more="[limits]\nmax_parallel = 3", sweep='backend = "auto"')
    c = runs_of(bench, base="lr = 0.123")
    assert a[0].run_id == b[0].run_id != c[0].run_id


def test_text_towers(bench):
    runs = runs_of(bench, grid='model = ["ViT-S-32"]\nimage = ["mala"]\ntext = ["same", "none", "elu"]')
    assert [r.model for r in runs] == ["ViT-S-32+mala+mala", "ViT-S-32+mala", "ViT-S-32+mala+elu"]
    assert [r.text for r in runs] == ["mala", "none", "elu"]
    assert runs_of(bench, grid='model = ["ViT-S-32"]\nimage = ["none"]')[0].model == "ViT-S-32"


def test_per_model_overrides_flags_and_resources(bench):
    more = '[per_model."ViT-B-32"]\nlr = 0.01\nnodes = 2\ngpus_per_node = 4\n[resources]\ncpus_per_task = 3'
    small, large = runs_of(bench, grid='model = ["ViT-S-32", "ViT-B-32"]', more=more)
    assert "0.01" in large.argv and "0.01" not in small.argv
    assert (large.resources.nodes, large.resources.world_size, large.resources.cpus_per_task) == (2, 8, 3)
    assert large.global_batch == 8 * small.global_batch


def test_per_model_lists_are_alternatives_of_one_cell(bench):
    grid = 'model = ["ViT-S-32"]\nimage = ["softmax", "mala"]'
    runs = runs_of(bench, grid=grid, more='[per_model."ViT-S-32"]\nlr = [1e-3, 2e-3]')
    assert [r.tuning["lr"] for r in runs] == [1e-3, 2e-3] * 2
    assert runs[0].cell == runs[1].cell != runs[2].cell and len({r.run_id for r in runs}) == 4


def test_exclude_and_single_runs(bench):
    more = '[[runs]]\nmodel = "ViT-B-16"\nimage = "elu"\nsamples = 640\nlr = 0.5'
    runs = runs_of(bench, grid=GRID + '\nexclude = [{model = "ViT-B-32", image = "mala"}]', more=more)
    assert [r.base for r in runs] == ["ViT-S-32", "ViT-S-32", "ViT-B-32", "ViT-B-16"]
    assert runs[-1].samples == 640 and "0.5" in runs[-1].argv


def test_equal_gmacs(bench):
    runs = runs_of(bench, grid=GRID, samples=64)
    bench.toml.write_text(
        bench.toml.read_text().replace("samples = [64]\n", "").replace("[base]", "budget = {gmacs_total = 1e5}\n[base]")
    )
    for run in expand(load(bench.toml)):
        assert run.samples % run.global_batch == 0
        assert run.gmacs_total == pytest.approx(1e5, rel=0.02)
    assert len(runs) == 4


def test_json_config_by_relative_path_and_forced_size(bench):
    config = {
        "embed_dim": 32,
        "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
        "text_cfg": {"context_length": 16, "vocab_size": 512, "width": 32, "heads": 2, "layers": 1},
    }
    (bench.folder / "configs").mkdir()
    (bench.folder / "configs" / "ViT-mini.json").write_text(json.dumps(config))
    grid = 'model = ["configs/ViT-mini.json"]\nimage = ["mala"]'
    (run,) = runs_of(bench, grid=grid, more='[per_model."ViT-mini"]\nlr = 0.5')
    assert run.model == "ViT-mini+mala+mala" and run.run_id.startswith("ViT-mini+mala+mala-") and "0.5" in run.argv
    (large,) = runs_of(bench, grid=grid, base="force-image-size = 64")
    assert large.size.gmacs_image > 3 * run.size.gmacs_image == pytest.approx(3 * run.size.gmacs_image)
    assert run.size.n_params_vision == profile(config).n_params_vision


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[sweep]\nname = "a"\n[gird]\nmodel = ["x"]', "gird"),
        ('[sweep]\nname = "a"\nrot = "x"', "rot"),
        ("[sweep]\nname = 3", "name"),
        ('[sweep]\nname = "../x"', "../x"),
        ('[sweep]\nname = "a"\nbackend = "slrum"', "slurm"),
        ("[base]\nlr = 1", "[sweep]"),
        ('[sweep]\nname = "a"\n[resources]\nnode = 2', "nodes"),
        ('[sweep]\nname = "a"\n[resources]\nnodes = 0', "at least 1"),
        ('[sweep]\nname = "a"\n[resources]\ntime = 0', "above zero"),
        ('[sweep]\nname = "a"\n[resources]\ntime = "soon"', "HH:MM:SS"),
        ('[sweep]\nname = "a"\n[resources]\ngpus_per_node = 4\ntasks_per_node = 2', "one task per GPU"),
        ('[sweep]\nname = "a"\n[limits]\nmax_parallel = 0', "at least 1"),
        ('[sweep]\nname = "a"\n[limits]\nmax_parallel = "2"', "int"),
        ('[sweep]\nname = "a"\nbudget = {smaples = 3}', "samples"),
        ('[sweep]\nname = "a"\nprofile = "nowhere"', "nowhere"),
        ('[sweep\nname = "a"', "TOML"),
    ],
)
def test_mistakes_in_the_file_are_named(bench, text, says):
    bench.toml.write_text(text)
    with pytest.raises(UserError) as error:
        load(bench.toml)
    assert says in str(error.value) and "\n" not in str(error.value).strip()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"grid": 'model = ["ViT-S-33"]'}, "ViT-S-32"),
        ({"grid": 'model = ["ViT-S-32"]\nimage = ["mola"]'}, "mala"),
        ({"grid": 'model = ["ViT-S-32"]\nbacth-size = [3]'}, "batch-size"),
        ({"grid": 'model = ["ViT-S-32"]\nimage = ["none"]\ntext = ["mala"]'}, "text tower"),
        ({"grid": 'model = ["ViT-S-32+mala"]\nimage = ["mala"]'}, "names its variants"),
        ({"samples": "0"}, "samples"),
        ({"samples": "1.5"}, "samples"),
        ({"more": '[per_model."ViT-B-32"]\nlr = 1.0'}, "ViT-B-32"),
        ({"grid": 'model = ["ViT-S-32"]\nlr = [1.0]', "more": '[per_model."ViT-S-32"]\nlr = 2.0'}, "keep one"),
        ({"grid": 'model = ["ViT-S-32"]\nnodes = [1]'}, "per_model"),
        ({"grid": 'model = ["ViT-S-32"]\nexclude = [{model = "ViT-S-32"}]'}, "no run"),
        ({"base": 'opt = "sgd"'}, "opt"),
        ({"grid": 'model = "ViT-S-32"'}, "list"),
    ],
)
def test_mistakes_in_the_grid_are_named(bench, how, says):
    with pytest.raises(UserError) as error:
        runs_of(bench, **how)
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        (5, 300),
        ("5", 300),
        ("1:30", 90),
        ("01:00:00", 3600),
        ("1-00", 86400),
        ("1-02:03", 93780),
        ("2-00:00:01", 172801),
    ],
)
def test_slurm_times(time, seconds):
    assert spec.seconds(time) == seconds


@pytest.mark.parametrize("path", sorted(profiles_folder().glob("*.toml")), ids=lambda p: p.stem)
def test_packaged_profiles_load(bench, path):
    bench.write(sweep=f'profile = "{path.stem}"')
    assert load(bench.toml).resources is not None


def test_every_field_is_documented():
    text = (profiles_folder().parent / "README.md").read_text()
    for cls in (spec.SweepHead, spec.Resources, spec.Limits, spec.Eval, spec.Hardware):
        for name in cls.__dataclass_fields__:
            assert f"`{name}`" in text, f"launch/README.md does not say what {name} is"


def test_data_that_is_not_there_is_said(bench):
    bench.write(more='[eval]\ndatasets = ["data/eval", "mnist"]', base='pretrained = "data/soft.pt"')
    (bench.folder / "data" / "0.tar").unlink()
    for action in (["plan"], ["run", "--dry-run"]):
        said = bench.launch(*action)
        assert "warning: train-data 'data/*.tar' cannot be seen from here" in said
        assert "dataset 'data/eval'" in said and "mnist" not in said.split("warning", 1)[1].split("\n")[1]
    (bench.folder / "data" / "eval").mkdir()
    (bench.folder / "data" / "0.tar").touch()
    assert "warning: pretrained 'data/soft.pt' cannot be seen from here" in bench.launch("plan")
    (bench.folder / "data" / "soft.pt").touch()
    assert "cannot be seen" not in bench.launch("plan")
