"""The primitive as an autograd function (eager calls) and as a torch.library operator (compiled graphs)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clip_linear_kernels import dispatch
from clip_linear_kernels.call import Form, Inputs, empty_gradients, token_major

_ARGS = (
    "Tensor q, Tensor k, Tensor v, Tensor? q_den, Tensor? k_den, Tensor? w, Tensor? eps_rows, "
    "str feature, str normaliser, bool causal, float scale, float eps"
)
_LIB = torch.library.Library("clip_linear", "DEF")
_LIB.define(f"linear_attention({_ARGS}) -> (Tensor, Tensor)")
_LIB.define(
    f"linear_attention_backward(Tensor grad, Tensor state, {_ARGS}, bool needs_w) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


class LinearAttention(torch.autograd.Function):
    """q, k, v, qd, kd, w, eps, form -> output. A direct call costs about a third of the operator's."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *tensors, form = args
        x = Inputs(*tensors)
        ctx.backend, ctx.form = dispatch.backend(x, form), form
        out, state = ctx.backend.forward(x, form)
        ctx.save_for_backward(state, *tensors)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        state, *tensors = ctx.saved_tensors
        x = Inputs(*tensors)
        out = empty_gradients(x, ctx.needs_input_grad[5])
        ctx.backend.backward(grad, x, state, ctx.form, out)
        return out.q, out.k, out.v, out.qd, out.kd, out.w, None, None


class PackedLinearAttention(torch.autograd.Function):
    """qkv [B, N, 3, H, D], w, form -> output; the gradient is one packed tensor that nobody has to stack."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, w: Tensor | None, form: Form) -> Tensor:
        x = Inputs(*_unpack(qkv), None, None, w)
        ctx.backend, ctx.form = dispatch.backend(x, form), form
        out, state = ctx.backend.forward(x, form)
        ctx.save_for_backward(state, qkv, w)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        state, qkv, w = ctx.saved_tensors
        packed = torch.empty_like(qkv)
        out = Inputs(*_unpack(packed), None, None, torch.zeros_like(w) if ctx.needs_input_grad[1] else None)
        ctx.backend.backward(grad, Inputs(*_unpack(qkv), None, None, w), state, ctx.form, out)
        return packed, out.w, None


def _unpack(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def operator(x: Inputs, form: Form) -> Tensor:
    """The same through the dispatcher: one opaque node in a compiled graph."""
    constants = (form.feature, form.normaliser, form.causal, form.scale, form.eps)
    return torch.ops.clip_linear.linear_attention(x.q, x.k, x.v, x.qd, x.kd, x.w, x.eps, *constants)[0]


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    x, form = Inputs(*args[:7]), Form(*args[7:])
    out, state = dispatch.backend(x, form).forward(x, form)
    return out, out.new_empty(0, dtype=torch.float32) if state is None else state


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    x, form = Inputs(*args[:7]), Form(*args[7:])
    shape = dispatch.backend(x, form).keeps(x, form)
    return token_major(x.v, x.v.shape[-1], x.q.shape[-2]), x.v.new_empty(shape, dtype=torch.float32)


def _backward(grad: Tensor, state: Tensor, *args: Any) -> tuple[Tensor, ...]:
    x, form = Inputs(*args[:7]), Form(*args[7:12])
    out = empty_gradients(x, args[12])
    dispatch.backend(x, form).backward(grad, x, state, form, out)
    return _present(out, grad)


def _backward_fake(grad: Tensor, state: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return _present(empty_gradients(Inputs(*args[:7]), args[12]), grad)


def _present(out: Inputs, grad: Tensor) -> tuple[Tensor, ...]:
    # An operator returns tensors: what is absent is an empty one.
    return tuple(grad.new_empty(0) if t is None else t for t in (out.q, out.k, out.v, out.qd, out.kd, out.w))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], *inputs[:7])
    ctx.constants = inputs[7:]
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, grad: Tensor | None, grad_state: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 12
    state, *tensors = ctx.saved_tensors
    needs_w = tensors[5] is not None and ctx.needs_input_grad[5]
    grads = torch.ops.clip_linear.linear_attention_backward(grad, state, *tensors, *ctx.constants, needs_w)
    present = [g if t is not None else None for g, t in zip(grads, tensors)]
    if not needs_w:
        present[5] = None
    return (*present, *(None,) * 6)


for _device in ("CPU", "CUDA"):
    _LIB.impl("linear_attention", _forward, _device)
    _LIB.impl("linear_attention_backward", _backward, _device)
torch.library.register_fake("clip_linear::linear_attention", _forward_fake, lib=_LIB)
torch.library.register_fake("clip_linear::linear_attention_backward", _backward_fake, lib=_LIB)
torch.library.register_autograd("clip_linear::linear_attention", _autograd, setup_context=_setup, lib=_LIB)
