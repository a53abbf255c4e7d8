"""What the training tests share: a tiny model, batches without shards, runs in this process and in others."""

import io
import json
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from clip_linear.train.config import resolve

MINI = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 16, "head_width": 8, "patch_size": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}


@dataclass
class FakeBatch:
    images: Any
    texts: Any
    samples: int
    state: Any


class FakeLoader:
    """Batches that are a function of (global index, rank); half noise, half told by the caption, so a loss can fall."""

    def __init__(self, config, parts, world, states, batches, faults_path):
        self.config, self.world, self.done = config, world, batches
        self.faults = {}
        if states is not None:
            assert [s["n"] for s in states] == [batches] * len(states)

    def __iter__(self):
        total = self.config.steps * self.config.accum_freq
        for n in range(self.done, total):
            images, texts = global_batch(n, self.config.batch_size * self.world.world_size)
            mine = slice(self.world.rank * self.config.batch_size, (self.world.rank + 1) * self.config.batch_size)
            yield FakeBatch(images[mine], texts[mine], self.config.batch_size, {"n": n + 1})


def global_batch(n: int, size: int):
    """The n-th batch of all ranks together: images [size, 3, 32, 32] and texts [size, 8]."""
    g = torch.Generator().manual_seed(n)
    words = torch.randint(1, 20, (size, 6), generator=g)
    texts = torch.cat([torch.full((size, 1), 49406), words, torch.full((size, 1), 49407)], 1)
    images = 0.5 * torch.randn(size, 3, 32, 32, generator=g) + words[:, :3, None, None] / 10
    return images, texts


def write_model(folder, **changes) -> str:
    """The tiny model as a config file; its path."""
    path = folder / "ViT-tiny-test.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(MINI | changes))
    return str(path)


def argv(folder, *extra: str, model_suffix: str = "+elu", **flags: Any) -> list[str]:
    """The command line of a tiny CPU run in ``folder``."""
    values = {
        "model": write_model(folder) + model_suffix,
        "train-data": "none.tar",
        "samples": 96,
        "batch-size": 8,
        "lr": 1e-2,
        "warmup": 2,
        "precision": "fp32",
        "workers": 0,
        "device": "cpu",
        "run-dir": folder / "run",
        "log-every-n-steps": 1,
    } | {k.replace("_", "-"): v for k, v in flags.items()}
    return [*(part for k, v in values.items() for part in (f"--{k}", str(v))), *extra]


def config(folder, *extra: str, world_size: int = 1, **flags: Any):
    """The same, resolved."""
    return resolve(argv(folder, *extra, **flags), world_size)


def rows(run_dir) -> list[dict]:
    """metrics.jsonl without what depends on the clock."""
    text = (run_dir / "metrics.jsonl").read_text()
    clock = ("samples_per_s", "step_s", "data_wait_frac", "rss_gib", "t", "tokens_per_s", "mfu")
    return [{k: v for k, v in json.loads(line).items() if k not in clock} for line in text.splitlines()]


def weights(run_dir, step: int):
    """The state dict of a checkpoint."""
    return torch.load(run_dir / "checkpoints" / f"step_{step:09d}.pt", weights_only=True)["state_dict"]


