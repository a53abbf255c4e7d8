"""Small fixes for OpenCLIP's own tools on today's libraries, used by the second door (``clip_linear.run``) only.

Each says what breaks without it and where that is reported, and does nothing where it is not needed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

_DONE = "_clip_linear_fix"


def accuracy_on_new_numpy() -> None:
    """numpy ≥ 2.4 refuses ``float()`` of an array with one element: zero-shot evaluation crashes after the first epoch,
    before the checkpoint is written. https://github.com/LAION-AI/CLIP_benchmark/issues/147

    The modules' ``accuracy`` differ (a count, a share), so not they are replaced but the ``float`` that they call."""
    for name in ("open_clip_train.zero_shot", "clip_benchmark.metrics.zeroshot_classification"):
        module = _module(name)
        if module is not None:
            module.float = _float  # type: ignore[attr-defined]


def _float(value: Any) -> float:
    return float(value.item() if hasattr(value, "item") else value)


def ddp_on_cpu() -> None:
    """OpenCLIP passes ``device_ids=[device]`` also for the CPU, where DistributedDataParallel wants None.
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html (``device_ids``)"""
    from torch.nn.parallel import DistributedDataParallel

    def wrap(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(self: Any, module: Any, device_ids: Any = None, *args: Any, **kwargs: Any) -> None:
            on_cpu = all(p.device.type == "cpu" for p in module.parameters())
            original(self, module, None if on_cpu else device_ids, *args, **kwargs)

        return __init__

    _once(DistributedDataParallel, "__init__", wrap)


def no_end_of_shard_marker() -> None:
    """webdataset ≥ 0.2.90 yields an empty dict at the end of each shard, and OpenCLIP's grouping fails on it with
    ``KeyError: 'fname'``. https://github.com/mlfoundations/open_clip/issues/935"""
    data = _module("open_clip_train.data")
    if data is None or "eof_value" not in inspect.signature(data.tar_file_expander).parameters:
        return
    _once(data, "tar_file_expander", lambda original: functools.partial(original, eof_value=None))


def profiler_reads_our_configs() -> None:
    """OpenCLIP's profiler builds ``CLIPVisionCfg(**config)`` from the raw config for its table, which refuses our key
    (the model itself was built before that, through ``register()``); and torch's flop counter prints its own table with
    ``tabulate``, which OpenCLIP does not ask for."""
    profiler = _module("open_clip_train.profiler")
    if profiler is None:
        return
    import open_clip

    if importlib.util.find_spec("tabulate") is None:
        _once(profiler, "FlopCounterMode", lambda original: functools.partial(original, display=False))

    from clip_linear.names import KEY

    def wrap(original: Any) -> Any:
        return lambda **config: original(**{k: v for k, v in config.items() if k != KEY})

    for name in ("CLIPVisionCfg", "CLIPTextCfg"):
        _once(open_clip, name, wrap)


FIXES = (accuracy_on_new_numpy, ddp_on_cpu, no_end_of_shard_marker)


def apply(module: str) -> None:
    """Apply the fixes that a module's tool may need; calling it again does nothing."""
    for fix in FIXES:
        fix()
    if module == "open_clip_train.profiler":  # it alone: the package's classes stay themselves for everybody else
        profiler_reads_our_configs()


def _module(name: str) -> Any:
    """A module, or None where its package is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            return None
        raise


def _once(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace an attribute by its wrapped self, unless that has been done."""
    done = getattr(owner, _DONE, ())
    if (owner, name) not in done:
        setattr(owner, name, wrap(getattr(owner, name)))
        setattr(owner, _DONE, (*done, (owner, name)))
