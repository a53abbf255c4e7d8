"""Compile the C++ kernel once per source, compiler and machine type; never at import, never twice.

The library has no OpenMP of its own: its symbols are resolved by the runtime that torch has loaded, so that there is
one pool of threads in the process. Instruction sets are chosen when it runs: a cache on a shared home serves all nodes.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = ("kernel.cpp", "problem.h", "body.h", "steps.h", "causal.h")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-Wno-psabi")
BUILD_TIMEOUT_S = 600


@dataclass(frozen=True, kw_only=True)
class Build:
    """How the kernel came to be, or why it did not."""

    library: ctypes.CDLL | None
    state: str  # one line for the doctor
    isa: str = ""


def cache_folder() -> Path:
    """CLIP_LINEAR_CACHE, or clip_linear in the user's cache folder."""
    base = os.environ.get("CLIP_LINEAR_CACHE")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clip_linear"


def compiler() -> str | None:
    """CXX, or the first C++ compiler found."""
    wanted = os.environ.get("CXX")
    return shutil.which(wanted) if wanted else next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


@functools.cache
def kernel() -> Build:
    """The loaded kernel; compiles it if this source has not been compiled here before. Says once why it is missing."""
    try:
        build = _kernel()
    except (OSError, subprocess.SubprocessError) as error:
        text = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        build = Build(library=None, state=f"not built: {text[0] if text else type(error).__name__}")
    if build.library is None:
        logger.warning("clip_linear: the CPU kernel is %s; torch operators take its place, more slowly", build.state)
    return build


def _kernel() -> Build:
    cxx = compiler()
    if cxx is None:
        return Build(library=None, state="not built: no C++ compiler; install g++ (or set CXX) to have it")
    path = _path(cxx)
    state = f"cached in {path}"
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
            os.close(handle)
        except OSError as error:
            reason = f"{path.parent} cannot be written ({error.strerror}); set CLIP_LINEAR_CACHE to a folder that can"
            return Build(library=None, state=f"not built: {reason}")
        logger.info("clip_linear: compiling the CPU kernel, once (%s)", path)
        start = time.monotonic()
        try:
            _compile(cxx, Path(name))
            os.replace(name, path)  # whoever builds at the same time writes the same bytes
        finally:
            Path(name).unlink(missing_ok=True)
        state = f"built in {time.monotonic() - start:.0f} s, {path}"
    library = ctypes.CDLL(str(path))
    library.clip_linear_isa.restype = ctypes.c_char_p
    library.clip_linear_isa.argtypes = [ctypes.c_int64]
    library.clip_linear_attention.restype = ctypes.c_int
    library.clip_linear_attention.argtypes = [ctypes.c_void_p]
    return Build(library=library, state=state, isa=library.clip_linear_isa(0).decode())


def _path(cxx: str) -> Path:
    version = subprocess.run([cxx, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    digest = hashlib.sha256(repr((version, platform.machine(), platform.libc_ver(), FLAGS)).encode())
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return cache_folder() / f"attention-{platform.machine()}-{digest.hexdigest()[:16]}.so"


def _compile(cxx: str, target: Path) -> None:
    source = Path(__file__).parent / "kernel.cpp"
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = str(Path(folder) / "kernel.o")
        compiling = [f for f in FLAGS if f != "-shared"]
        for command in (
            [cxx, *compiling, "-c", str(source), "-o", objects],
            [cxx, "-shared", objects, "-o", str(target)],  # without -fopenmp: torch's runtime, not another
        ):
            subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=True)
    os.chmod(target, 0o755)
