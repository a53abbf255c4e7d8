"""``clip-linear bench eval``: zero-shot evaluation beside CLIP_benchmark and OpenCLIP's own, in turns.

All see the same float32 model and the same images. First every one must give the same predictions; images whose first
two classes lie within 1e-4 of each other may differ and are listed. Seconds are those of the clock and those of the
processors (child processes included), which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from clip_linear.errors import RunError, UserError
from clip_linear.flags import Parser

MARGIN = 1e-4  # of cosine similarity; nearer ties may fall either way when batches are cut differently


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``clip-linear bench eval``."""
    parser = Parser(
        prog="clip-linear bench eval",
        description="Seconds to build the classifier and to evaluate, in turns with OpenCLIP's zero-shot and with "
        "CLIP_benchmark (pip install 'clip-linear[peers]'). First all must give the same predictions.",
    )
    parser.add_argument("--model", help="(default: the demo's ViT-emoji-w64)")
    parser.add_argument("--pretrained", default="random", help="(default: random weights)")
    parser.add_argument("--dataset", help="ImageFolder with its own names (default: the embedded twemoji_objects)")
    parser.add_argument("--batch-size", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="threads, or the peers' processes (%(default)s)")
    parser.add_argument("--device", default="auto", help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of each (%(default)s)")
    parser.add_argument("--out", type=Path, help="also write rows: .csv or .jsonl")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: list[str]) -> int:
    """Measure and print; returns the exit code."""
    args = build_parser().parse_args(argv)
    if min(args.rounds, args.batch_size, args.workers) < 1:
        raise UserError("--rounds, --batch-size and --workers must be 1 or more")
    with tempfile.TemporaryDirectory(prefix="clip-linear-bench-") as folder:
        if args.model is None or args.dataset is None:
            from clip_linear import emoji

            emoji.write(Path(folder) / "data")
            args.model = args.model or str(Path(folder) / "data/configs/ViT-emoji-w64.json")
            args.dataset = args.dataset or str(Path(folder) / "data/eval/imagefolder/twemoji_objects")
        result = measure(args, Path(folder))
    if args.json:
        sys.stdout.write(json.dumps(result, indent=1) + "\n")
    else:
        sys.stdout.write(_table(result))
    if args.out is not None:
        _write_rows(args.out, result)
    return 0


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Check that all agree, then time them in turns."""
    from clip_linear_eval.models import load
    from clip_linear_eval.world import pick_device

    device = pick_device(args.device)
    loaded = load(args.model, args.pretrained, precision="fp32", device=device)
    loaded.model.eval()
    case = Case(loaded, Path(args.dataset), args.batch_size, args.workers, device)
    tools: list[Tool] = [Ours(case), Ours(case, folder / "tokens"), OpenClip(case)]
    if importlib.util.find_spec("clip_benchmark") is not None:
        tools.append(ClipBenchmark(case))
    near = {tool.name: case.check(tool.name, tool.evaluate()) for tool in tools}
    seconds: dict[str, dict[str, list[float]]] = {tool.name: {} for tool in tools}
    for _ in range(args.rounds):
        for tool in tools:
            for part, work in (("classifier", tool.classifier), ("evaluation", tool.evaluate)):
                wall, cpu = case.timed(work)
                seconds[tool.name].setdefault(f"{part}_s", []).append(wall)
                seconds[tool.name].setdefault(f"{part}_cpu_s", []).append(cpu)
    ours = seconds[tools[0].name]
    return {
        "model": loaded.info.get("model"),
        "dataset": case.data.name,
        "images": len(case.data.files),
        "classes": len(case.data.names),
        "prompts": sum(len(case.data.templates.prompts(name)) for name in case.data.names),
        "device": device,
        "rounds": args.rounds,
        "differ_within_1e-4": near,
        "tools": {
            name: {
                part: spread(values) | {"times_ours": spread([b / a for a, b in zip(ours[part], values)])}
                for part, values in parts.items()
            }
            for name, parts in seconds.items()
        },
    }


class Case:
    """One model and one data set, and what the first tool predicted."""

    def __init__(self, loaded: Any, root: Path, batch_size: int, workers: int, device: str) -> None:
        from clip_linear_eval.datasets import open_source, resolve

        self.model, self.preprocess, self.tokenizer = loaded.model, loaded.preprocess, loaded.tokenizer
        self.root, self.batch_size, self.workers, self.device = root, batch_size, workers, device
        self.data = resolve(open_source(root, "imagefolder"))
        if self.data.templates.per_class is not None:
            raise UserError("bench eval compares on sets with common templates, which all the tools understand")
        self.expected: Any = None
        self.margin: Any = None

    def timed(self, work: Callable[[], Any]) -> tuple[float, float]:
        """(seconds by the clock, seconds of the processors); every tool begins with no word remembered."""
        if hasattr(self.tokenizer, "cache"):
            self.tokenizer.cache = {t: t for t in self.tokenizer.cache if t.startswith("<")}
        start, before = time.perf_counter(), _cpu_s()
        work()
        if self.device.startswith("cuda"):
            import torch

            torch.cuda.synchronize()
        return time.perf_counter() - start, _cpu_s() - before

    def loader(self) -> Any:
        """The loader that both peers' instructions use: torchvision's ImageFolder, worker processes."""
        import torch
        from torchvision.datasets import ImageFolder

        folder = ImageFolder(str(self.root), transform=self.preprocess)
        return torch.utils.data.DataLoader(folder, batch_size=self.batch_size, num_workers=self.workers)

    def check(self, name: str, first: Any) -> list[str]:
        """Files that this tool sees as another class within the margin. Raises RunError for any beyond it."""
        import numpy as np

        differ = np.flatnonzero(first != self.expected).tolist()
        far = [self.data.files[i] for i in differ if self.margin[i] >= MARGIN]
        if far:
            raise RunError(f"{name} and clip_linear differ on {len(far)} images, e.g. {far[0]!r}; nothing was timed")
        return [self.data.files[i] for i in differ]


class Tool(Protocol):
    """One way to evaluate a case."""

    name: str

    def classifier(self) -> Any:
        """Build the classifier, [D, C]."""

    def evaluate(self) -> Any:
        """All of it; returns the first class of every image, in the order of the set."""


class Ours:
    """clip_linear, from listing the folder to the rows. ``cache``: tokens are read from disk; classifiers never are."""

    def __init__(self, case: Case, cache: Path | None = None) -> None:
        self.case, self.cache = case, cache
        self.name = "clip_linear" if cache is None else "clip_linear, tokens cached"

    def _forget(self) -> None:
        for file in (self.cache / "classifiers").glob("*") if self.cache else ():
            file.unlink()

    def classifier(self) -> Any:
        from clip_linear_eval.classifier import build_classifier
        from clip_linear_eval.features import inference

        self._forget()
        case = self.case
        with inference(case.model, "fp32", case.device):
            return build_classifier(
                case.model, case.tokenizer, case.data.names, case.data.templates, device=case.device, cache=self.cache
            )

    def evaluate(self) -> Any:
        from clip_linear_eval.settings import Settings
        from clip_linear_eval.zeroshot import measure as evaluate

        self._forget()
        case = self.case
        settings = Settings(batch_size=case.batch_size, workers=case.workers, device=case.device, cache=self.cache)
        done = evaluate(case.model, case.preprocess, case.tokenizer, case.root, settings)
        assert done.scores is not None, "a folder of classes"
        if case.expected is None:
            case.expected, case.margin = done.scores.top[:, 0], done.scores.margin
        return done.scores.top[:, 0]


class OpenClip:
    """OpenCLIP's classifier, and the loop of its zero_shot.run (whose accuracy fails under numpy 2.4)."""

    name = "open_clip"

    def __init__(self, case: Case) -> None:
        self.case = case

    def classifier(self) -> Any:
        from open_clip import build_zero_shot_classifier

        case = self.case
        templates = [template.replace("{c}", "{}") for template in case.data.templates.templates]
        return build_zero_shot_classifier(case.model, case.tokenizer, case.data.names, templates, device=case.device)

    def evaluate(self) -> Any:
        import torch

        classifier, first = self.classifier(), []
        with torch.inference_mode():
            for images, _ in self.case.loader():
                output = self.case.model(image=images.to(self.case.device))
                features = output["image_features"] if isinstance(output, dict) else output[0]
                first.append((100.0 * features @ classifier).topk(min(5, classifier.shape[1])).indices[:, 0].cpu())
        return torch.cat(first).numpy()


