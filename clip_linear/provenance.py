"""Where a number comes from: versions, device, commit and date, as env.json and result rows record them."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

_PACKAGES = (
    "clip-linear",
    "torch",
    "torchvision",
    "open_clip_torch",
    "timm",
    "webdataset",
    "numpy",
    "scipy",
    "triton",
    "submitit",
)


@functools.cache
def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide numbers; absent packages are left out."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def versions_text() -> str:
    """The versions as one cell of a row: ``torch 2.14.1; open_clip_torch 3.3.0; …``."""
    return "; ".join(f"{name} {version}" for name, version in versions().items())


@functools.cache
def commit() -> str:
    """Commit of the source tree this package runs from, with ``+dirty`` when files changed; empty when installed."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return ""

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *args], capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+dirty" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def date() -> str:
    """Now, in UTC, to the second (ISO 8601)."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


@functools.cache
def cpu_name() -> str:
    """The processor's name and the number of cores this process may use."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return f"{name} ({available_cores()} cores)"


def available_cores() -> int:
    """Cores this process may run on (its affinity mask, not the machine's count)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment() -> dict[str, Any]:
    """All of it, for env.json."""
    return {
        "date": date(),
        "commit": commit(),
        "versions": versions(),
        "cpu": cpu_name(),
        "platform": platform.platform(),
    }