def same_bits(a, b) -> bool:
    """Whether two state dicts are equal bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


COLOURS = {"red": (220, 30, 30), "green": (30, 200, 60), "blue": (40, 60, 220), "black": (10, 10, 10)}


def _jpeg(name: str, seed: int) -> bytes:
    rng = random.Random(seed)
    image = Image.new("RGB", (40, 40), tuple(min(255, c + rng.randrange(25)) for c in COLOURS[name]))
    out = io.BytesIO()
    image.save(out, "JPEG")
    return out.getvalue()


def write_shards(folder: Path, shards: int = 2, per_shard: int = 24) -> str:
    """Tiny image–text shards of coloured squares; the pattern that names them."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(COLOURS)
    for s in range(shards):
        with tarfile.open(folder / f"{s:05d}.tar", "w") as tar:
            for i in range(per_shard):
                name = names[i % len(names)]
                for ext, data in (("jpg", _jpeg(name, 100 * s + i)), ("txt", f"a {name} square".encode())):
                    info = tarfile.TarInfo(f"{s:03d}{i:06d}.{ext}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return str(folder / f"{{00000..{shards - 1:05d}}}.tar")


def write_eval_set(folder: Path) -> str:
    """An ImageFolder of the same squares with its own class names and templates."""
    for name in COLOURS:
        (folder / name).mkdir(parents=True)
        for i in range(2):
            (folder / name / f"{i}.jpg").write_bytes(_jpeg(name, 1000 + i))
    (folder / "classnames.txt").write_text("\n".join(sorted(COLOURS)))
    (folder / "zeroshot_classification_templates.txt").write_text("a {c} square")
    return str(folder)


def command(*args: str, **kwargs: Any) -> subprocess.CompletedProcess:
    """``python -m clip_linear …`` in another process."""
    return subprocess.run(
        [sys.executable, "-m", "clip_linear", *args], capture_output=True, text=True, timeout=240, **kwargs
    )


# Other processes are forked from a server that has imported everything once; importing takes longer than the runs.
_SERVER = multiprocessing.get_context("forkserver")
_PRELOADED = ["open_clip", "open_clip_train.scheduler", "clip_linear.train.loop", "clip_linear.openclip"]
_SERVER.set_forkserver_preload(_PRELOADED)


def start(args: list[str], loader: Any = FakeLoader, **env: Any) -> Any:
    """``train`` with these flags in another process; its exit code is what ``train`` returns (1 when it raises)."""
    process = _SERVER.Process(target=_run, args=(args, loader, {k: str(v) for k, v in env.items()}))
    process.start()
    return process


def start_ranks(n: int, args: list[str], loader: Any = FakeLoader, **env: Any) -> list[Any]:
    """The same as ``n`` ranks of one run, as torchrun would start them but for the rendezvous by a file."""
    world = {"WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n}
    return [start(args, loader, RANK=i, LOCAL_RANK=i, **world, **env) for i in range(n)]


def codes(processes: list[Any], timeout_s: float = 120) -> list[int]:
    """Exit codes in order; negative: killed by that signal."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
    out = [process.exitcode for process in processes]
    for process in processes:
        if process.exitcode is None:
            process.kill()
    return out


def _run(args: list[str], loader: Any, env: dict[str, str]) -> None:
    os.environ.update(env)
    multiprocessing.set_start_method("fork", force=True)  # data workers are this process's children, as in a real run
    from clip_linear.train.loop import train

    logging.basicConfig(level=logging.INFO, format=f"[{env.get('RANK', 0)}] %(message)s")
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("clip_linear").setLevel(logging.INFO)
    sys.exit(train(resolve(args, int(env.get("WORLD_SIZE", 1))), make_loader=loader))


def start_call(function: Any, *args: Any) -> Any:
    """Any function of a test module in another process."""
    process = _SERVER.Process(target=function, args=args)
    process.start()
    return process


def _killing(args: list[str], moment: tuple, env: dict[str, str], stderr: str | None = None) -> None:
    """``train`` on real shards in a process that a moment of its own making ends.

    ("alarm", s): killed after s seconds, wherever it is. ("fsync", n), ("rename", n): killed in the n-th such call.
    ("half", n): killed when half of the n-th checkpoint is written. ("batch", n, signal): the signal at the n-th batch.
    """
    kind, n, *rest = moment
    seen = {"n": 0}

    def now() -> bool:
        seen["n"] += 1
        return seen["n"] == n

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def before(owner: Any, name: str, act: Any, counts: Any = lambda *_: True) -> None:
        original = getattr(owner, name)

        def wrapped(*a: Any, **k: Any) -> Any:
            if counts(*a) and now():
                act(*a)
            return original(*a, **k)

        setattr(owner, name, wrapped)

    def half(value: Any, path: Any) -> None:
        whole = io.BytesIO()
        save(value, whole)
        Path(path).write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
        die()

    save = torch.save
    if kind == "alarm":
        signal.setitimer(signal.ITIMER_REAL, n)  # SIGALRM's default ends the process as SIGKILL would
    elif kind == "fsync":
        before(os, "fsync", die)
    elif kind == "rename":
        before(os, "replace", die)
    elif kind == "half":
        before(torch, "save", half, lambda value, path: isinstance(path, Path))  # not what ranks send
    elif kind in ("batch", "batch twice"):
        from clip_linear.train.feed import Feed

        times = 2 if kind == "batch twice" else 1
        before(Feed, "next_pairs", lambda *_: [os.kill(os.getpid(), rest[0]) for _ in range(times)])
    if stderr is not None:
        sys.stderr = open(stderr, "a", buffering=1)  # noqa: SIM115 - of this process, to its end
    _run(args, None, env)


def start_ranks_until(n: int, args: list[str], moment: tuple, rank: int = 0, stderr: str | None = None) -> list[Any]:
    """Ranks on real shards, one of which meets ``moment`` (see ``_killing``)."""
    out = []
    for i in range(n):
        env = {"RANK": i, "LOCAL_RANK": i, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n} if n > 1 else {}
        mine = moment if i == rank else ("none", 0)
        out.append(start_call(_killing, args, mine, {k: str(v) for k, v in env.items()}, stderr))
    return out


def start_evaluating(args: list[str], **env: Any) -> Any:
    """``train`` with real evaluation on --eval-data, on batches without shards."""
    process = _SERVER.Process(target=_evaluating, args=(args, {k: str(v) for k, v in env.items()}))
    process.start()
    return process


def _evaluating(args: list[str], env: dict[str, str]) -> None:
    os.environ.update(env)
    from clip_linear.train.loop import train
    from clip_linear_launch.train import evaluation

    config = resolve(args, int(env.get("WORLD_SIZE", 1)))
    sys.exit(train(config, evaluation(config), FakeLoader))
