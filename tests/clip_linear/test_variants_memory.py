"""Linear in memory: a forward and backward pass over 16,384 tokens in a process of its own."""

import subprocess
import sys

import pytest

from clip_linear import list_variants

CODE = """
import resource, sys, torch
from clip_linear.functional import attention
torch.set_num_threads(1)
variant, causal, N, H = sys.argv[1], sys.argv[2] == "True", int(sys.argv[3]), int(sys.argv[4])
q, k, v = (torch.randn(1, H, N, 64, requires_grad=True) for _ in range(3))
attention(variant, q, k, v, causal=causal).sum().backward()
assert q.grad.isfinite().all()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)
"""


def peak_gb(*args):
    done = subprocess.run([sys.executable, "-c", CODE, *map(str, args)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return float(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("variant", list_variants())
def test_sixteen_thousand_tokens_stay_below_1_2_gb(variant, causal):
    assert peak_gb(variant, causal, 16384, 6) < 1.2


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_a_hundred_thousand_tokens(causal):
    assert peak_gb("mala", causal, 100_000, 1) < 1.5  # an N×N matrix would take 40 GB
