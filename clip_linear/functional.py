"""The equations of all variants as one function."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from clip_linear.registry import check_options, variant_class


def attention(
    variant: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    **options: Any,
) -> Tensor:
    """The attention of a variant on given heads.

    q [B, H, N, D], k [B, H, M, D], v [B, H, M, E] (M = N unless non-causal cross attention); key_mask [B, M] bool,
    True = keep; rope = (sin, cos), each [N, D]; options are the variant's own tensors and numbers (``clip-linear list``
    names them), an omitted one takes its published initial value. Returns [B, H, N, E] in v's dtype.

    Raises UserError (a ValueError) for an unknown variant or option.
    """
    cls = variant_class(variant)
    check_options(variant, cls.option_names(), options)
    return cls.attention(q, k, v, causal=causal, key_mask=key_mask, rope=rope, **options)
