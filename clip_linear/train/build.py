"""Model, transforms, tokenizer, loss, optimizer and schedule, as ``open_clip_train.main`` makes them from its flags."""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from clip_linear.errors import UserError
from clip_linear.factory import misspelt_keys, weights_of, weights_that_fit
from clip_linear.files import write_bytes, write_json
from clip_linear.marker import need_softmax_weights
from clip_linear.train.config import TrainConfig
from clip_linear.train.effective import effective_config, model_kwargs
from clip_linear.train.transfer import AttentionTransfer, without_swap

log = logging.getLogger(__name__)
Schedule = Callable[[int], float]
# fmt: off
_PASSED_ON = (
    "precision", "force_quick_gelu", "force_custom_text", "force_patch_dropout", "force_image_size",
    "force_context_length", "image_mean", "image_std", "image_interpolation", "image_resize_mode", "aug_cfg",
    "pretrained_image", "cache_dir",
)
# fmt: on


@dataclass
class Parts:
    """What OpenCLIP builds for a run."""

    model: nn.Module
    preprocess_train: Any
    preprocess_val: Any
    tokenizer: Any
    teacher: nn.Module | None = None
    transfer: AttentionTransfer | None = None


def build(config: TrainConfig, device: torch.device) -> Parts:
    """The model on its device with its transforms and tokenizer; locks and checkpointing applied.

    Raises UserError for weights or vocabularies that do not exist.
    """
    import open_clip

    from clip_linear.openclip import add_config, register

    register()
    name = config.model.replace("/", "-")
    add_config(name, config.model_cfg)
    flags, pretrained = config.openclip, weights_of(config.pretrained)
    _check_pretrained(flags["model"], pretrained)
    known = weights_that_fit(config.model, pretrained)
    with misspelt_keys(config.model), known, _expecting_random_weights(not pretrained):
        model, train, val = open_clip.create_model_and_transforms(
            name,
            pretrained,
            device=device,
            output_dict=True,
            **{k: flags[k] for k in _PASSED_ON},
            **model_kwargs(config),
        )
    if not pretrained:
        _initialise_decoder(model)
    tokenizer = open_clip.get_tokenizer(
        name, cache_dir=flags["cache_dir"], context_length=flags["force_context_length"]
    )
    teacher = None
    if flags["distill_model"]:
        teacher, _, _ = open_clip.create_model_and_transforms(
            flags["distill_model"],
            flags["distill_pretrained"],
            device=device,
            precision=flags["precision"],
            output_dict=True,
            cache_dir=flags["cache_dir"],
        )
        teacher.eval()
    transfer = AttentionTransfer(model, _softmax_twin(config, model, device)) if config.attention_transfer else None
    if flags["lock_image"]:
        model.lock_image_tower(flags["lock_image_unlocked_groups"], flags["lock_image_freeze_bn_stats"])
    if flags["lock_text"]:
        try:
            model.lock_text_tower(flags["lock_text_unlocked_layers"], flags["lock_text_freeze_layer_norm"])
        except AssertionError as error:  # OpenCLIP's text towers want --lock-text-freeze-layer-norm, its HF ones do not
            raise UserError(f"--lock-text: OpenCLIP says {error} Add --lock-text-freeze-layer-norm") from None
    if flags["grad_checkpointing"]:
        model.set_grad_checkpointing()
    return Parts(model, train, val, tokenizer, teacher, transfer)


def _softmax_twin(config: TrainConfig, model: nn.Module, device: torch.device) -> nn.Module:
    """The softmax model whose weights --pretrained put into ``model``: a swapped layer keeps the tensors it found."""
    import open_clip

    from clip_linear.openclip import add_config

    name = f"{config.model.replace('/', '-')}-without-swap"
    add_config(name, without_swap(config.model_cfg))
    with _expecting_random_weights(True):
        twin = open_clip.create_model(
            name,
            device=device,
            output_dict=True,
            **{k: config.openclip[k] for k in _PASSED_ON if k.startswith(("precision", "force"))},
            **model_kwargs(config),
        )
    need_softmax_weights(model, config.openclip["pretrained"])
    weights = model.state_dict()
    twin.load_state_dict({key: weights[key] for key in twin.state_dict()})
    return twin


def _initialise_decoder(model: Any) -> None:
    """Draw CoCa's output projection: OpenCLIP 3.3 leaves it as ``torch.empty``, whatever the memory held before
    (https://github.com/mlfoundations/open_clip/pull/551). The scale is that of its own, never called, init_parameters.
    """
    projection = getattr(getattr(model, "text_decoder", None), "text_projection", None)
    if isinstance(projection, nn.Parameter):
        nn.init.normal_(projection, std=projection.shape[0] ** -0.5)


@contextlib.contextmanager
def _expecting_random_weights(expected: bool) -> Iterator[None]:
    """OpenCLIP warns on the root logger that a model without pretrained weights is random; here it is meant to be."""

    def other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("No pretrained weights loaded")

    root = logging.getLogger()
    if expected:
        root.addFilter(other)
    try:
        yield
    finally:
        root.removeFilter(other)


