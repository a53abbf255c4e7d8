"""Where implementations of these equations go wrong, one statement each; A is the matrix of weights, o = A v."""

import math

import pytest
import torch
from torch.nn import functional as F

from clip_linear.attention import Tokens, rotate
from clip_linear.errors import UserError
from clip_linear.functional import attention

H, D, N = 2, 8, 24
HEADS = (1, H, N, D)


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(HEADS, generator=generator, dtype=torch.float64) for _ in range(3)]


def weights(variant, q, k, **options):
    eye = torch.eye(k.shape[-2], dtype=k.dtype).expand(*k.shape[:2], -1, -1)
    return attention(variant, q, k, eye, **options)


def near(a, b, tolerance=1e-12):
    assert (a - b).abs().max() <= tolerance * b.abs().max()


def dense(f, g, eps=1e-6, mean=True):
    """Weights of φ(q), φ(k) with ε beside the mean or beside the sum."""
    scores = f @ g.mT
    n = g.shape[-2] if mean else 1
    return scores / n / (scores.sum(-1, keepdim=True) / n + eps)


def elu1(x):
    return torch.where(x > 0, x + 1, x.exp())


# -- epsilon: where it stands is seen at tiny features --------------------------------------------------------------


def test_epsilon_is_where_the_released_code_has_it(qkv):
    q, k, _ = qkv
    q, k = 1e-3 * q, 1e-3 * k
    near(weights("elu", q - 6, k - 6), dense(elu1(q - 6), elu1(k - 6)))
    near(weights("relu", q, k), dense(F.relu(q), F.relu(k)))
    near(weights("exp", q - 7, k - 7), dense((q - 7).exp(), (k - 7).exp()))
    near(weights("enhanced", q, k), dense(F.relu(q), F.relu(k), eps=1e-5, mean=False))
    low = q - 6, k - 6
    f, g = elu1(low[0]), elu1(low[1])
    s = f @ g.mT / math.sqrt(D) / N
    z = s.sum(-1, keepdim=True)
    near(weights("mala", *low), (1 + 1 / (z + 1e-6)) * s - z / N)
    alpha = N * torch.softmax((f.mean(-2, keepdim=True) @ g.mT) / math.sqrt(D), -1).mT
    near(weights("rala", *low), dense(f, alpha * g))


# -- affine ---------------------------------------------------------------------------------------------------------


def test_affine_eq7_is_a_sum_of_scores_between_0_and_1(qkv):
    q, k, v = qkv
    A = weights("affine_eq7", q, k)
    assert A.min() >= 0 and A.max() <= 1 and abs(A.sum(-1).mean() - N / 2) < 1.5
    unit = [x / x.norm(dim=-1, keepdim=True) for x in (q, k)]  # per head, not over all channels; no 1/√D
    near(A, (1 + unit[0] @ unit[1].mT) / 2, 1e-11)
    near(attention("affine_eq7", q, k, v, output_scale="mean"), A @ v / N, 1e-11)
    near(weights("affine_eq4", q, k), 2 * A / (2 * A).sum(-1, keepdim=True), 1e-11)
    causal = attention("affine_eq7", q, k, v, causal=True)
    near(causal, A.tril() @ v, 1e-11)  # no count in the causal form either


def test_affine_does_not_see_the_scale_of_q_and_k(qkv):
    q, k, v = qkv
    for variant in ("affine_eq4", "affine_eq7"):
        near(attention(variant, 3 * q, 0.2 * k, v), attention(variant, q, k, v), 1e-9)


def test_affine_at_its_edges():
    q = torch.zeros(1, 1, 3, 4, dtype=torch.float64)
    q[0, 0, 1, 0], q[0, 0, 2, 0] = 1, -1
    A = weights("affine_eq7", q, q)
    near(A[0, 0, 0], torch.full((3,), 0.5, dtype=torch.float64))  # a zero query: score one half
    assert A[0, 0, 1, 2] < 1e-11  # anti-parallel: nothing
    # The paper's bound 2/i on single weights does not hold: i = 3, q = k₁, k₂ = k₃ = −q.
    k = torch.stack([q[:, :, 1], q[:, :, 2], q[:, :, 2]], 2)
    assert weights("affine_eq4", q[:, :, 1:2].expand_as(k), k, causal=True)[0, 0, 2, 0] > 2 / 3


