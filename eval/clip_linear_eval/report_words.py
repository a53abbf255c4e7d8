"""What a fit says, in sentences with intervals, and what it cannot say. Works on the content of fit.json alone."""

from __future__ import annotations

from typing import Any

_CHANCE = 0.9  # errors above this are near chance
_FEW = 3  # degrees of freedom below which an interval is mostly Student's t
AXIS = {
    "n_params_vision": "parameters of the vision tower",
    "n_params_total": "parameters",
    "n_params_non_embedding": "non-embedding parameters",
    "samples_seen": "samples seen",
    "gmacs_total": "forward GMACs × samples",
    "gmacs": "GMACs per sample",
    "device_hours": "device hours",
}


def number(v: float | None, digits: int = 3) -> str:
    """A number for people: 1.23, 0.0456, 2500, 22M, 1.2e-07."""
    if v is None:
        return "∞"
    size = abs(v)
    for least, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if least <= size < 1e12:
            return f"{v / unit:.{digits}g}{letter}"
    return f"{v:.0f}" if 1e3 <= size < 1e4 else f"{v:.{digits}g}"


def interval(ends: Any, digits: int = 3) -> str:
    """``0.21 to 0.35``, with words for missing ends."""
    if ends is None:
        return "no interval"
    lo, hi = ends
    return f"{'unbounded' if lo is None else number(lo, digits)} to {'unbounded' if hi is None else number(hi, digits)}"


def law_text(law: dict[str, Any]) -> str:
    """The law with its numbers, as one reads it."""
    if law["form"] == "isoflop":
        return f"x_opt = {number(law['params']['coef'])} C^{number(law['params']['a'])}"
    p = {k: number(v) for k, v in law["params"].items()}
    floor = f"{p['E']} + " if "E" in p and law["params"]["E"] > 0 else ""
    if law["form"] == "shifted":
        return f"y = {floor}{p['A']} (x + {p['B']})^-{p['alpha']}"
    second = f" + {p['B']} x2^-{p['beta']}" if law["form"] == "chinchilla" else ""
    return f"y = {floor}{p['A']} x^-{p['alpha']}{second}"


def law_sentence(name: str, law: dict[str, Any], x: str = "size", y: str = "y") -> str:
    """One group's exponent with its interval, in words."""
    if law["form"] == "isoflop":
        iso = law["isoflop"]
        ends = "without an interval" if law["ci95"] is None else f"95 % {interval(law['ci95']['a'])}"
        grows = f"the best {x} grows as {number(iso['coef'])} C^{number(iso['a'])}"
        return f"{name}: {grows} ({ends}; {iso['n_used']} budgets; {iso['bias']})."
    alpha = law["params"]["alpha"]
    head = f"{name}: exponent α = {number(alpha)}"
    if law["ci95"] is None or "alpha" not in law["ci95"]:
        return (
            f"{head} from {law['n']} points, without an interval: nothing can be concluded from it ({law_text(law)})."
        )
    lo, hi = law["ci95"]["alpha"]
    of_what = " of what lies above the floor" if law["params"].get("E") else ""
    parts = [f"95 % {interval((lo, hi))}", f"n = {law['n']}"]
    parts += [f"doubling {x} takes {100 * (1 - 2**-alpha):.1f} % off{of_what}"] if alpha > 0 else []
    if "E" in law["params"]:
        parts.append(f"floor {number(law['params']['E'])} (95 % {interval(law['ci95'].get('E'))})")
    if "beta" in law["params"]:
        parts.append(f"β = {number(law['params']['beta'])} (95 % {interval(law['ci95'].get('beta'))})")
    sure = "; the interval includes 0, so no fall with size is shown" if (lo is None or lo <= 0) and alpha >= 0 else ""
    return f"{head} ({'; '.join(parts)}; {law_text(law)}){sure}."


def further_sentences(name: str, law: dict[str, Any], y: str) -> list[str]:
    """Predictions, the hold-out and the bootstrap of one group, where they were asked for."""
    said = []
    for p in law.get("predictions") or []:
        beyond = ", beyond the data" if p["extrapolated"] else ""
        said.append(
            f"{name}: {y} at {number(p['x'])} would be {number(p['y'])} (law {interval(p['ci95'])}, a new run "
            f"{interval(p['pi95'])}{beyond})."
        )
    held = law.get("hold_out")
    if held:
        inside = sum(bool(p["inside"]) for p in held["points"])
        said.append(
            f"{name}: the {held['largest']} largest sizes, predicted from the rest, are off by "
            f"{100 * held['rms_log']:.1f} % (root mean square); {inside} of {len(held['points'])} points lie inside "
            "their 95 % intervals."
        )
    without = law.get("without_outlier")
    if without:
        rows = ", ".join(f"row {p['row']}" if p["row"] else f"x = {number(p['x'])}" for p in without["left_out"])
        said.append(f"{name}: without {rows} the exponent would be {number(without['alpha'])}.")
    boot = law.get("bootstrap")
    if boot and "ci95" in boot:
        ends = boot["ci95"].get("alpha")
        said.append(f"{name}: bootstrap of {boot['draws']} draws (seed {boot['seed']}): α {interval(ends)}.")
    elif boot:
        said.append(f"{name}: too few of the {boot['draws']} bootstrap draws could be fitted to say anything.")
    return said