def _check_pretrained(model: str, pretrained: str) -> None:
    """OpenCLIP goes on with random weights when a tag is unknown to a model; here that is an error."""
    import open_clip

    if not pretrained or Path(pretrained).is_file():
        return
    if Path(pretrained).is_dir():
        raise UserError(f"--pretrained {pretrained!r} is a folder without open_clip_model.safetensors; give a run's")
    tags = open_clip.list_pretrained_tags_by_model(model.split("+")[0])
    if pretrained.lower().replace("-", "_") not in [t.lower().replace("-", "_") for t in tags]:
        known = f"its tags: {', '.join(tags)}" if tags else "it has no tags"
        raise UserError(f"--pretrained {pretrained!r} is neither a file nor a tag of {model} ({known})")


def write_open_clip_config(path: Path, config: TrainConfig, model: nn.Module) -> None:
    """Write open_clip_config.json, which with the weights makes the folder a ``local-dir:`` source.

    OpenCLIP reads a vocabulary by its path; a copy lies beside the config, so that a moved run can still be evaluated.
    """
    visual: Any = model.visual
    vocabulary = (config.model_cfg["text_cfg"].get("tokenizer_kwargs") or {}).get("bpe_path")
    if vocabulary is not None:
        write_bytes(path.with_name(Path(vocabulary).name), Path(vocabulary).read_bytes())
    preprocess = {"mean": visual.image_mean, "std": visual.image_std}
    preprocess |= {k: v for k, v in visual.preprocess_cfg.items() if k in ("interpolation", "resize_mode")}
    write_json(path, json.loads(json.dumps({"model_cfg": effective_config(config), "preprocess_cfg": preprocess})))


def make_loss(config: TrainConfig, rank: int, world_size: int) -> nn.Module:
    """OpenCLIP's loss for these flags: CLIP, SigLIP, CoCa or distillation."""
    import open_clip

    warnings.filterwarnings("ignore", message=".*all_gather is deprecated", category=FutureWarning)  # OpenCLIP's use
    args = SimpleNamespace(
        **config.openclip | {"model": config.model, "horovod": False},
        rank=rank,
        world_size=world_size,
        distill=config.distill_model is not None,
    )
    return open_clip.create_loss(args)


def make_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW in OpenCLIP's two groups (no decay for gains, biases and logit_scale), or a timm optimizer."""
    flags = config.openclip
    if flags["opt"].lower().startswith("timm/"):
        from timm.optim import create_optimizer_v2

        extra: dict[str, Any] = {}
        if flags["beta1"] is not None:
            extra["betas"] = (flags["beta1"], flags["beta2"])
        extra |= {k: flags[k] for k in ("momentum", "eps") if flags[k] is not None}
        name = flags["opt"].lower().removeprefix("timm/")
        try:
            return create_optimizer_v2(model, name, lr=flags["lr"], weight_decay=flags["wd"], **extra)
        except (AssertionError, ValueError, TypeError) as error:
            raise UserError(f"--opt {flags['opt']!r}: timm says {error}") from error
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise UserError("every parameter is locked; unlock some with --lock-image-unlocked-groups or the like")
    plain = [p for n, p in trained if _is_gain_or_bias(n, p)]
    rest = [p for n, p in trained if not _is_gain_or_bias(n, p)]
    groups = [{"params": plain, "weight_decay": 0.0}, {"params": rest, "weight_decay": flags["wd"]}]
    return torch.optim.AdamW(
        groups,
        lr=flags["lr"],
        betas=(flags["beta1"], flags["beta2"]),
        eps=flags["eps"],
        fused=None if config.no_fused_optimizer else True,
    )


def _is_gain_or_bias(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim < 2 or any(part in name for part in ("bn", "ln", "bias", "logit_scale"))


def make_schedule(config: TrainConfig, optimizer: torch.optim.Optimizer) -> Schedule:
    """OpenCLIP's schedule: a function of the step that sets and returns the learning rate."""
    from open_clip_train import scheduler

    flags, steps = config.openclip, config.steps
    if flags["skip_scheduler"]:
        return lambda step: float(optimizer.param_groups[0]["lr"])
    if flags["warmup"] >= steps:
        log.warning(
            "--warmup %d is not below the %d steps of this run: the learning rate never reaches %g",
            flags["warmup"],
            steps,
            flags["lr"],
        )
    common = (optimizer, flags["lr"], flags["warmup"], steps)
    if flags["lr_scheduler"] == "cosine":
        return scheduler.cosine_lr(*common)
    if flags["lr_scheduler"] == "const":
        return scheduler.const_lr(*common)
    return scheduler.const_lr_cooldown(
        *common, config.cooldown_steps, flags["lr_cooldown_power"], flags["lr_cooldown_end"]
    )