def test_unnormalised_affine_is_not_clamped(qkv):
    q, k, _ = qkv
    A = weights("affine_eq4", 4 * q, 4 * k, normalize_qk=False)
    assert A.min() < -0.5 and A.max() > 1  # denominators cross zero
    near(A, (1 + 16 * q @ k.mT) / (1 + 16 * q @ k.mT).sum(-1, keepdim=True), 1e-9)


# -- plain linear attention -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["elu", "relu", "exp"])
def test_plain_weights(variant, qkv):
    q, k, v = qkv
    A = weights(variant, q, k)
    assert A.min() >= 0 and torch.linalg.matrix_rank(A[0, 0], atol=1e-10) <= D
    if variant == "relu":  # scale of φ(q) cancels, that of a single key does not
        near(attention(variant, 5 * q, k, v), attention(variant, q, k, v), 1e-4)
        louder = k.clone()
        louder[:, :, 3] *= 5
        assert (attention(variant, q, louder, v) - attention(variant, q, k, v)).abs().max() > 1e-2


def test_elu_stays_positive_and_smooth():
    low = torch.full((1, 1, 2, 4), -20.0)
    v = torch.tensor([1.0, 3.0]).view(1, 1, 2, 1).expand(1, 1, 2, 4)
    q = torch.zeros_like(low)
    out = attention("elu", q, low, v)  # ELU(x) + 1 computed so is exactly 0 in float32 here
    assert out.min() > 1e-4
    x = torch.zeros(1, 1, 1, 1, requires_grad=True, dtype=torch.float64)
    k = torch.tensor([[[[0.0], [1.0]]]], dtype=torch.float64)
    z = torch.tensor([[[[0.0], [1.0]]]], dtype=torch.float64)
    grads = []
    for side in (-1e-9, 1e-9):
        key = (k + side).requires_grad_()
        grads.append(torch.autograd.grad(attention("elu", x, key, z).sum(), key)[0][0, 0, 0, 0])
    assert grads[0] == pytest.approx(float(grads[1]), rel=1e-6)


@pytest.mark.parametrize("variant", ["relu", "enhanced", "cosformer"])
def test_an_all_negative_query_sees_nothing(variant, qkv):
    q, k, v = (x.clone().requires_grad_() for x in qkv)
    with torch.no_grad():
        q[:, :, 4] = -q[:, :, 4].abs()
    out = attention(variant, q, k, v)
    assert (out[:, :, 4] == 0).all()
    out.sum().backward()
    assert (q.grad[:, :, 4] == 0).all()


def test_exponentials_do_not_overflow_and_shifts_cancel(qkv):
    q, k, v = qkv
    near(attention("exp", q + 100, k, v), attention("exp", q + 60, k + 40, v), 1e-9)
    near(weights("exp", q + 30, k + 30), dense(q.exp(), k.exp(), eps=0), 1e-9)
    out = attention("exp", 300 * q.float(), 300 * k.float(), v.float())
    assert out.isfinite().all() and out.abs().max() > 0.1


# -- MALA -----------------------------------------------------------------------------------------------------------


def rope_of(x):
    return Tokens(grid=(4, 6)).rope(D, N, x.device)


def test_mala_weights(qkv):
    q, k, _ = qkv
    A = weights("mala", q, k)
    near(A.sum(-1), torch.ones_like(A.sum(-1)), 1e-5)
    assert A.min() < 0 and (A < 0).double().mean() > 0.05  # negative weights are normal
    assert torch.linalg.matrix_rank(A[0, 0], atol=1e-9) <= D + 1
    assert A.abs().max() < 1 < weights("mala", q, k, form="paper").abs().max()  # without the scale: far larger
    sharper = weights("mala", 4 * F.relu(q) + 3, k).max()
    assert sharper > 1.5 * weights("mala", F.relu(q), k).max()  # not invariant to the scale of φ(q)


