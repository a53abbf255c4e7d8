"""What a run is: one frozen record made from the command line. Imports no torch, so that plans are instant."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clip_linear.errors import UserError
from clip_linear.names import TOWERS, model_config, tower_spec
from clip_linear.train.flags import build_parser, defaults, our_flags, parse

__all__ = ["TrainConfig", "build_parser", "from_toml", "resolve"]

# What does not enter the run id. In lines: where the run and its logs live; where and how it runs (equal up to
# rounding, or for --workers up to the order of the samples); how it continues, how often it logs, saves and evaluates,
# and on what; limits that end a run but do not change its numbers. The last line is hashed in other words: as the
# config of the model, as `samples`, as `batch` (ranks together) and as `cooldown_steps`.
_PLACE = """
logs name run_dir cache_dir report_to wandb_notes wandb_project_name debug dry_run shard_cache
device dist_backend dist_url no_set_device_rank ddp_static_graph dist_timeout_s workers fsdp grad_checkpointing
torchcompile deterministic no_fused_optimizer data_timeout_s peak_tflops
resume log_every_n_steps save_frequency save_most_recent delete_previous_checkpoint save_every_steps save_every_samples
save_every_minutes keep_last keep_every_samples zeroshot_frequency eval_data
max_bad_steps max_fault_rate
model samples epochs train_num_samples batch_size epochs_cooldown
"""
_NOT_HASHED = frozenset(_PLACE.split())
# Hashed also at their defaults, so that a later OpenCLIP with other defaults gets other ids. A flag that a later
# OpenCLIP adds leaves the ids of runs that do not use it alone.
_ALWAYS_HASHED = frozenset({"accum_freq", "opt", "wd", "warmup", "lr_scheduler", "precision", "seed"})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run: the resolved model config, OpenCLIP's flags, ours, and the number of ranks."""

    model: str  # the name under which OpenCLIP knows the model
    model_cfg: dict[str, Any]
    openclip: dict[str, Any]  # every OpenCLIP flag by destination
    ours: dict[str, Any]  # every flag of our group by destination
    world_size: int = 1

    def __getattr__(self, name: str) -> Any:
        """A flag by its destination: ``config.batch_size``, ``config.keep_last``."""
        for flags in ("openclip", "ours"):
            values = self.__dict__.get(flags, {})
            if name in values:
                return values[name]
        raise AttributeError(name)

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step: batch_size × accum_freq × ranks."""
        return int(self.openclip["batch_size"] * self.openclip["accum_freq"] * self.world_size)

    @property
    def budget(self) -> int:
        """Samples asked for: --samples, or --train-num-samples × --epochs."""
        if self.ours["samples"] is not None:
            return int(self.ours["samples"])
        return int(self.openclip["train_num_samples"] * self.openclip["epochs"])

    @property
    def steps(self) -> int:
        """Optimizer steps: the budget rounded up to whole global batches."""
        return math.ceil(self.budget / self.global_batch)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one of OpenCLIP's epochs (--train-num-samples); the whole run where that is not given."""
        samples = self.openclip["train_num_samples"]
        return self.steps if samples is None else math.ceil(samples / self.global_batch)

    @property
    def cooldown_steps(self) -> int | None:
        """Steps of the const-cooldown schedule's end."""
        epochs = self.openclip["epochs_cooldown"]
        return None if epochs is None else epochs * self.steps_per_epoch

    @functools.cached_property
    def run_id(self) -> str:
        """A short readable name and 8 hex digits of the hash of what decides the numbers.

        Hashed: the model's config (a vocabulary file by its content), the hyper-parameters, samples, seed,
        batch_size × ranks and the --train-data string as written. Not hashed: where the run lives, how it runs
        (workers, device, compile, sharding: equal up to rounding or the order of the samples), how it resumes, logs,
        saves and evaluates.
        """
        digest = hashlib.sha256(self.numbers().encode()).hexdigest()[:8]
        name = re.sub(r"[^A-Za-z0-9._+-]", "-", self.model)
        return f"{name}-{_short(self.budget)}-s{self.openclip['seed']}-{digest}"

    def numbers(self) -> str:
        """The JSON text that the run id hashes: what decides the numbers."""
        plain = defaults()
        given = {k: v for k, v in (self.openclip | self.ours).items() if k not in _NOT_HASHED}
        flags = {k: v for k, v in given.items() if v != plain[k] or k in _ALWAYS_HASHED}
        return json.dumps(
            {
                "model": _portable(self.model_cfg),
                "samples": self.budget,
                "batch": self.openclip["batch_size"] * self.world_size,
                "cooldown_steps": self.cooldown_steps,
                "flags": flags,
            },
            sort_keys=True,
        )

    @property
    def run_dir(self) -> Path:
        """The run's folder: --run-dir, or LOGS/NAME, where NAME is --name or the run id."""
        if self.ours["run_dir"] is not None:
            return Path(self.ours["run_dir"])
        return Path(self.openclip["logs"]) / (self.openclip["name"] or self.run_id)

    def to_argv(self) -> list[str]:
        """Flags that ``resolve`` turns into this config again."""
        out = ["--model", self.openclip["model"]]
        plain = defaults() | _name_defaults(self.model, self.openclip)
        for action in build_parser()._actions:
            value: Any = (self.openclip | self.ours).get(action.dest)
            if action.dest in ("help", "model") or value == plain.get(action.dest):
                continue
            flag = action.option_strings[0]
            if action.nargs == 0:
                out += [flag]
            elif action.dest == "aug_cfg":
                out += [flag, *(f"{k}={v}" for k, v in value.items())]
            elif type(action).__name__ == "_AppendAction":
                out += [part for item in value for part in (flag, str(item))]
            else:
                out += [flag, *map(str, value if isinstance(value, list | tuple) else [value])]
        return out

    def to_toml(self) -> str:
        """The text of config.toml; ``from_toml`` reads it back."""
        head = {"run_id": self.run_id, "model": self.model, "world_size": self.world_size}
        lines = [f"{key} = {_toml(value)}" for key, value in head.items()]
        lines += [f"model_config = '''\n{json.dumps(self.model_cfg, indent=1)}\n'''"]
        for table, flags in (("openclip", self.openclip), ("clip_linear", self.ours)):
            lines += ["", f"[{table}]"]
            lines += [f"{key} = {_toml(value)}" for key, value in flags.items() if value is not None]
        return "\n".join(lines) + "\n"


