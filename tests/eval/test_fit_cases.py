"""Tables with known answers, fitted through the command as a user would."""

import json
import math
from pathlib import Path

import pytest

from clip_linear_eval.commands.fit import main

CASES = Path(__file__).parent / "cases" / "scaling"
EXPECTED = json.loads((CASES / "expected.json").read_text())["cases"]
FORMS = {"powerlaw": "power"}
OBJECTIVES = {"ols_log": "gaussian", "nls_log": "gaussian", "huber": "chinchilla", "lad": "l1", "nls_lin": "linear"}


def command(case):
    """The flags that a case's arguments stand for."""
    args = case["args"]
    argv = [str(CASES / case["file"]), "--json", "--x", args["x"], "--y", args["y"]]
    if args["cmd"] == "isoflop":
        argv += ["--form", "isoflop", "--budget", args["budget"]]
    elif args["cmd"] == "compare":
        argv += ["--group", args["group"], "--ref", args["ref"]]
    else:
        argv += ["--form", FORMS.get(args["form"], args["form"]), "--objective", OBJECTIVES[args["loss"]]]
    for key, flag in (("x2", "--x2"), ("unit", "--unit"), ("drop_top_y", "--drop-top-y")):
        argv += [flag, str(args[key])] if key in args else []
    return argv


def our_path(case, path):
    """Where fit.json holds what the case calls ``path``."""
    head, _, rest = path.partition(".")
    if case["args"]["cmd"] == "isoflop":
        return ["groups", "all", "isoflop", *path.split(".")]
    if head == "groups":
        group, param = rest.split(".")
        return ["groups", group, "params", param]
    comparison = {
        "crossover_x": ["crossover", "x"],
        "crossover_in_range": ["crossover", "in_range"],
        "crossover_fieller95": ["crossover", "set", *rest.split(".")],
        "equal_exponent": ["equal_exponent", *rest.replace("d_alpha_ci95", "ci95").split(".")],
        "size_multiplier": ["size_multiplier", rest.split(".")[0].removeprefix("at_")],
    }
    if head in comparison:
        return ["comparison", 0, *comparison[head]]
    if head in ("status", "code", "missing"):
        return [head]
    inside = {"detail.sigma_log": "sigma", "detail.dof": "dof", "detail.se_alpha": "se.alpha"}.get(path, path)
    inside = inside.replace("detail.ci95", "ci95").replace("profile95", "ci95")
    return ["groups", "all", *inside.split(".")]


def look_up(tree, path):
    for part in path:
        tree = tree[int(part)] if isinstance(tree, list) else tree[part]
    return tree


@pytest.mark.parametrize("case", EXPECTED, ids=[c["id"] for c in EXPECTED])
def test_known_answer(case, capsys):
    refused = case["expect"].get("status", {}).get("value") == "refused"
    assert main(command(case)) == (2 if refused else 0)
    found = json.loads(capsys.readouterr().out)
    for path, wanted in case["expect"].items():
        value = look_up(found, our_path(case, path))
        if isinstance(wanted["value"], float | int) and not isinstance(wanted["value"], bool):
            assert math.isclose(value, wanted["value"], rel_tol=wanted["rtol"], abs_tol=wanted["atol"]), path
        else:
            assert {"interval": "bounded"}.get(str(value), value) == wanted["value"], path
    codes = {w["code"] for w in found.get("warnings", [])}
    assert codes >= set(case.get("expect_warnings", []))
    if case["kind"] in ("exact", "noisy") or case["id"] in ("a01", "a02", "a04", "a05", "a07", "a08", "a10"):
        assert codes == set(case.get("expect_warnings", [])), "a warning that the case does not call for"


def test_the_saturating_form_wins_where_it_is_true(capsys):
    def aicc(name, form):
        assert main([str(CASES / name), "--json", "--x", "compute", "--y", "error", "--form", form]) == 0
        return json.loads(capsys.readouterr().out)["groups"]["all"]["aicc"]

    for name in ("s02_saturating_exact.csv", "n02_saturating_noisy.csv"):
        assert aicc(name, "saturating") < aicc(name, "power") - 50
