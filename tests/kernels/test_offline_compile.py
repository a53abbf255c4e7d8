"""Every entry of the config table compiles, without spills, for GPUs that are not here. Triton caches the results."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("triton", reason="Triton is not installed; pip install triton")

_COMPILE = """
import dataclasses, json, sys
from clip_linear_kernels.gpu import offline
part, parts = int(sys.argv[1]), int(sys.argv[2])
for entry in list(offline.entries())[part::parts]:
    needs = dataclasses.asdict(offline.needs(offline.compile_entry(entry)))
    print(json.dumps({"name": str(entry), "arch": entry.arch, "block": entry.config.block, **needs}), flush=True)
"""
_AMD = """
import re
from clip_linear_kernels.gpu import configs, offline
for kernel in ("state_forward", "apply_forward", "causal_forward"):
    entry = offline.Entry(kernel, "gfx942", 64, 64, configs.lookup(kernel, 0, 64, 64))
    code = offline.compile_entry(entry).asm["amdgcn"]
    print(kernel, re.search(r"\\.vgpr_spill_count:\\s+(\\d+)", code)[1], "v_mfma" in code)
"""


def _run(code, *args):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", code, *args], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


def _have_tools():
    from clip_linear_kernels.gpu import offline

    return all((offline.tools() / tool).exists() for tool in ("ptxas", "cuobjdump"))


@pytest.mark.slow
@pytest.mark.skipif(not _have_tools(), reason="this Triton has no ptxas and cuobjdump; install its Linux x86 wheel")
@pytest.mark.timeout(1200)
def test_the_config_table_compiles_without_spills():
    with ThreadPoolExecutor(2) as pool:
        out = "".join(pool.map(lambda part: _run(_COMPILE, str(part), "2"), range(2)))
    rows = [json.loads(line) for line in out.splitlines()]
    assert 40 <= len(rows) <= 60
    for row in rows:
        assert row["stack_bytes"] == 0, row
        assert row["spills"] == 0, row
        assert row["shared_bytes"] <= 100 * 1024, row
        if row["arch"] == "sm_90" and row["block"] >= 64:
            assert row["wgmma"] > 0, row
        assert row["wgmma"] + row["mma"] > 0, row


@pytest.mark.slow
def test_amd_compiles():
    lines = _run(_AMD).splitlines()
    assert len(lines) == 3
    assert all(line.endswith(" 0 True") for line in lines), lines
