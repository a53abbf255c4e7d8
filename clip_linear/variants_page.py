"""The page docs/variants.md: every variant with its equation, and the tensors that each preset owns."""

from __future__ import annotations

from clip_linear.dress import LOCALS, Dress
from clip_linear.registry import Declaration
from clip_linear.table import markdown

HEAD = """# Attention variants

Made by `clip-linear list --markdown > docs/variants.md`.

q, k, v are one head's queries, keys and values, i and j tokens, φ a feature map, S a state, N the number of tokens, D
and E head_dim (of keys and of values), C the width, G the grid tokens, M the MLP's hidden width. `core` is the paper's
equation alone, `paper` the whole published module. "causal" says whether the causal form is published or derived here.

"""
TENSORS = """
## Tensors of each preset

Learned numbers that a preset adds to one layer of an image tower. In a text tower a depth-wise convolution is causal
with 5 taps (`6·C`, or `6·D` shared; in the MLP 3 taps, `4·M`), the dynamic one has 3 taps (`4·C·(D + 1)`) and a table
has context_length rows.

"""


def page(declarations: list[Declaration]) -> str:
    """The whole page in Markdown."""
    equations = [
        (f"`{d.info.name}`", d.info.equation, f"`{d.info.state_per_head}`", d.info.causal_source, d.info.source)
        for d in declarations
    ]
    tensors = [
        (f"`{d.info.name}`", preset, ", ".join(f"{part} `{size}`" for part, size in _tensors(d, preset)) or "none")
        for d in declarations
        for preset in d.info.presets
    ]
    options = [(f"`{d.info.name}`", f"`{o}`", text) for d in declarations for o, text in d.info.options.items()]
    return (
        HEAD
        + markdown(("name", "equation", "state per head", "causal", "source"), equations)
        + TENSORS
        + markdown(("name", "preset", "tensors"), tensors)
        + "\n## Options\n\n"
        + markdown(("name", "option", "meaning"), options)
    )


def _tensors(declared: Declaration, preset: str) -> list[tuple[str, str]]:
    dress: Dress = declared.dress(preset, {})
    found = list(declared.info.tensors.items())
    if dress.local is not None:
        found.append((f"local {dress.local}", LOCALS[dress.local].image_parameters))
    if dress.norm:
        found.append(("norm", "2·C"))
    if dress.gate is not None:
        found.append((f"{dress.gate} gate", "C·C + C"))
    if dress.table:
        found.append(("key positions", "N·C"))
    if dress.mlp_conv:
        found.append(("3×3 in the MLP", "10·M"))
    if dress.rope:
        found.append(("rotary embedding", "0"))
    return found
