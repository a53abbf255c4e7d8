"""Compile kernels for a GPU that is not here, and read what they would need: registers, stack, spills, shared memory.

Needs Triton with its ptxas (Linux wheels have it) and TRITON_INTERPRET unset.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clip_linear_kernels.gpu import configs
from clip_linear_kernels.spec import FEATURES, NORMALISERS

_FLOAT32_POINTERS = {"ST", "DST", "SC", "RT", "DW", "W", "EPS"}
_POINTERS = {"Q", "K", "V", "QD", "KD", "OUT", "DO", "DQ", "DK", "DV", "DQD", "DKD"} | _FLOAT32_POINTERS
# The heaviest mode that variants use.
_MODE = {"PHI": FEATURES["elu1"].code, "NORM": NORMALISERS["mala"].code}
_FLAGS = {"HAS_W": False, "HAS_DEN": False, "HAS_EPS": False, "HAS_STATE": True, "KEEP": True}
_FLAGS |= {"NEEDS_DW": False, "DO_K": True, "DO_V": True}


@dataclass(frozen=True)
class Entry:
    """One kernel at one width for one architecture ("sm_90", "sm_80", "gfx942")."""

    kernel: str
    arch: str
    F: int
    E: int
    config: configs.Config
    flags: tuple[str, ...] = ()
    dtype: str = "bf16"

    def __str__(self) -> str:
        more = "-".join(["", *self.flags])
        block, warps, stages = self.config
        return f"{self.kernel}-{self.arch}-F{self.F}-E{self.E}{more}-b{block}-w{warps}-s{stages}-{self.dtype}"


def entries() -> Iterator[Entry]:
    """The config table: every kernel at F = E = 64, F = 128 with E = 64, and 128; own denominators at 64."""
    for generation, table in configs.TABLES.items():
        arch = f"sm_{generation}"
        for kernel in (name for name in table if not name.endswith("_den")):
            for F, E in ((64, 64), (128, 64), (128, 128)):
                for den in (False, True) if F == 64 and kernel not in ("state_forward", "apply_forward") else (False,):
                    E_used = min(E, configs.value_slice(generation, F, "causal" in kernel, den))
                    config = configs.lookup(kernel, generation, F, E_used, den)
                    if config is None or ("causal" in kernel and E == 128):
                        continue
                    flags = ("HAS_DEN",) if den else ()
                    if kernel != "causal_backward_kv":
                        yield Entry(kernel, arch, F, E_used, config, flags)
                        continue
                    for do_k, do_v in configs.kv_passes(generation, F):
                        off = () if do_k and do_v else ("NO_DO_V",) if do_k else ("NO_DO_K",)
                        yield Entry(kernel, arch, F, E_used, config, (*flags, *off))


def compile_entry(entry: Entry) -> Any:
    """The compiled kernel of Triton; raises what Triton raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = _kernel(entry.kernel)
    names = function.arg_names
    known: dict[str, Any] = _MODE | _FLAGS | {f.removeprefix("NO_"): not f.startswith("NO_") for f in entry.flags}
    known |= {"F": entry.F, "FP": entry.F, "E": entry.E, "EP": entry.E, "PRECISION": "tf32x3"}
    known |= {"BN": entry.config.block, "C": entry.config.block}
    constants = {name: known[name] for name in names if name in known}
    types = {name: "constexpr" if name in constants else _type(name, entry.dtype) for name in names}
    # As the JIT would specialise them: without it loads do not vectorise.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name in _POINTERS or re.match("s[a-z]+_", name)
    }
    source = ASTSource(
        fn=function, signature=types, constexprs={(names.index(n),): v for n, v in constants.items()}, attrs=aligned
    )
    target = GPUTarget("hip", "gfx942", 64) if entry.arch == "gfx942" else GPUTarget("cuda", int(entry.arch[3:]), 32)
    options = {"num_warps": entry.config.warps, "num_stages": entry.config.stages}
    return triton.compile(source, target=target, options=options)


def _kernel(name: str) -> Any:
    from clip_linear_kernels.gpu import backward, causal_backward, causal_forward, forward

    for module in (forward, backward, causal_forward, causal_backward):
        if hasattr(module, name) and getattr(module, name).__module__ == module.__name__:
            return getattr(module, name)
    raise KeyError(name)


def _type(name: str, dtype: str) -> str:
    if name in _POINTERS:
        return "*fp32" if name in _FLOAT32_POINTERS else f"*{dtype}"
    return "fp32" if name in ("scale", "eps") else "i32"


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a compiled CUDA kernel needs a thread (registers, stack bytes) and a program (shared bytes)."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    spills: int  # local loads and stores
    wgmma: int
    mma: int


def needs(compiled: Any) -> Needs:
    """Read the cubin with the tools that Triton's wheel brings."""
    tool = tools() / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage

    def count(pattern: str) -> int:
        return len(re.findall(pattern, code))

    return Needs(
        registers=int(found[1]),
        stack_bytes=int(found[2]),
        shared_bytes=compiled.metadata.shared,
        spills=count(r"\b(?:LDL|STL)"),
        wgmma=count(r"\bHGMMA"),
        mma=count(r"\bHMMA"),
    )


def tools() -> Path:
    """The folder of ptxas and cuobjdump; it need not exist."""
    import triton

    return Path(os.path.dirname(triton.__file__)) / "backends" / "nvidia" / "bin"
