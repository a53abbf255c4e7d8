"""The primitive under torch's machinery: opcheck, compiled graphs, checkpointing, DDP and FSDP."""

import os

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import clip_linear_kernels.ops
from clip_linear_kernels import linear_attention
from clip_linear_kernels.call import Form, Inputs
from clip_linear_kernels.testing import Case


def _args(causal, dtype=torch.float32, **more):
    case = Case(causal=causal, dtype=dtype, length=21, width=8, normaliser="mala", **more)
    t, other, _ = case.tensors()
    tensors = [t["q"], t["k"], t["v"], t.get("q_den"), t.get("k_den"), t.get("weights"), None]
    tensors = [x if x is None else x.detach().clone().requires_grad_() for x in tensors]
    return tensors, ("elu1", "mala", causal, other["scale"], other["eps"])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("more", [{}, {"den": True, "weights": True}])
def test_opcheck(causal, more):
    tensors, constants = _args(causal, **more)
    torch.library.opcheck(torch.ops.clip_linear.linear_attention.default, (*tensors, *constants))


@pytest.mark.parametrize("causal", [False, True])
def test_operator_equals_function(causal):
    tensors, constants = _args(causal, den=True, weights=True)
    present = [x for x in tensors if x is not None]
    through = clip_linear_kernels.ops.operator(Inputs(*tensors), Form(*constants))
    direct = clip_linear_kernels.ops.LinearAttention.apply(*tensors, Form(*constants))
    assert torch.equal(through, direct)
    g = torch.randn_like(direct)
    for a, b in zip(torch.autograd.grad(through, present, g), torch.autograd.grad(direct, present, g)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("opaque", [False, True])
def test_fullgraph(causal, opaque):
    tensors, constants = _args(causal)
    q, k, v = tensors[:3]

    def step(q, k, v):
        if opaque:
            return clip_linear_kernels.ops.operator(Inputs(torch.relu(q), k, v), Form(*constants)).sin()
        return linear_attention(torch.relu(q), k, v, feature="elu1", normaliser="mala", causal=causal).sin()

    want = torch.autograd.grad(step(q, k, v).sum(), (q, k, v))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for a, b in zip(torch.autograd.grad(compiled(q, k, v).sum(), (q, k, v)), want):
        assert (a - b).abs().max() < 1e-5 * b.abs().max()


@pytest.mark.slow
def test_inductor():
    q, k, v = (torch.randn(2, 3, 70, 16, requires_grad=True) for _ in range(3))
    mask = torch.ones(2, 70, dtype=torch.bool)
    mask[1, 50:] = False

    def step(q, k, v):
        return linear_attention(q, k, v, feature="l2", normaliser="affine", key_mask=mask).square().sum()

    want = torch.autograd.grad(step(q, k, v), (q, k, v))
    got = torch.autograd.grad(torch.compile(step, fullgraph=True)(q, k, v), (q, k, v))
    for a, b in zip(got, want):
        assert (a - b).abs().max() < 1e-5 * b.abs().max()


def test_checkpointing():
    q, k, v = (torch.randn(1, 2, 30, 8, requires_grad=True) for _ in range(3))

    def step(q):
        return linear_attention(torch.relu(q), k, v, feature="elu1", normaliser="affine").sin().sum()

    (want,) = torch.autograd.grad(step(q), q)
    (got,) = torch.autograd.grad(checkpoint(step, q, use_reentrant=False), q)
    assert torch.equal(got, want)


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        out = linear_attention(q, k, v, feature="l2", normaliser="half_mean")
        return self.proj(out.transpose(1, 2).flatten(2))


def _train(rank, world, store, kind, out):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = _Block()
    data = torch.randn(4, 12, 16)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    model(data[rank::world]).square().mean().backward()
    grad = next(p for n, p in model.named_parameters() if n.endswith("qkv.weight")).grad
    grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    if rank == 0:
        torch.save(grad, out)
    torch.distributed.destroy_process_group()
    os._exit(0)  # Gloo's threads outlive the group and can abort an interpreter that is being torn down


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_processes(kind, tmp_path):
    torch.multiprocessing.spawn(_train, (2, str(tmp_path / "store"), kind, str(tmp_path / "grad.pt")), nprocs=2)
    torch.manual_seed(0)
    model, data = _Block(), torch.randn(4, 12, 16)
    model(data).square().mean().backward()
    got = torch.load(tmp_path / "grad.pt")
    assert (got - model.qkv.weight.grad).abs().max() < 1e-6