def test_mala_rotates_the_numerator_only(qkv):
    q, k, _ = qkv
    A, f, g = weights("mala", q, k, rope=rope_of(q)), elu1(q), elu1(k)
    c = D**-0.5 / N
    z = c * (f @ g.mT).sum(-1, keepdim=True)
    near(A, (1 + 1 / (z + 1e-6)) * c * rotate(f, rope_of(q)) @ rotate(g, rope_of(q)).mT - z / N, 1e-12)
    assert (A.sum(-1) - 1).abs().max() > 0.05  # rows no longer add up to 1, and are not renormalised


def test_rotation_needs_four_channels_a_head(qkv):
    with pytest.raises(UserError, match="multiple of 4"):
        Tokens(grid=(2, 2)).rope(6, 4, torch.device("cpu"))
    with pytest.raises(UserError, match="multiple of 2"):
        Tokens().rope(5, 4, torch.device("cpu"))
    sin, cos = Tokens(grid=(2, 2), prefix=1).rope(8, 5, torch.device("cpu"))
    assert (sin[0] == 0).all() and (cos[0] == 1).all()  # prefix tokens are not rotated


# -- RALA -----------------------------------------------------------------------------------------------------------


def test_rala_weights(qkv):
    q, k, _ = qkv
    assert torch.linalg.matrix_rank(weights("rala", q, k)[0, 0], atol=1e-10) <= D
    f, g = elu1(q), elu1(k)
    mean = f.mean(-2, keepdim=True)  # of φ(q), per head
    alpha = torch.softmax(mean @ g.mT / math.sqrt(D), -1).mT * N  # over keys
    near(weights("rala", q, k), dense(f, alpha * g))
    A = weights("rala", q, k, rope=rope_of(q))
    turned = rotate(f, rope_of(q)) @ rotate(alpha * g, rope_of(q)).mT / N
    near(A, turned / ((f @ (alpha * g).mT).sum(-1, keepdim=True) / N + 1e-6))


def test_rala_survives_saturated_weights(qkv):
    q, k, v = (x.float() for x in qkv)
    k = k.clone()
    k[:, :, 5] = 500.0  # the softmax over keys sees nothing else
    out = attention("rala", q, k, v)
    near(out, v[:, :, 5:6].expand_as(out), 1e-5)


# -- PolaFormer -----------------------------------------------------------------------------------------------------


def pola_streams(q, k, **options):
    eye = torch.eye(N, dtype=q.dtype).expand(1, H, -1, -1)
    same, zero = torch.cat([eye, 0 * eye], -1), torch.cat([0 * eye, eye], -1)
    return attention("pola", q, k, same, **options)[..., :N], attention("pola", q, k, zero, **options)[..., N:]


def test_pola_streams(qkv):
    q, k, _ = qkv
    one = torch.full((1, 1, H * D), math.log(math.e - 1), dtype=q.dtype)  # softplus(one) = 1
    same, opposite = pola_streams(q, k, alpha=0.0, scale=one)  # power 1
    plus = [F.relu(x) for x in (q, -q, k, -k)]
    near(same, dense(torch.cat(plus[:2], -1), torch.cat(plus[2:], -1)))
    near(opposite, dense(torch.cat(plus[1::-1], -1), torch.cat(plus[2:], -1)))
    assert same.min() >= 0 and opposite.min() >= 0  # nothing is subtracted
    swapped = pola_streams(-q, k)
    near(swapped[0], pola_streams(q, k)[1])
    near(swapped[1], pola_streams(q, k)[0])


