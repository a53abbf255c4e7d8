"""The flags of ``clip-linear train``: OpenCLIP's own parser and our group. Imports no torch.

The parser *is* OpenCLIP's (``open_clip_train.params`` of the installed version), so names, defaults and help stay
its own. A flag of OpenCLIP that this trainer does not honour is refused by name, never ignored.
"""

from __future__ import annotations

import argparse
import functools
from types import SimpleNamespace
from typing import Any, NoReturn

from clip_linear.errors import UserError, unknown
from clip_linear.flags import Parser

SECOND_DOOR = "OpenCLIP's own trainer has it: python -m clip_linear.run open_clip_train.main …"
# OpenCLIP's flags that this trainer honours; any other one, also of a later OpenCLIP, is refused unless left alone.
_HONOURED = """
accum_freq aug_cfg batch_size beta1 beta2 cache_dir coca_caption_loss_weight coca_contrastive_loss_weight
dataset_resampled dataset_type ddp_static_graph debug delete_previous_checkpoint device dist_backend dist_url
distill_model distill_pretrained epochs epochs_cooldown eps force_context_length force_custom_text force_image_size
force_patch_dropout force_quick_gelu gather_with_grad grad_checkpointing grad_clip_norm image_interpolation image_mean
image_resize_mode image_std local_loss lock_image lock_image_freeze_bn_stats lock_image_unlocked_groups lock_text
lock_text_freeze_layer_norm lock_text_unlocked_layers log_every_n_steps logs loss_dist_impl lr lr_cooldown_end
lr_cooldown_power lr_scheduler model momentum name no_set_device_rank opt precision pretrained pretrained_image
report_to resume save_frequency save_most_recent seed siglip skip_scheduler torchcompile train_data
train_data_upsampling_factors train_num_samples use_bn_sync wandb_notes wandb_project_name warmup wd workers
zeroshot_frequency
"""
HONOURED = frozenset(_HONOURED.split())
# What to do instead of the others.
REFUSED = {
    "torchscript": "use --torchcompile",
    "trace": "use --torchcompile",
    "remote_sync": "keep --logs on a file system that is backed up",
    "remote_sync_frequency": "keep --logs on a file system that is backed up",
    "remote_sync_protocol": "keep --logs on a file system that is backed up",
    "copy_codebase": "env.json records the commit and the versions",
    "log_local": "the launcher keeps one log per rank",
    "csv_separator": "make shards first: clip-linear data write",
    "csv_img_key": "make shards first: clip-linear data write",
    "csv_caption_key": "make shards first: clip-linear data write",
    "val_data": "use --eval-data with a retrieval set",
    "val_num_samples": "use --eval-data with a retrieval set",
    "val_frequency": "use --zeroshot-frequency",
    "imagenet_val": "use --eval-data PATH",
    "imagenet_v2": "use --eval-data PATH",
}


# What other trainers call OpenCLIP's flags and ours; too far off for a spelling check.
OTHER_NAMES = {
    "learning-rate": "--lr",
    "weight-decay": "--wd",
    "num-workers": "--workers",
    "num-epochs": "--epochs",
    "warmup-steps": "--warmup",
    "max-grad-norm": "--grad-clip-norm",
    "gradient-accumulation-steps": "--accum-freq",
    "output-dir": "--run-dir",
}