class ClipBenchmark:
    """CLIP_benchmark's own classifier and loop, as with --no_amp."""

    name = "clip_benchmark"

    def __init__(self, case: Case) -> None:
        from clip_benchmark.metrics import zeroshot_classification

        self.case, self.peer = case, zeroshot_classification
        self.peer.tqdm = lambda items, **_: items

    def classifier(self) -> Any:
        case = self.case
        templates = list(case.data.templates.templates)
        return self.peer.zero_shot_classifier(
            case.model, case.tokenizer, case.data.names, templates, case.device, amp=False
        )

    def evaluate(self) -> Any:
        case = self.case
        logits, _ = self.peer.run_classification(case.model, self.classifier(), case.loader(), case.device, amp=False)
        return logits.topk(min(5, logits.shape[1])).indices[:, 0].numpy()


def _cpu_s() -> float:
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


def spread(values: list[float]) -> dict[str, float]:
    """Median with the 20th and 80th percentile."""
    if len(values) == 1:
        return {"median": values[0], "p20": values[0], "p80": values[0]}
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return {"median": statistics.median(values), "p20": fifths[0], "p80": fifths[3]}


def _table(result: dict[str, Any]) -> str:
    head = f"{result['model']} on {result['dataset']}: {result['images']} images, {result['classes']} classes, "
    lines = [head + f"{result['prompts']} prompts, {result['device']}; median of {result['rounds']} (20 to 80 %)"]
    for part in ("classifier_s", "classifier_cpu_s", "evaluation_s", "evaluation_cpu_s"):
        lines.append(f"\n{part:<28}{'seconds':>26}{'times ours':>26}")
        for name, tool in result["tools"].items():
            lines.append(f"{name:<28}{_cell(tool[part]):>26}{_cell(tool[part]['times_ours']):>26}")
    lines.append("")
    for name, files in result["differ_within_1e-4"].items():
        if files:
            lines.append(f"{name}: {len(files)} near ties fall the other way: {', '.join(files[:10])}")
    return "\n".join(lines) + "\n"


def _cell(s: dict[str, float]) -> str:
    return f"{s['median']:.3f} ({s['p20']:.3f} to {s['p80']:.3f})"


def _write_rows(path: Path, result: dict[str, Any]) -> None:
    from clip_linear import provenance
    from clip_linear_eval.results import make_row, write_rows
    from clip_linear_eval.rows import device_name

    common = {
        "study": "bench eval",
        "model": result["model"],
        "dataset": result["dataset"],
        "provenance": "measured",
        "device": device_name(result["device"]),
        "versions": provenance.versions_text(),
        "commit": provenance.commit(),
        "date": provenance.date(),
        "n": result["rounds"],
    }
    rows = []
    for name, tool in result["tools"].items():
        for part, found in tool.items():
            for metric, unit, s in ((part, "s", found), (f"{part}_times_ours", "ratio", found["times_ours"])):
                values = {"value": s["median"], "ci_low": s["p20"], "ci_high": s["p80"]}
                rows.append(make_row(**common, **values, metric=metric, unit=unit, tool=name))
    write_rows(path, rows)
