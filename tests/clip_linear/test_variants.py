"""What every variant must do, whoever adds it: one suite over list_variants()."""

import ast
import dataclasses
import inspect

import pytest
import torch

from clip_linear import list_variants, variant_info
from clip_linear.dress import Site, evaluate
from clip_linear.errors import UserError
from clip_linear.functional import attention
from clip_linear.registry import declaration, own_parameters, variant_class

VARIANTS = list_variants()
NOT_ROW_STOCHASTIC = {"affine_eq7", "hydra"}  # a sum over the keys, by definition
NOT_THE_LIMIT = {"rala"}  # its causal weights are fixed when a key is seen
POSITIONAL = {"cosformer"}
B, H, D = 2, 3, 8


def qkv(length, dtype=torch.float64, seed=0, scale=1.0, width=D):
    generator = torch.Generator().manual_seed(seed)
    return [(scale * torch.randn(B, H, length, width, generator=generator)).to(dtype) for _ in range(3)]


def options_for(variant, length):
    """cosFormer is another function for another M, so it is held fixed where lengths are compared."""
    return {"length": length} if variant == "cosformer" else {}


def same(a, b, tolerance=1e-11):
    assert a.shape == b.shape and (a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("length", [2, 17, 150])
def test_causal_sees_no_future(variant, length):
    q, k, v = qkv(length)
    before = attention(variant, q, k, v, causal=True)
    for t in {0, length // 2, length - 1}:
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, :, t + 1 :] = 3 * torch.randn(B, H, length - t - 1, D, dtype=x.dtype)
        same(attention(variant, *changed, causal=True)[:, :, : t + 1], before[:, :, : t + 1], 1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("length", [17, 150])
def test_causal_prefix_is_truncation(variant, length):
    q, k, v = qkv(length)
    out = attention(variant, q, k, v, causal=True, **options_for(variant, length))
    short = [x[:, :, : length // 2] for x in (q, k, v)]
    same(out[:, :, : length // 2], attention(variant, *short, causal=True, **options_for(variant, length)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_causal_limit_is_bidirectional(variant):
    if variant in NOT_THE_LIMIT:
        pytest.skip("the specification says otherwise: weights are fixed at key time")
    q, k, v = qkv(21)
    same(attention(variant, q, k, v, causal=True)[:, :, -1], attention(variant, q, k, v)[:, :, -1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_first_causal_token(variant):
    q, k, v = qkv(9)
    q, k = q.abs(), k.abs() * torch.tensor([1, -1 if variant in ("pola", "nala") else 1] * (D // 2))
    out = attention(variant, q, k, v, causal=True)[:, :, 0]
    first = v[:, :, 0]
    if variant == "affine_eq7":
        unit = [x[:, :, 0] / x[:, :, 0].norm(dim=-1, keepdim=True) for x in (q, k)]
        first = first * (1 + (unit[0] * unit[1]).sum(-1, keepdim=True)) / 2
    elif variant == "hydra":
        unit = [x[:, :, :1] / x[:, :, :1].square().sum((1, 3), keepdim=True).sqrt() for x in (q, k)]
        first = (unit[0] * unit[1])[:, :, 0] * first
    same(out, first, 1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [17, 150])
def test_padding_is_truncation(variant, causal, length):
    q, k, v = qkv(length)
    keep = torch.zeros(B, length, dtype=torch.bool)
    keep[0, : length - 5], keep[1, : length // 2] = True, True
    wild = [torch.where(keep[:, None, :, None], x, 50.0) for x in (q, k, v)]  # what stands in a padded place is nothing
    out = attention(variant, *wild, causal=causal, key_mask=keep, **options_for(variant, length))
    assert out.isfinite().all()
    for b in range(B):
        n = int(keep[b].sum())
        short = [x[b : b + 1, :, :n] for x in (q, k, v)]
        same(out[b : b + 1, :, :n], attention(variant, *short, causal=causal, **options_for(variant, length)))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("causal", [False, True])
def test_mask_in_the_middle_removes_tokens(variant, causal):
    length = 19
    q, k, v = qkv(length)
    keep = torch.rand(length, generator=torch.Generator().manual_seed(1)) > 0.4
    keep[:2] = False  # left padding too
    options = options_for(variant, length)
    if variant in POSITIONAL:
        options["positions"] = torch.arange(1, length + 1)
    out = attention(variant, q, k, v, causal=causal, key_mask=keep.expand(B, -1), **options)
    assert out.isfinite().all()  # rows before the first valid key mean nothing, but must not be NaN
    if variant in POSITIONAL:
        options["positions"] = options["positions"][keep]
    else:
        options = {}
    short = [x[:, :, keep] for x in (q, k, v)]
    same(out[:, :, keep], attention(variant, *short, causal=causal, **options))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_with_masks_are_finite_and_zero_at_hidden_keys(variant, causal):
    q, k, v = (x.requires_grad_() for x in qkv(13))
    keep = torch.ones(B, 13, dtype=torch.bool)
    keep[:, :2], keep[:, 9:] = False, False
    out = attention(variant, q, k, v, causal=causal, key_mask=keep)
    (out * keep[:, None, :, None]).sum().backward()
    for x in (q, k, v):
        assert x.grad.isfinite().all()
    assert (k.grad[:, :, ~keep[0]] == 0).all() and (v.grad[:, :, ~keep[0]] == 0).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_key_at_all_is_finite(variant):
    q, k, v = (x.requires_grad_() for x in qkv(5))
    for causal in (False, True):
        out = attention(variant, q, k, v, causal=causal, key_mask=torch.zeros(B, 5, dtype=torch.bool))
        out.sum().backward()
        assert out.isfinite().all() and all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize("variant", VARIANTS)
def test_order_of_tokens_does_not_matter(variant):
    q, k, v = qkv(23)
    order = torch.randperm(23, generator=torch.Generator().manual_seed(2))
    options = {"positions": torch.arange(1, 24)} if variant in POSITIONAL else {}
    out = attention(variant, q, k, v, **options)[:, :, order]
    if variant in POSITIONAL:
        options = {"positions": order + 1}
    same(attention(variant, q[:, :, order], k[:, :, order], v[:, :, order], **options), out)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("causal", [False, True])
def test_samples_do_not_mix(variant, causal):
    q, k, v = qkv(11)
    both = attention(variant, q, k, v, causal=causal)
    for b in range(B):
        same(attention(variant, *(x[b : b + 1] for x in (q, k, v)), causal=causal), both[b : b + 1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_linear_in_values_and_rows_add_up_to_one(variant):
    q, k, v = qkv(33)
    other = torch.randn_like(v)
    both = attention(variant, q, k, 2 * v + other)
    same(both, 2 * attention(variant, q, k, v) + attention(variant, q, k, other))
    if variant not in NOT_ROW_STOCHASTIC:  # up to ε beside the mean
        same(attention(variant, q, k, torch.ones_like(v)), torch.ones_like(v), 3e-3)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(variant, causal, dtype):
    """Features, normalisers and states are float32 inside: half precision costs its own rounding and no more."""
    q, k, v = qkv(40, dtype, width=16)
    out = attention(variant, q, k, v, causal=causal)
    exact = attention(variant, q.double(), k.double(), v.double(), causal=causal)
    assert out.dtype == dtype
    same(out.double(), exact, {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype])


def _hard_inputs(dtype):
    q, k, v = qkv(12, dtype)
    yield "zeros", (torch.zeros_like(q), torch.zeros_like(k), v)
    yield "one zero token", tuple(x.index_fill(2, torch.tensor([3]), 0) for x in (q, k, v))
    yield "all negative", (-q.abs() - 0.1, -k.abs() - 0.1, v)
    yield "duplicates", tuple(x[:, :, :1].expand(-1, -1, 12, -1) for x in (q, k, v))
    yield "one token", tuple(x[:, :, :1] for x in (q, k, v))
    yield "times 100", (100 * q, 100 * k, 100 * v)
    yield "far below zero", (q - 30, k - 30, v)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hard_inputs_are_finite(variant, causal, dtype):
    for kind, tensors in _hard_inputs(dtype):
        q, k, v = (x.clone().requires_grad_() for x in tensors)
        out = attention(variant, q, k, v, causal=causal)
        assert out.isfinite().all(), kind
        out.sum().backward()
        assert all(x.grad.isfinite().all() for x in (q, k, v)), kind


@pytest.mark.parametrize("variant", VARIANTS)
def test_values_of_another_width_and_cross_attention(variant):
    q, k, v = qkv(7)
    if variant != "hydra":  # as many heads as channels: values have the width of keys
        wide = torch.cat([v, v], -1)
        out = attention(variant, q, k, wide)
        assert out.shape == (B, H, 7, 2 * D) and out.isfinite().all()
    if variant in POSITIONAL:
        with pytest.raises(UserError, match="equal numbers"):
            attention(variant, q[:, :, :4], k, v)
        return
    out = attention(variant, q[:, :, :4], k, v)
    assert out.shape == (B, H, 4, D) and out.isfinite().all()
    if variant not in ("rala",):  # its weights depend on all queries
        expected = attention(variant, q, k, v)[:, :, :4]
        same(out, expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_those_of_the_function(variant):
    q, k, v = (x[:1, :, :5].clone().requires_grad_() for x in qkv(5, seed=4))
    for causal in (False, True):
        assert torch.autograd.gradcheck(
            lambda q, k, v, c=causal: attention(variant, q, k, v, causal=c), (q, k, v), fast_mode=True
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_half_the_tokens_twice_is_the_same_attention(variant):
    """A mean over keys does not notice that every key came twice; a sum doubles."""
    if variant in POSITIONAL:
        pytest.skip("positions differ")
    q, k, v = qkv(9)
    twice = [torch.cat([x, x], 2) for x in (q, k, v)]
    factor = 2 if variant in NOT_ROW_STOCHASTIC else 1
    same(attention(variant, *twice)[:, :, :9], factor * attention(variant, q, k, v), 1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_declaration_says_the_truth(variant):
    """Read from the source as literals, equal to the class; complete; its parameters flat and small."""
    cls, known = variant_class(variant), declaration(variant)
    assert dataclasses.replace(known.info, presets=()) == cls.info and (known.core, known.paper) == (
        cls.core,
        cls.paper,
    )
    assert cls.info.name == variant and cls.info.equation and cls.info.source
    assert not cls.info.bibtex or cls.info.bibtex.startswith("@")
    assert set(cls.info.options) == set(cls.option_names())
    assert cls.__doc__
    assert variant_info(variant).presets == cls.presets()
    site = Site(width=H * D, num_heads=H, length=10, grid=(3, 3), prefix=1, mlp_width=96)
    module = cls(site)
    found = {n: p.numel() for n, p in module.named_parameters()}
    assert found == own_parameters(cls.info, site)
    assert all(p.ndim == 1 for p in module.parameters())  # so that OpenCLIP's rule keeps them out of weight decay
    assert evaluate(cls.info.state_per_head, site.sizes) > 0
    assert cls.info.causal_source in ("paper", "derived")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_file_stands_alone(variant):
    tree = ast.parse(inspect.getsource(inspect.getmodule(variant_class(variant))))
    imported = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    assert not [m for m in imported if m.startswith("clip_linear.variants")]
    parameters = inspect.signature(variant_class(variant).attention).parameters.values()
    assert all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters)  # no **kwargs


def test_unknown_names_and_options():
    q, k, v = qkv(3)
    with pytest.raises(UserError, match="did you mean 'relu'"):
        attention("rellu", q, k, v)
    with pytest.raises(UserError, match="normalize_qk"):
        attention("affine_eq4", q, k, v, normalise_qk=True)
    for variant, option in (
        ("affine_eq7", {"output_scale": "max"}),
        ("inline", {"kernel": "gelu"}),
        ("mala", {"form": ""}),
    ):
        with pytest.raises(UserError, match="use"):
            attention(variant, q, k, v, **option)
    with pytest.raises(UserError, match="odd"):
        attention("pola", *(x[..., :7] for x in (q, k, v)))
    with pytest.raises(UserError, match="length"):
        attention("cosformer", q, k, v, length=2)
    with pytest.raises(ValueError, match="as many keys"):
        attention("elu", q[:, :, :2], k, v, causal=True)