def from_toml(text: str) -> TrainConfig:
    """The config that ``to_toml`` wrote. Raises UserError when the text is no such file."""
    try:
        table = tomllib.loads(text)
        ours = {k: table["clip_linear"].get(k) for k in our_flags()}
        openclip = {k: table["openclip"].get(k) for k in defaults() if k not in ours}
        cfg = json.loads(table["model_config"])
        return TrainConfig(
            model=table["model"], model_cfg=cfg, openclip=openclip, ours=ours, world_size=table["world_size"]
        )
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(
            f"config.toml cannot be read ({type(error).__name__}: {error}); it was not written by us"
        ) from None


def resolve(argv: list[str], world_size: int = 1) -> TrainConfig:
    """The run that a command line describes, started as ``world_size`` ranks. Raises UserError for a mistake in it."""
    flags = parse(argv)
    name, cfg = _model(flags["model"], _stamp(flags["model"]))
    for key, value in _name_defaults(name, flags).items():
        if flags[key] is None:
            flags[key] = value
    ours = {key: flags.pop(key) for key in our_flags()}
    size = flags["force_image_size"]
    if isinstance(size, list) and len(size) == 1:
        flags["force_image_size"] = size[0]
    flags["aug_cfg"] = {k: list(v) if isinstance(v, tuple) else v for k, v in flags["aug_cfg"].items()}
    config = TrainConfig(model=name, model_cfg=json.loads(cfg), openclip=flags, ours=ours, world_size=world_size)
    _check(config)
    return config


