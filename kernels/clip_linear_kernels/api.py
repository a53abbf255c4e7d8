"""``linear_attention``: the one primitive under every variant."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from clip_linear_kernels import dispatch, plain
from clip_linear_kernels.call import Form, Inputs
from clip_linear_kernels.ops import LinearAttention, PackedLinearAttention, operator
from clip_linear_kernels.reference import linear_attention_reference
from clip_linear_kernels.spec import FEATURES, NORMALISERS


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature: str = "identity",
    normaliser: str = "mean",
    q_den: Tensor | None = None,
    k_den: Tensor | None = None,
    weights: Tensor | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float = 1.0,
    eps: float | Tensor = 1e-6,
) -> Tensor:
    """o_i = a(d_i, n_i) φ(q_i) Σ_j w_j φ(k_j)ᵀ v_j + b(d_i, n_i) Σ_j w_j v_j in time linear in the number of tokens.

    q [B, H, N, F], k [B, H, M, F], v [B, H, M, E], any strides; M = N when ``causal``. ``q_den``/``k_den`` (default q,
    k) take the place of q and k in d_i = φ(q_den_i)·Σ_j w_j φ(k_den_j) (rotary embeddings rotate the numerator only).
    ``weights`` [B, H, M] ≥ 0 and ``key_mask`` [B, M] (True = keep) make w_j; n_i = Σ_j w_j. ``feature`` and
    ``normaliser`` name rows of clip_linear_kernels.spec. ``eps`` is a float, or a constant tensor broadcastable to
    [B, H, N, 1].

    Sums, normalisers and states are float32 or wider whatever the input; returns [B, H, N, E] in v's dtype, laid out
    so that merging the heads needs no copy. Differentiable once, by q, k, v, q_den, k_den and weights.
    Raises ValueError for an unknown feature or normaliser and for shapes that do not fit.
    """
    _check_names(feature, normaliser)
    qd = None if q_den is q else q_den
    kd = None if k_den is k else k_den
    _check_shapes(q, k, v, qd, kd, causal)
    if (qd is None) != (kd is None):  # backends know d of q and k, or of q_den and k_den
        qd, kd = q if qd is None else qd, k if kd is None else kd
    dtype = v.dtype
    if q.dtype is not dtype or k.dtype is not dtype or (qd is not None and qd.dtype is not dtype):
        # Rotary embeddings leave q and k in float32 beside half values; kernels take one dtype, the widest of all.
        widest = functools.reduce(torch.promote_types, (t.dtype for t in (q, k, v, qd, kd) if t is not None))
        q, k, v = q.to(widest), k.to(widest), v.to(widest)
        qd, kd = (None if t is None else t.to(widest) for t in (qd, kd))
    w = _key_weights(weights, key_mask, v)
    rows = eps if isinstance(eps, Tensor) else None
    if rows is not None and rows.requires_grad:
        raise ValueError("eps is a constant: detach() it, no gradient is computed for it")
    form = Form(feature, normaliser, causal, scale, 0.0 if isinstance(eps, Tensor) else eps)
    out = _run(Inputs(q, k, v, qd, kd, w, rows), form)
    return out if out.dtype is dtype else out.to(dtype)


def linear_attention_qkvpacked(
    qkv: Tensor,
    *,
    feature: str = "identity",
    normaliser: str = "mean",
    causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float = 1.0,
    eps: float = 1e-6,
) -> Tensor:
    """``linear_attention`` of qkv [B, N, 3, H, D] -> [B, H, N, D]; its gradient is one tensor that needs no stacking.

    Worth it where q, k and v come from one projection and go into the primitive as they are.
    """
    if qkv.ndim != 5 or qkv.shape[2] != 3:
        raise ValueError(f"qkv {tuple(qkv.shape)} must be [B, N, 3, H, D]")
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    if torch.compiler.is_compiling() or dispatch.whole_form():
        return linear_attention(
            q, k, v, feature=feature, normaliser=normaliser, causal=causal, key_mask=key_mask, scale=scale, eps=eps
        )
    _check_names(feature, normaliser)
    return PackedLinearAttention.apply(
        qkv, _key_weights(None, key_mask, v), Form(feature, normaliser, causal, scale, eps)
    )


def diagonal_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, key_mask: Tensor | None = None
) -> Tensor:
    """o_ic = q_ic Σ_j k_jc v_jc, one head per channel (Hydra attention): O(N) time, a state of one number a channel.

    q, k, v [B, H, N, D] with φ applied (Hydra's spans the heads), key_mask [B, M] True = keep; sums in float32 or
    wider, result in v's dtype. Memory-bound: one fused pass under ``torch.compile``, three in eager torch.
    """
    dtype = v.dtype
    with plain.no_autocast(q):
        kv = plain.wide(k) * plain.wide(v)
        if key_mask is not None:
            kv = kv * key_mask[:, None, :, None]
        return (plain.wide(q) * (kv.cumsum(-2) if causal else kv.sum(-2, keepdim=True))).to(dtype)


def _run(x: Inputs, form: Form) -> Tensor:
    eps = form.eps if x.eps is None else x.eps
    if torch.compiler.is_compiling():
        widest = max(x.q.shape[-1], x.v.shape[-1])
        if dispatch.traced_as_operator(x.q.device.type, x.v.dtype, form.feature, widest):
            return operator(x, form)
        return _plain(x, eps, form)
    whole = dispatch.whole_form()
    if whole == "reference":
        return _reference(x, eps, form)
    if whole == "compile":
        return _compiled()(x, eps, form)
    if not torch.is_grad_enabled():  # an autograd function costs more than a short call
        return dispatch.backend(x, form).forward(x, form)[0]
    return LinearAttention.apply(x.q, x.k, x.v, x.qd, x.kd, x.w, x.eps, form)


def _plain(x: Inputs, eps: float | Tensor, form: Form) -> Tensor:
    with plain.no_autocast(x.q):
        return plain.forward(
            x.q, x.k, x.v, x.qd, x.kd, x.w, eps, form.feature, form.normaliser, form.causal, form.scale
        )


def _reference(x: Inputs, eps: float | Tensor, form: Form) -> Tensor:
    return linear_attention_reference(
        x.q,
        x.k,
        x.v,
        feature=form.feature,
        normaliser=form.normaliser,
        q_den=x.qd,
        k_den=x.kd,
        weights=x.w,
        causal=form.causal,
        scale=form.scale,
        eps=eps,
    )


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(_plain)


def _key_weights(weights: Tensor | None, key_mask: Tensor | None, v: Tensor) -> Tensor | None:
    if key_mask is None:
        return weights
    mask = key_mask[:, None].to(torch.float64 if v.dtype == torch.float64 else torch.float32)
    return mask if weights is None else weights * mask


def _check_names(feature: str, normaliser: str) -> None:
    if feature not in FEATURES or normaliser not in NORMALISERS:
        raise ValueError(
            f"feature {feature!r} with normaliser {normaliser!r} is not known; "
            f"features: {', '.join(FEATURES)}; normalisers: {', '.join(NORMALISERS)}"
        )


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, qd: Tensor | None, kd: Tensor | None, causal: bool) -> None:
    a, b, c = q.shape, k.shape, v.shape  # compared one by one: slices of shapes cost more than all else here
    if (
        not len(a) == len(b) == len(c) == 4
        or not (a[0] == b[0] == c[0] and a[1] == b[1] == c[1])
        or b[2] != c[2]
        or a[3] != b[3]
    ):
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit; "
            "give q [B, H, N, F], k [B, H, M, F] and v [B, H, M, E]"
        )
    if causal and a[2] != b[2]:
        raise ValueError(f"causal attention needs as many keys as queries, not {b[2]} keys and {a[2]} queries")
    for name, given, like in (("q_den", qd, q), ("k_den", kd, k)):
        if given is not None and given.shape != like.shape:
            raise ValueError(f"{name} {tuple(given.shape)} must have the shape of {name[0]}, {tuple(like.shape)}")
