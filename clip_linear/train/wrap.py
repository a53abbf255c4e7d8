"""DDP, FSDP2 and compile around the model, and its whole state through them."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from clip_linear.train.config import TrainConfig
from clip_linear.train.world import World

log = logging.getLogger(__name__)


def wrap(model: nn.Module, config: TrainConfig, world: World) -> nn.Module:
    """The module that the loop calls. ``model`` itself keeps the parameters (FSDP2 shards them in place)."""
    if config.use_bn_sync and world.world_size > 1:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    wrapped = model
    if config.fsdp:
        _shard(model, config, world)
    elif world.world_size > 1:
        if config.gather_with_grad is False and not config.siglip:
            log.warning(
                "without --local-loss --gather-with-grad, %d ranks need memory for the whole batch's logits and get "
                "1/%d of the features' gradient; give both flags",
                world.world_size,
                world.world_size,
            )
        ids = [world.device] if world.device.type == "cuda" else None  # OpenCLIP's [cpu] is refused by DDP
        wrapped = nn.parallel.DistributedDataParallel(model, device_ids=ids, static_graph=config.ddp_static_graph)
    if config.torchcompile:
        if config.grad_checkpointing and world.world_size > 1:
            torch._dynamo.config.optimize_ddp = False  # checkpointing does not compile under DDP's own optimizer
        wrapped = torch.compile(wrapped)  # type: ignore[assignment]
    return wrapped


def _shard(model: nn.Module, config: TrainConfig, world: World) -> None:
    from torch.distributed.fsdp import fully_shard

    for module in model.modules():
        if isinstance(module, nn.ModuleList) and all(hasattr(block, "attn") for block in module):
            for block in module:
                fully_shard(block)
    fully_shard(model)


def full_weights(model: nn.Module, keep: bool = True) -> dict[str, Any]:
    """The state dict as one process would have it (a collective under FSDP); empty unless ``keep``."""
    found = ((name, as_saved(name, value)) for name, value in model.state_dict().items())
    return {name: value for name, value in found if keep}


def full_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, keep: bool = True) -> dict[str, Any]:
    """The optimizer's state as one process would have it (a collective under FSDP); empty unless ``keep``."""
    saved, names = optimizer.state_dict(), _names_in_order(model, optimizer)
    state = {}
    for i, values in saved["state"].items():
        whole_values = {k: v if k == "step" else as_saved(names[i], v) for k, v in values.items()}
        if keep:
            state[i] = whole_values
    return {"state": state, "param_groups": saved["param_groups"]} if keep else {}


def load_full(model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load a checkpoint's weights and optimizer, whatever the number of ranks and shards is now."""
    live = model.state_dict()
    model.load_state_dict({k: like(live[k], v) if k in live else v for k, v in saved["state_dict"].items()})
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        i: {k: v if k == "step" else like(parameters[i], v) for k, v in values.items()}
        for i, values in saved["optimizer"]["state"].items()
    }
    optimizer.load_state_dict({"state": state, "param_groups": saved["optimizer"]["param_groups"]})


def _names_in_order(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Parameter names in the optimizer's order: its state counts them like that."""
    names = {id(p): n for n, p in model.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def whole(tensor: Any) -> Tensor:
    """A plain tensor: DTensors (FSDP) are gathered."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def as_saved(name: str, value: Any) -> Any:
    """A tensor as OpenCLIP saves it: whole, and logit_scale and logit_bias 0-d (FSDP needs them 1-d)."""
    if not isinstance(value, Tensor):
        return value
    return whole(value).reshape(()) if name in ("logit_scale", "logit_bias") else whole(value)


def like(live: Any, saved: Any) -> Any:
    """A saved whole tensor in the sharding of a live one, and in its shape where both hold one number."""
    if not isinstance(saved, Tensor):
        return saved
    saved = saved.reshape(live.shape) if saved.numel() == live.numel() == 1 else saved
    if not hasattr(live, "device_mesh") or saved.shape != live.shape:
        return saved
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(saved.to(live.device), live.device_mesh, live.placements)
