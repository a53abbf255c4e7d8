"""What happens when a state dict is loaded into a swapped attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from clip_linear import marker
from clip_linear.positions import resize_loaded


def fit_extras(
    module: Any,
    state_dict: dict[str, Tensor],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """A load_state_dict pre-hook: a softmax checkpoint has none of this module's extras, which then keep their values
    (some present and some absent stays an error); key positions of another grid are interpolated.
    """
    own = {f"body.{name}": value for name, value in module.body.state_dict().items()}
    if own and not any(prefix + name in state_dict for name in own) and any(k.startswith(prefix) for k in state_dict):
        state_dict.update({prefix + name: value.detach() for name, value in own.items()})
        marker.warn_once("the checkpoint holds no tensors of the swapped attention; they keep their initial values")
    table = state_dict.get(f"{prefix}body.table")
    if table is not None and table.numel() != module.body.table.numel() and table.numel() % module.body.site.width == 0:
        state_dict[f"{prefix}body.table"] = resize_loaded(table, module.body.site)