def _check(config: TrainConfig) -> None:
    flags = config.openclip

    def need(good: bool, message: str) -> None:
        if not good:
            raise UserError(message)

    need(bool(flags["train_data"]), "no training data; give --train-data 'shards/{00000..00009}.tar'")
    need(
        config.ours["samples"] is not None or flags["train_num_samples"] is not None,
        "no budget; give --samples N (samples seen), or --train-num-samples N and --epochs E",
    )
    for flag in ("batch_size", "accum_freq", "log_every_n_steps"):
        need(flags[flag] >= 1, f"--{flag.replace('_', '-')} {flags[flag]} must be at least 1")
    need(flags["workers"] >= 0, f"--workers {flags['workers']} must not be negative")
    need(config.budget > 0, f"the budget of {config.budget} samples must be above 0")
    need(flags["lr"] is not None, f"--opt {flags['opt']} needs --lr")
    for flag, least in (("lr", "above 0"), ("eps", "above 0"), ("wd", "0 or more"), ("warmup", "0 or more")):
        value = flags[flag]
        good = value is None or (math.isfinite(value) and (value > 0 if least == "above 0" else value >= 0))
        need(good, f"--{flag} {value} must be a number {least}")
    clip = flags["grad_clip_norm"]
    need(clip is None or (math.isfinite(clip) and clip > 0), f"--grad-clip-norm {clip} must be a number above 0")
    for flag in ("beta1", "beta2"):
        value = flags[flag]
        need(value is None or 0 <= value < 1, f"--{flag} {value} must lie in 0 … 1 (without 1)")
    need(
        flags["opt"].lower() == "adamw" or flags["opt"].lower().startswith("timm/"),
        f"--opt {flags['opt']!r} is not adamw or timm/NAME",
    )
    need((flags["beta1"] is None) == (flags["beta2"] is None), "give both --beta1 and --beta2, or neither")
    schedules = ("cosine", "const", "const-cooldown")
    need(flags["lr_scheduler"] in schedules, f"--lr-scheduler {flags['lr_scheduler']!r} is not one of {schedules}")
    need(
        flags["lr_scheduler"] != "const-cooldown" or flags["epochs_cooldown"] is not None,
        "--lr-scheduler const-cooldown needs --epochs-cooldown",
    )
    need(
        flags["dataset_type"] in ("webdataset", "auto"),
        f"--dataset-type {flags['dataset_type']} is not supported; make shards first: clip-linear data write",
    )
    need(
        not flags["local_loss"] or flags["gather_with_grad"],
        "--local-loss without --gather-with-grad gives wrong gradients; give both, or neither",
    )
    need(flags["logs"].lower() != "none", "--logs None is not possible: a run is its folder")
    need(
        not config.ours["fsdp"] or config.world_size > 1,
        "--fsdp shards over ranks, but this run has one; leave it out",
    )
    need(
        not config.ours["fsdp"] or flags["precision"] != "amp",
        "--fsdp does not work with --precision amp (fp16 scaling); use amp_bf16 or fp32",
    )
    distilled = flags["distill_model"] is not None
    need(distilled == (flags["distill_pretrained"] is not None), "give both --distill-model and --distill-pretrained")
    need(not distilled or flags["accum_freq"] == 1, "--distill-model does not work with --accum-freq above 1")
    need(not distilled or "coca" not in config.model.lower(), "--distill-model does not work with CoCa")
    if config.ours["attention_transfer"]:
        _check_transfer(config, need)
    need(0 <= config.ours["ema_decay"] < 1, f"--ema-decay {config.ours['ema_decay']} is not in [0, 1)")


def _check_transfer(config: TrainConfig, need: Callable[[bool, str], None]) -> None:
    flags, vision = config.openclip, config.model_cfg["vision_cfg"]
    need(bool(flags["pretrained"]), "--attention-transfer needs --pretrained, the weights of the softmax model")
    specs = [spec for tower in TOWERS if (spec := tower_spec(config.model_cfg, tower)) is not None]
    need(bool(specs), f"--attention-transfer needs a swapped model, e.g. --model {config.model}+mala")
    learns = any(spec["kind"] != "softmax" for spec in specs)
    need(learns, "--attention-transfer has nothing to teach to softmax itself; leave such runs out")
    alone = ("distill_model", "grad_checkpointing", "torchcompile", "lock_image", "lock_text", "pretrained_image")
    clash = [flag for flag in alone if flags[flag]]
    clash += ["fsdp"] * config.ours["fsdp"] + ["accum_freq"] * (flags["accum_freq"] > 1)
    names = ", ".join(f"--{flag.replace('_', '-')}" for flag in clash)
    need(not clash, f"--attention-transfer does not work with {names}")
    forced = flags["force_patch_dropout"]
    dropout = vision.get("patch_dropout") if forced is None else forced
    need(not dropout, f"--attention-transfer compares all tokens: give --force-patch-dropout 0 (it is {dropout})")


def _name_defaults(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """OpenCLIP's defaults that depend on the model's name; timm optimizers have their own."""
    from open_clip_train.params import get_default_params

    return {} if "timm" in flags["opt"] else get_default_params(model)


def _stamp(model: str) -> int:
    """When a JSON config was last changed, so that a cached reading of it is not stale."""
    path = Path(model.split("+")[0])
    return path.stat().st_mtime_ns if path.suffix == ".json" and path.is_file() else 0


@functools.lru_cache(maxsize=1024)
def _model(model: str, stamp: int) -> tuple[str, str]:
    name, cfg = model_config(model)
    return name, json.dumps(cfg)


def _portable(cfg: dict[str, Any]) -> dict[str, Any]:
    """The model config with its vocabulary file as a hash of the content instead of a path."""
    kwargs = (cfg.get("text_cfg") or {}).get("tokenizer_kwargs") or {}
    if "bpe_path" not in kwargs:
        return cfg
    path = Path(kwargs["bpe_path"])
    if not path.is_file():
        raise UserError(f"vocabulary {str(path)!r} named in the model's config (bpe_path) does not exist")
    digest = _digest(path, path.stat().st_mtime_ns)
    return cfg | {"text_cfg": cfg["text_cfg"] | {"tokenizer_kwargs": kwargs | {"bpe_path": digest}}}


@functools.lru_cache(maxsize=1024)
def _digest(path: Path, stamp: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _short(samples: int) -> str:
    """12800000 → 12.8M."""
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if samples >= unit:
            return f"{samples / unit:.4g}{letter}"
    return str(samples)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    raise TypeError(f"{value!r} has no TOML form")