def comparison_sentences(c: dict[str, Any], x: str) -> list[str]:
    """Group against ref: the size multiplier first, then exponents and crossing; also what cannot be concluded."""
    name, ref = c["group"], c["ref"]
    axis = AXIS.get(x, x)
    said = []
    size = c["size_multiplier"]
    if size["xmin"] is not None and size["x_range"] is not None:
        low, high = (number(v) for v in size["x_range"])
        ends = [(size["xmin"], size["xmin_ci95"], low), (size["xmax"], size["xmax_ci95"], high)]
        parts = [
            f"{number(m)}× ({interval(ci)})" if ci else f"{number(m)}× (no interval)"
            for m, ci, _ in ends
            if m is not None
        ]
        if len(parts) == 2:
            said.append(
                f"{name} needs {parts[0]} the {axis} of {ref} for the same error at {low}, and {parts[1]} at {high}."
            )
    equal = c["equal_exponent"]
    if equal["ci95"] is None:
        said.append(
            f"Whether {name} and {ref} scale alike cannot be concluded: there are too few points for any interval."
        )
        return said
    gap = f"α({ref}) − α({name}) = {number(equal['delta_alpha'])} (95 % {interval(equal['ci95'])})"
    p = equal["p"] if c.get("p_holm") is None else c["p_holm"]
    many = "" if c.get("p_holm") in (None, equal["p"]) else " after Holm's correction for several variants"
    if p < 0.05:
        slower = name if equal["delta_alpha"] > 0 else ref
        said.append(f"The error of {slower} falls more slowly with size: {gap}, p = {number(p, 2)}{many}.")
    else:
        said.append(
            f"That {name} scales with another exponent than {ref} cannot be concluded, nor that it does not: {gap}, "
            f"p = {number(p, 2)}{many}; these data would have shown a difference of {number(equal['detectable'], 2)} "
            "or more."
        )
    pairs = c.get("paired")
    if pairs is not None:
        said.append(
            f"Compared run by run over {pairs['n']} pairs of size and seed: Δα {number(pairs['delta_alpha'])} "
            f"(95 % {interval(pairs['ci95'])}); {name} has {number(pairs['ratio'], 4)}× the y of {ref} at the middle "
            f"size ({interval(pairs['ratio_ci95'], 4)})."
        )
    same = c.get("equal_law")
    if same is not None and same["p"] >= 0.05:
        said.append(f"One law for both fits as well as two (p = {number(same['p'], 2)}): they cannot be told apart.")
        return said
    constant = c.get("constant_multiplier")
    if p >= 0.05 and constant is not None and constant["ci95"] is not None:
        said.append(
            f"If the exponents are equal, {name} needs {number(constant['ratio'])}× ({interval(constant['ci95'])}) the "
            f"{axis} of {ref} at every size."
        )
    said.append(_crossing(c))
    return said


def _crossing(c: dict[str, Any]) -> str:
    cross = c["crossover"]
    found = cross["set"]
    if found is None or cross["x"] is None:
        return "No crossing can be placed."
    if found["kind"] == "interval":
        where = "inside the data" if cross["in_range"] else "outside the data, by extrapolation"
        return f"The laws cross at {number(cross['x'])} (95 % {interval(found['x'])}), {where}."
    return "No crossing of the two laws is established."


def conclusions(fit: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """The fit in sentences under headings: what to beware of, each comparison, and the laws themselves."""
    axis = AXIS.get(fit["x"], fit["x"])
    said = [("Beware", _caveats(fit))]
    said += [(f"{c['group']} against {c['ref']}", comparison_sentences(c, fit["x"])) for c in fit["comparison"]]
    laws = fit["groups"].items()
    said.append(("The laws", [law_sentence(name, law, axis) for name, law in laws]))
    said.append(("Tests", [sentence for name, law in laws for sentence in further_sentences(name, law, fit["y"])]))
    if fit.get("selection"):
        chosen = fit["selection"]
        said.append(("Form", [f"Chosen: {chosen['chosen']}, by {chosen['decided_by']}."]))
    return [(title, sentences) for title, sentences in said if sentences]


def _caveats(fit: dict[str, Any]) -> list[str]:
    said = []
    few = [name for name, law in fit["groups"].items() if law["dof"] < _FEW]
    if few:
        said.append(
            f"Few points: {_listed(few)} {'has' if len(few) == 1 else 'have'} fewer than {_FEW} degrees of freedom, so "
            "intervals are wide and rest on the noise being Gaussian. Read this as a rehearsal, not as a result."
        )
    fraction = fit["conventions"]["unit"].startswith(("fraction", "percent"))
    if fraction and max((law["y_range"][1] for law in fit["groups"].values()), default=0.0) > _CHANCE:
        said.append(
            f"Errors above {100 * _CHANCE:.0f} % are near chance, where every law bends: the exponents describe these "
            "sizes only."
        )
    floors = [w.get("group", "all") for w in fit["warnings"] if w["code"] == "E_not_identified"]
    if floors:
        said.append(f"Whether the error of {_listed(floors)} has a floor cannot be concluded from these data.")
    return said


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def describe(fit: dict[str, Any]) -> list[str]:
    """Lines for the terminal: one per group, then comparisons, then warnings and dropped rows."""
    lines = ["SYNTHETIC data"] if fit.get("synthetic") else []
    lines += [f"{fit['y']} by {fit['x']}, form {fit['form']}, objective {fit['objective']}; {fit['conventions']['y']}"]
    lines += [sentence for _, sentences in conclusions(fit) for sentence in sentences]
    lines += [
        f"warning {w['code']}{': ' + w['group'] if 'group' in w else ''}: {w['message']}" for w in fit["warnings"]
    ]
    if fit["dropped"]:
        listed = "; ".join(f"row {d['row']}: {d['reason']}" for d in fit["dropped"][:10])
        lines.append(f"left out {len(fit['dropped'])} rows: {listed}{'; …' if len(fit['dropped']) > 10 else ''}")
    return lines
