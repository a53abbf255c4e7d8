"""Linear in memory: forward and backward over 16,384 tokens, causal and not, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from clip_linear import list_variants

if not Path("/proc/self/status").exists():
    pytest.skip("needs Linux's /proc to read a process's peak memory", allow_module_level=True)

CODE = """
import sys, torch
from clip_linear.functional import attention
torch.set_num_threads(1)
variant, N, H = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for causal in (False, True):
    q, k, v = (torch.randn(1, H, N, 64, requires_grad=True) for _ in range(3))
    attention(variant, q, k, v, causal=causal).sum().backward()
    assert q.grad.isfinite().all()
    del q, k, v
# Not getrusage: its maximum survives exec, so that it would be the peak of the process that started this one.
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) / 1e6)
"""


def peak_gb(*args):
    done = subprocess.run([sys.executable, "-c", CODE, *map(str, args)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return float(done.stdout)


def test_a_variant_with_large_features_stays_below_1_2_gb():
    assert peak_gb("pola", 16384, 6) < 1.2  # of which 0.5 GB is torch itself


@pytest.mark.slow
@pytest.mark.parametrize("variant", [v for v in list_variants() if v != "pola"])
def test_sixteen_thousand_tokens_stay_below_1_2_gb(variant):
    assert peak_gb(variant, 16384, 6) < 1.2


@pytest.mark.slow
def test_a_hundred_thousand_tokens():
    assert peak_gb("mala", 100_000, 1) < 1.5  # an N×N matrix would take 40 GB