def test_pola_defaults_and_parameters(qkv):
    q, k, v = qkv
    zero = torch.zeros(1, H, 1, D, dtype=q.dtype)
    near(attention("pola", q, k, v, power=zero, scale=zero.view(1, 1, -1)), attention("pola", q, k, v))
    third = [x / math.log(2) for x in (q, k)]
    f = [torch.cat([F.relu(x) ** 3, F.relu(-x) ** 3], -1) for x in third]
    near(pola_streams(q, k)[0], dense(*f))  # power 3, divided by ln 2, at initial values
    table = torch.randn(1, N, H * D, dtype=q.dtype)
    shifted = k + table.unflatten(-1, (H, D)).transpose(1, 2)
    near(attention("pola", q, k, v, positional_encoding=table), attention("pola", q, shifted, v))  # keys only


# -- NaLaFormer -----------------------------------------------------------------------------------------------------


def test_nala_weights(qkv):
    q, k, v = qkv
    norm = q.norm(dim=-1, keepdim=True)
    p = 3 * (0.5 + torch.tanh(norm))
    f = torch.cat([(F.relu(q) / norm) ** p, (F.relu(-q) / norm) ** p], -1)
    near(weights("nala", q, k), dense(f, torch.cat([F.relu(k) ** 3, F.relu(-k) ** 3], -1)))
    loud = attention("nala", 8 * q, 8 * k, v)
    near(attention("nala", 8 * q, 16 * k, v), loud, 1e-4)  # the cube is homogeneous
    near(attention("nala", 24 * q, 8 * k, v), loud, 1e-4)  # tanh saturates
    assert (attention("nala", 0.1 * q, 8 * k, v) - loud).abs().max() > 0.1  # but the norm of a small query matters


def test_nala_splits_by_sign():
    q = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64).view(1, 1, 1, 4)
    k = torch.cat([q, -q], 2)
    A = weights("nala", q, k)
    assert A[0, 0, 0, 1] == 0 and A[0, 0, 0, 0] > 0.999


# -- Hydra ----------------------------------------------------------------------------------------------------------


def test_hydra(qkv):
    q, k, v = qkv
    unit = [x / x.square().sum((1, 3), keepdim=True).sqrt() for x in (q, k)]
    near(attention("hydra", q, k, v), unit[0] * (unit[1] * v).sum(-2, keepdim=True))
    near(attention("hydra", 3 * q, 7 * k, v), attention("hydra", q, k, v))

    def heads(x, n):
        return x.transpose(1, 2).flatten(2).unflatten(-1, (n, -1)).transpose(1, 2)

    for causal in (False, True):
        split = [attention("hydra", *(heads(x, n) for x in (q, k, v)), causal=causal) for n in (1, 2, 8)]
        near(heads(split[0], 2), split[1])  # the number of heads plays no part
        near(heads(split[2], 2), split[1])
    order = torch.randperm(D)
    shuffled = attention("hydra", *(x[..., order] for x in (q, k, v)))
    near(shuffled, attention("hydra", q, k, v)[..., order])


# -- FLatten --------------------------------------------------------------------------------------------------------


def focus(x):
    r = (F.relu(x.transpose(1, 2).flatten(2)) + 1e-6) / math.log(2)
    r = r**3 * (r.norm(dim=-1, keepdim=True) / (r**3).norm(dim=-1, keepdim=True))
    return r.unflatten(-1, (H, D)).transpose(1, 2)


def test_focused_norms_span_the_heads(qkv):
    q, k, v = qkv
    near(weights("focused", q, k), dense(focus(q), focus(k)))
    one = [x[:, :1] for x in (q, k, v)]
    alone = (attention("focused", *one) - attention("focused", q, k, v)[:, :1]).abs().max()
    assert alone > 1e-3  # heads are coupled
    q = q.clone()
    q[:, :, 2] = -q[:, :, 2].abs()
    near(weights("focused", q, k)[:, :, 2], dense(focus(q), focus(k))[:, :, 2])
    assert (focus(q)[:, :, 2].std(-1) < 1e-12).all()  # all channels of an all-negative token weigh the same
    table = torch.randn(1, N, H * D, dtype=q.dtype)
    shifted = k + table.unflatten(-1, (H, D)).transpose(1, 2)
    near(attention("focused", q, k, v, positional_encoding=table), attention("focused", q, shifted, v))


