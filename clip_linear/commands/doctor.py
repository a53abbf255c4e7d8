"""``clip-linear doctor``: versions, devices, and which backend serves attention here, and why."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from clip_linear.flags import Parser


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``clip-linear doctor``."""
    parser = Parser(
        prog="clip-linear doctor",
        description="Versions, devices, the attention backend of each device and dtype with its reason, and the state "
        "of the CPU kernel, which is built now if it has not been.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: list[str]) -> int:
    """Print what was found; 0 when attention is right on every device that is here, 1 otherwise."""
    args = build_parser().parse_args(argv)
    found = examine()
    if args.json:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        sys.stdout.write(_text(found))
    return 0 if all(c["right"] for c in found["chosen"]) else 1


def examine() -> dict[str, Any]:
    """All of it as data: versions, devices, backends, cpu_kernel, chosen."""
    import torch

    from clip_linear.provenance import available_cores, cpu_name, versions
    from clip_linear_kernels.cpu.build import cache_folder, compiler, kernel
    from clip_linear_kernels.dispatch import BACKENDS, available_backends, forced

    devices = [cpu_name()]
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        devices.append(f"cuda:{i} {torch.cuda.get_device_name(i)} (sm_{major}{minor})")
    states = available_backends()
    build = kernel()
    return {
        "versions": versions(),
        "devices": devices,
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
        "asked_for": forced(),
        "backends": {name: {"what": BACKENDS[name], "state": states[name]} for name in BACKENDS},
        "cpu_kernel": {
            "state": build.state,
            "instruction_set": build.isa,
            "compiler": compiler(),
            "cache": str(cache_folder()),
        },
        "chosen": list(_choices()),
    }


def _choices() -> Any:
    import torch

    from clip_linear_kernels import linear_attention
    from clip_linear_kernels.call import Form, Inputs
    from clip_linear_kernels.dispatch import choose, whole_form
    from clip_linear_kernels.testing import Case, errors

    limits = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float64: 1e-10}
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        for dtype, limit in limits.items():
            case = Case(length=197, width=64, normaliser="mala", dtype=dtype)
            t, _, _ = case.tensors(device)
            name, _, why = choose(Inputs(t["q"], t["k"], t["v"]), Form("elu1", "mala", False, 0.125, 1e-6))
            if whole_form() is not None:
                name, why = str(whole_form()), "asked for"
            worst = max(errors(linear_attention, case, device).values())
            yield {
                "device": device,
                "dtype": str(dtype).removeprefix("torch."),
                "backend": name,
                "why": why,
                "worst_error": worst,
                "right": worst < limit,
            }


def _text(found: dict[str, Any]) -> str:
    lines = ["versions    " + ", ".join(f"{name} {version}" for name, version in found["versions"].items())]
    lines += [("devices     " if i == 0 else "            ") + name for i, name in enumerate(found["devices"])]
    lines.append(f"threads     {found['threads']} of {found['cores']} cores")
    asked = found["asked_for"] or "nothing: the package chooses"
    lines.append(f"asked for   {asked} (CLIP_LINEAR_BACKEND)\n")
    lines += [f"{name:<11} {b['state']}\n{'':<11} {b['what']}" for name, b in found["backends"].items()]
    kernel = found["cpu_kernel"]
    lines.append(f"\nCPU kernel  {kernel['instruction_set'] or 'none'}; {kernel['state']}")
    lines.append(f"            compiler {kernel['compiler'] or 'none'}, cache {kernel['cache']}\n")
    for c in found["chosen"]:
        verdict = "right" if c["right"] else "WRONG"
        error = f"{verdict}, largest error {c['worst_error']:.1e}"
        lines.append(f"{c['device']:<5} {c['dtype']:<9} {c['backend']:<10} {error} ({c['why']})")
    return "\n".join(lines) + "\n"