class _Parser(Parser):
    """What OpenCLIP's parser becomes: a flag is written out, since a later OpenCLIP may have longer ones."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False} | kwargs)


class _Built(Exception):
    pass


def _openclip_parser() -> argparse.ArgumentParser:
    """OpenCLIP builds its parser inside ``parse_args``; the built one is caught as it is about to parse."""
    from open_clip_train import params

    class Catching(_Parser):
        def parse_args(self, *args: Any, **kwargs: Any) -> NoReturn:  # type: ignore[override]
            raise _Built(self)

    real = params.argparse
    params.argparse = SimpleNamespace(ArgumentParser=Catching, Action=argparse.Action)
    try:
        params.parse_args([])
    except _Built as built:
        parser: argparse.ArgumentParser = built.args[0]
    finally:
        params.argparse = real
    parser.__class__ = _Parser
    return parser


def count(text: str) -> int:
    """A number of samples: ``19200``, ``1_000_000`` or ``1.28e9``."""
    value = float(text.replace("_", ""))
    if value != int(value) or value < 0:
        raise ValueError(text)
    return int(value)


def often(text: str) -> str:
    """How often to evaluate, checked: ``2`` (epochs, OpenCLIP's meaning), ``500steps`` or ``1e6samples``."""
    number, unit = split_often(text)
    return f"{number}{unit}"


def split_often(text: str) -> tuple[int, str]:
    """``500steps`` → (500, "steps"); a bare number counts epochs."""
    for unit in ("steps", "samples", "epochs"):
        if text.endswith(unit):
            return count(text.removesuffix(unit).strip()), unit
    return count(text), "epochs"


@functools.cache
def build_parser() -> argparse.ArgumentParser:
    """OpenCLIP's parser with our group; parse with ``parse``."""
    parser = _openclip_parser()
    parser.prog = "clip-linear train"
    parser.description = "Train a CLIP model: OpenCLIP's flags with OpenCLIP's meanings, and ours (last group)."
    for action in parser._actions:
        if action.dest == "zeroshot_frequency":
            action.type, action.default = often, "2epochs"
            action.help = "How often to evaluate on --eval-data: N (epochs), Nsteps or Nsamples; always at the end."
        elif action.dest == "model":
            action.help = "NAME, NAME+IMAGE[+TEXT] (e.g. ViT-B-16+mala+elu), or the path of a JSON model config."
        elif action.dest != "help" and action.dest not in HONOURED:
            action.help = f"Not honoured here: {REFUSED.get(action.dest, SECOND_DOOR)}"
    _add_ours(parser)
    return parser


def _add_ours(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("clip_linear")

    def add(name: str, help: str, **kwargs: Any) -> None:
        group.add_argument(name, help=help, **kwargs)

    add(
        "--samples",
        "Budget in samples seen, all ranks together (instead of --train-num-samples × --epochs).",
        type=count,
    )
    add("--run-dir", "The run's folder (default: LOGS/NAME; NAME defaults to the run id).")
    add("--eval-data", "Zero-shot and retrieval sets to evaluate on.", nargs="+", default=[], metavar="PATH")
    add("--save-every-steps", "Save a checkpoint every N steps.", type=count)
    add("--save-every-samples", "Save a checkpoint every N samples seen.", type=count)
    add("--save-every-minutes", "Save a checkpoint every M minutes.", type=float)
    add("--keep-last", "Checkpoints to keep (milestones are kept too).", type=count, default=2)
    add("--keep-every-samples", "Save and keep for good a checkpoint at every multiple of N samples.", type=count)
    add(
        "--max-bad-steps",
        "Steps with a non-finite loss or gradient to skip in 1,000 before stopping.",
        type=count,
        default=10,
    )
    add(
        "--ema-decay",
        "Also keep an exponential moving average of the weights, and evaluate it.",
        type=float,
        default=0.0,
    )
    add(
        "--attention-transfer",
        "Train the swapped attention alone, each layer to give what softmax gives in the model of --pretrained "
        "(clip-linear linearize).",
        action="store_true",
    )
    add("--fsdp", "Shard parameters and optimizer over the ranks (FSDP2) instead of DDP.", action="store_true")
    add("--deterministic", "Refuse operations that are not deterministic.", action="store_true")
    add("--no-fused-optimizer", "Plain AdamW instead of PyTorch's fused one.", action="store_true")
    add(
        "--openclip-accum-scale",
        "Multiply logit_scale's gradient by --accum-freq, as OpenCLIP does.",
        action="store_true",
    )
    add("--dist-timeout-s", "Seconds a collective may take before the job is given up.", type=float, default=1800.0)
    add("--peak-tflops", "Peak TFLOP/s of one device at this precision, for the MFU estimate.", type=float)
    add("--dry-run", "Print what would run, and stop.", action="store_true")
    add("--caption-key", "Field of the caption in each sample (default: what the shards hold).")
    add("--filter", "Condition on a sample's JSON, e.g. similarity>=0.3; may be repeated.", action="append", default=[])
    add("--max-image-pixels", "Skip larger images.", type=count)
    add("--max-aspect", "Cut longer or wider images than this ratio to their centre.", type=float)
    add("--shuffle-buffer-mib", "Shuffle buffer of each worker, in MiB of raw samples.", type=float)
    add("--max-fault-rate", "Stop when more than this share of the samples is bad.", type=float)
    add("--data-timeout-s", "Seconds without a batch before the reader is declared stuck.", type=float)
    add("--shard-cache", "Folder that keeps remote shards.")


@functools.cache
def defaults() -> dict[str, Any]:
    """Default of every flag, by destination."""
    return {a.dest: a.default for a in build_parser()._actions if a.dest != "help"}


@functools.cache
def our_flags() -> dict[str, argparse.Action]:
    """The actions of our group, by destination."""
    group = next(g for g in build_parser()._action_groups if g.title == "clip_linear")
    return {action.dest: action for action in group._group_actions}


def parse(argv: list[str]) -> dict[str, Any]:
    """All flags by destination. Raises UserError for an unknown, malformed or unhonoured one."""
    values, rest = build_parser().parse_known_args(argv)
    if rest:
        flag = rest[0].split("=")[0]
        if not flag.startswith("-"):
            raise UserError(
                f"argument {flag!r} belongs to no flag; quote lists of shards: --train-data 'a/{{0..9}}.tar'"
            )
        meant = OTHER_NAMES.get(flag.lstrip("-").replace("_", "-"))
        if meant is not None:
            raise UserError(f"unknown flag {flag!r}: here it is {meant}; run: clip-linear train --help")
        names = [s for a in build_parser()._actions for s in a.option_strings]
        raise unknown("flag", flag, names, "run: clip-linear train --help")
    flags = vars(values)
    for dest, value in flags.items():
        if dest not in HONOURED and dest not in our_flags() and value != defaults()[dest]:
            instead = REFUSED.get(dest, SECOND_DOOR)
            raise UserError(f"--{dest.replace('_', '-')} is not honoured by this trainer; {instead}")
    return flags