# -- InLine ---------------------------------------------------------------------------------------------------------


def test_inline_rows_add_up_to_exactly_one(qkv):
    q, k, v = qkv
    s = q @ k.mT / math.sqrt(D) / N
    near(weights("inline", q, k), s - s.mean(-1, keepdim=True) + 1 / N)
    for scale in (1e-3, 1, 1e3):
        A = weights("inline", scale * q, scale * k)
        assert (A.sum(-1) - 1).abs().max() < 1e-9 * max(1, scale)
    near(attention("inline", 0 * q, 0 * k, v), v.mean(-2, keepdim=True).expand_as(v))
    near(attention("inline", q, k, v, kernel="exp"), attention("inline", (0.2 * q).exp(), (0.2 * k).exp(), v))
    near(attention("inline", q, k, v, kernel="leakyrelu"), attention("inline", F.leaky_relu(q), F.leaky_relu(k), v))


# -- cosFormer, Performer, efficient attention ----------------------------------------------------------------------


def test_cosformer_positions(qkv):
    q, k, v = qkv[0].abs(), *qkv[1:]
    i = torch.arange(1, N + 1, dtype=q.dtype)
    M = 2 * N
    cos = torch.cos(math.pi / 2 * (i[:, None] - i) / M)
    assert cos.min() >= 0
    near(weights("cosformer", q, k, length=M), _cos(q, k, cos))
    longer = attention("cosformer", q, k, v, length=M)
    assert (attention("cosformer", q, k, v) - longer).abs().max() > 1e-3  # another M is another function


def _cos(q, k, cos):
    scores = F.relu(q) @ F.relu(k).mT * cos
    return scores / scores.sum(-1, keepdim=True)


def test_performer_estimates_softmax(qkv):
    q, k, v = (0.4 * x for x in qkv)
    omega = torch.randn(20000, D, generator=torch.Generator().manual_seed(0), dtype=q.dtype)
    near(attention("performer", q, k, v, omega=omega), attention("softmax", q, k, v), 0.1)
    features = [
        torch.exp(x * D**-0.25 @ omega[:32].mT - x.square().sum(-1, keepdim=True) / (2 * math.sqrt(D))) for x in (q, k)
    ]
    near(weights("performer", q, k, omega=omega[:32]), dense(*features, eps=0))  # stabilisers change nothing
    near(attention("performer", q, k, v), attention("performer", q, k, v))  # without omega: the same features each time


def test_efficient(qkv):
    q, k, _ = qkv
    near(weights("efficient", q, k), torch.softmax(q, -1) @ torch.softmax(k, -2).mT)


def test_softmax_bias_and_masks(qkv):
    q, k, v = qkv
    bias = torch.randn(1, H, N, N, dtype=q.dtype)
    keep = torch.ones(1, N, dtype=torch.bool)
    keep[:, -3:] = False
    scores = q @ k.mT / math.sqrt(D) + bias
    hidden = torch.ones(N, N, dtype=torch.bool).triu(1) | ~keep[0]
    expected = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v
    near(attention("softmax", q, k, v, causal=True, key_mask=keep, bias=bias), expected)


@pytest.mark.parametrize("variant", ["affine_eq7", "hydra"])
def test_sums_grow_with_the_number_of_tokens(variant, qkv):
    q, k, v = (torch.cat([x] * 4, 2) for x in qkv)
    near(attention(variant, q, k, v)[:, :, :N], 4 * attention(variant, *qkv), 1e-9)
    near(
        attention("affine_eq7", q, k, v, output_scale="mean")[:, :, :N],
        attention("affine_eq7", *qkv, output_scale="mean"),
        1e-9,
    )
