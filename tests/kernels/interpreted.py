"""Not a test: run by test_triton.py in a process of its own, as Triton reads TRITON_INTERPRET when it is imported.

Prints a JSON line per case: its name, the backend that served it, and the largest errors against the reference.
"""

import json
import sys

import torch

from clip_linear_kernels import dispatch, linear_attention
from clip_linear_kernels.gpu import configs
from clip_linear_kernels.testing import MODES, Case, errors


def _cases():
    base = Case(batch=1, width=16)
    for causal in (False, True):
        for i, (normaliser, feature) in enumerate(MODES):
            mode = {"normaliser": normaliser, "feature": feature, "causal": causal, "batch": 1, "width": 16}
            yield "mode", Case(**mode, length=(33, 31, 50)[i % 3], packed=True)
        mode = {"normaliser": "mala", "causal": causal, "batch": 1, "width": 16}
        for length in (1, 2, 197):
            yield "length", Case(**mode, length=length, heads=1)
        yield "mask", Case(**mode, length=40, mask=True, den=True)
        affine = {**mode, "normaliser": "affine", "feature": "l2"}
        yield "mask", Case(**affine, length=40, mask=True)
        yield "weights", Case(**mode, length=40, weights=True, mask=True)
        yield "row_eps", Case(batch=1, width=16, causal=causal, length=33, row_eps=True)
        yield "odd widths", Case(batch=1, width=24, value_width=40, causal=causal, length=33, normaliser="affine")
        yield "wide", Case(batch=1, heads=1, width=32, value_width=80, causal=causal, length=33)
        for dtype in (torch.bfloat16, torch.float16):
            yield "half", Case(**mode, length=33, dtype=dtype, packed=True)
            yield (
                "half",
                Case(batch=1, width=16, causal=causal, length=33, dtype=dtype, feature="l2", normaliser="half"),
            )
        yield "mean of v", Case(**mode, length=60, dtype=torch.float16, mean_v=4.0)
    yield "cross", Case(batch=1, width=base.width, length=20, keys=45)
    yield "fused", Case(batch=2, width=16, length=33, normaliser="mala")
    yield "fused", Case(batch=2, width=16, length=33, keys=20, mask=True, den=True)


def main() -> None:
    torch.set_num_threads(1)
    for kind, case in _cases():
        configs.FUSED_ROWS = 1 if kind == "fused" else 1000
        names = []
        choose = dispatch.choose

        def seen(x, form, choose=choose, names=names):
            names.append(choose(x, form)[0])
            return choose(x, form)

        dispatch.choose = seen
        found = errors(linear_attention, case)
        dispatch.choose = choose
        row = {"kind": kind, "case": repr(case), "dtype": str(case.dtype), "backend": names[0], "errors": found}
        sys.stdout.write(json.dumps(row) + "\n")


main()
