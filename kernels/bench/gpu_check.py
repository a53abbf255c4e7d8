"""Check and time the Triton kernels on one GPU in at most ten minutes; every line is flushed as it comes.

    PYTHONPATH=.:kernels python kernels/bench/gpu_check.py --out results/bench/gpu_check.jsonl --budget-s 480

Order: gate (all modes, outputs and gradients, against float64), copy bandwidth, B = 256 N = 197, N = 4M, the sweep from
1k to 1M, causal, peers. A red gate ends it with 1 before anything is timed. ``--dry`` runs the same code in Triton's
interpreter at tiny sizes, without times.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main(argv: list[str]) -> int:
    """Run it; 0 when the gate is green, 1 when it is red."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_check.jsonl"))
    parser.add_argument("--budget-s", type=float, default=480)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args(argv)
    if args.dry:
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["CLIP_LINEAR_BACKEND"] = "triton"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with open(args.out, "a", encoding="utf-8") as file:
        return Check(args, file).run()


class Check:
    """The state of one check."""

    def __init__(self, args: argparse.Namespace, file: Any) -> None:
        self.dry, self.budget_s, self.file, self.start = args.dry, args.budget_s, file, time.monotonic()
        self.device = "cpu" if args.dry else "cuda"
        self.bandwidth = 1.0

    def emit(self, **row: Any) -> None:
        """Print and keep a line at once: a check that is cut short still yields what it had."""
        line = json.dumps(row | {"t_s": round(time.monotonic() - self.start, 1)})
        print(line, flush=True)
        self.file.write(line + "\n")
        self.file.flush()

    def left_s(self) -> float:
        return self.budget_s - (time.monotonic() - self.start)

    def run(self) -> int:
        import torch
        import triton

        if not self.dry and not torch.cuda.is_available():
            print("no GPU here; --dry runs the same code in the interpreter", file=sys.stderr)
            return 1
        name = "interpreter" if self.dry else torch.cuda.get_device_name()
        self.emit(what="env", device=name, torch=torch.__version__, triton=triton.__version__)
        red = self.gate()
        self.emit(what="gate", red=red)
        if red:
            return 1
        if not self.dry:
            x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
            y = torch.empty_like(x)
            self.bandwidth = 2 * x.numel() / self.time({"copy": lambda: y.copy_(x)})["copy"]
            self.emit(what="copy", TB_per_s=self.bandwidth / 1e12)
            del x, y
        shapes = [(256, 197, 12), (1, 1 << 22, 12), (64, 1024, 12), (16, 4096, 12), (4, 16384, 12), (1, 65536, 12)]
        shapes += [(1, 1 << 20, 12), (1, 1 << 22, 1)]
        for causal in (False, True):
            for batch, length, heads in [(1, 33, 2)] if self.dry else shapes[1:] if causal else shapes:
                self.shape(batch, length, heads, causal)
        self.peers()
        self.emit(what="done")
        return 0

    def gate(self) -> int:
        """Compare all modes with the reference; the number of cases that are off."""
        import torch

        from clip_linear_kernels import linear_attention
        from clip_linear_kernels.testing import MODES, Case, errors

        red = 0
        for causal in (False, True):
            for normaliser, feature in MODES[:2] if self.dry else MODES:
                for dtype, limit in ((torch.bfloat16, 3e-2), (torch.float32, 2e-4)):
                    mode = {"normaliser": normaliser, "feature": feature, "causal": causal, "dtype": dtype}
                    cases = [Case(**mode, length=33, width=16, packed=True)]
                    if not self.dry:
                        cases = [
                            Case(**mode, length=197, width=64, packed=True, mean_v=0.5),
                            Case(**mode, length=1000, width=64, den=True, mask=True),
                            Case(**mode, length=2100, width=128, value_width=64, batch=1),
                            Case(**mode, batch=80, length=70, width=32, weights=True),
                        ]
                    for case in cases:
                        found = errors(linear_attention, case, self.device)
                        off = not max(found.values()) < limit
                        red += off
                        self.emit(what="check", red=off, case=repr(case), errors=found)
        return red

    def time(self, calls: dict[str, Callable[[], object]], budget_s: float = 0.3) -> dict[str, float]:
        """Median seconds of each call, in turns; 0 in a dry run."""
        from clip_linear_kernels.timing import interleave

        if self.dry:
            for call in calls.values():
                call()
            return dict.fromkeys(calls, 0.0)
        found = interleave(calls, budget_s=budget_s, rounds=3, device="cuda")
        return {name: t.median for name, t in found.items()}

    def shape(self, batch: int, length: int, heads: int, causal: bool) -> None:
        """One size: forward and backward of two modes beside SDPA, where that fits the time left."""
        import torch
        from torch.nn import functional as F

        from clip_linear_kernels import linear_attention
        from clip_linear_kernels.timing import peak_bytes

        if self.left_s() < 30:
            self.emit(what="skipped", N=length, causal=causal, why="out of time")
            return
        width = 16 if self.dry else 64
        dtype = torch.float32 if self.dry else torch.bfloat16
        qkv = torch.randn(batch, length, 3, heads, width, device=self.device, dtype=dtype).requires_grad_()
        q, k, v = (t.detach().requires_grad_() for t in qkv.permute(2, 0, 3, 1, 4).unbind(0))
        g = torch.randn(batch, length, heads, width, device=self.device, dtype=dtype).transpose(1, 2)
        modes = {"half": {"feature": "l2", "normaliser": "half"}, "mala": {"feature": "elu1", "normaliser": "mala"}}
        forward: dict[str, Callable[[], Any]] = {
            name: lambda mode=mode: linear_attention(q, k, v, causal=causal, **mode) for name, mode in modes.items()
        }
        flops = 4 * batch * heads * length**2 * width / (2 if causal else 1)
        estimate_s = flops / 300e12  # softmax on an H100-class GPU; a large part of the budget is never given to it
        if estimate_s < min(6, self.left_s() / 20):
            forward["sdpa"] = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        with torch.no_grad():
            ahead = self.time(forward)
            extra = None if self.dry else peak_bytes(forward["half"], "cuda")
        behind = {}
        for name, call in forward.items():
            if name == "sdpa" and estimate_s * 3 > min(6, self.left_s() / 20):
                continue
            out = call()
            back = self.time({name: lambda out=out: torch.autograd.grad(out, (q, k, v), g, retain_graph=True)})
            behind[name] = back[name]
            del out
        size = batch * heads * length * width * q.element_size()
        for name in forward:
            row: dict[str, Any] = {"forward_ms": ahead[name] * 1e3, "backward_ms": behind.get(name, 0.0) * 1e3}
            if name != "sdpa" and not self.dry:
                row["copy_share_forward"] = 4 * size / ahead[name] / self.bandwidth
                row["copy_share_backward"] = 7 * size / behind[name] / self.bandwidth
                row["extra_share"] = None if extra is None else (extra - size) / (4 * size)
                if "sdpa" in ahead:
                    row["sdpa_ratio_forward"] = ahead["sdpa"] / ahead[name]
                if "sdpa" in behind:
                    both = ahead["sdpa"] + behind["sdpa"]
                    row["sdpa_ratio_both"] = both / (ahead[name] + behind[name])
            self.emit(what="time", name=name, B=batch, N=length, H=heads, causal=causal, **row)

    def peers(self) -> None:
        """flash-linear-attention at two sizes, where it is installed."""
        import torch

        if self.dry:
            return
        try:
            from fla.ops.linear_attn import chunk_linear_attn
        except ImportError:
            self.emit(what="peers", fla="not installed")
            return
        from clip_linear_kernels import linear_attention

        for batch, length in ((16, 4096), (4, 16384)):
            q, k, v = (torch.rand(batch, length, 12, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
            times = self.time(
                {
                    "fla": lambda q=q, k=k, v=v: chunk_linear_attn(q, k, v, normalize=True),
                    "ours": lambda q=q, k=k, v=v: linear_attention(
                        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True
                    ),
                }
            )
            self.emit(what="peer", N=length, B=batch, ratio=times["fla"] / times["ours"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
