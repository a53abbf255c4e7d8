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
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    for module in model.modules():
        if isinstance(module, nn.ModuleList) and all(hasattr(block, "attn") for block in module):
            for block in module:
                fully_shard(block)
    fully_shard(model)
    for method in ("encode_image", "encode_text"):  # evaluation calls these instead of forward
        register_fsdp_forward_method(model, method)


def full_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and optimizer state as one process would have them (a collective under FSDP; rank 0's count)."""
    if not config.fsdp:
        return model.state_dict(), optimizer.state_dict()
    from torch.distributed.checkpoint import state_dict as dcp

    options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dcp.get_model_state_dict(model, options=options)
    names = {name: i for i, name in enumerate(_names_in_order(model, optimizer))}
    by_name: Any = dcp.get_optimizer_state_dict(model, optimizer, options=options)
    groups = [g | {"params": [names[n] for n in g["params"]]} for g in by_name["param_groups"]]
    state = {names[n]: {k: as_saved(n, v) for k, v in s.items()} for n, s in by_name["state"].items()}
    return {k: as_saved(k, v) for k, v in weights.items()}, {"state": state, "param_groups": groups}


def load_full_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any], config: TrainConfig
) -> None:
    """Load what ``full_state`` returned (or OpenCLIP saved), whatever the number of ranks and shards is now."""
    if not config.fsdp:
        model.load_state_dict(saved["state_dict"])
        optimizer.load_state_dict(saved["optimizer"])
        return
    from torch.distributed.checkpoint import state_dict as dcp

    options = dcp.StateDictOptions(full_state_dict=True)
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    weights = {k: v.reshape(shapes.get(k, v.shape)) for k, v in saved["state_dict"].items()}
    dcp.set_model_state_dict(model, weights, options=options)
    names = _names_in_order(model, optimizer)
    state = {
        names[i]: {k: v.reshape(shapes[names[i]]) if k != "step" else v for k, v in s.items()}
        for i, s in saved["optimizer"]["state"].items()
    }
    groups = [g | {"params": [names[i] for i in g["params"]]} for g in saved["optimizer"]["param_groups"]]
    full: Any = {"state": state, "param_groups": groups}
    dcp.set_optimizer_state_dict(model, optimizer, full, options=options)


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
    return whole(value).reshape(()) if name in ("logit_scale", "logit_bias") and value.numel() == 1 else whole(value)


def like(live: Any, saved: Tensor) -> Tensor:
    """A saved whole tensor in the shape and sharding of a live one."""
    saved = saved.reshape(live.shape)
    if not hasattr(live, "device_mesh"):
        return saved
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(saved.to(live.device), live.device_mesh, live.placements)
