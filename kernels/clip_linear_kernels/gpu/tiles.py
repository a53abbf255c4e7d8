"""What all kernels share: products, feature maps with derivatives, coefficients; the Triton face of ``spec``.

Written to the common subset of Triton 3.6 to 3.8. The codes of features and normalisers are those of ``spec``.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

# Read once, as Triton itself does: whether kernels run in the interpreter on CPU tensors.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a @ b with float32 accumulation."""
    if _INTERPRETED:  # the interpreter multiplies the raw bits of bfloat16 operands
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    elif a.dtype == tl.float32:
        return tl.dot(a, b, input_precision=PRECISION)
    else:
        return tl.dot(a, b)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """x in ``dtype``, rounded to nearest even; the interpreter by itself truncates to bfloat16."""
    if _INTERPRETED and dtype == tl.bfloat16:
        x = x.to(tl.float32)
        bits = x.to(tl.int32, bitcast=True)
        x = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def load_rows(base, n, stride, keep, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows n of a [*, WIDTH] matrix whose last stride is 1, as [len(n), PADDED] in its own dtype; zeros outside."""
    f = tl.arange(0, PADDED)
    at = base + n.to(tl.int64)[:, None] * stride + f[None, :]
    if WIDTH == PADDED:
        return tl.load(at, mask=keep[:, None], other=0.0)
    else:
        return tl.load(at, mask=keep[:, None] & (f < WIDTH)[None, :], other=0.0)


@triton.jit
def store_rows(base, n, stride, keep, x, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """The inverse of load_rows; casts to the matrix's dtype."""
    f = tl.arange(0, PADDED)
    at = base + n.to(tl.int64)[:, None] * stride + f[None, :]
    if WIDTH == PADDED:
        tl.store(at, cast(x, base.dtype.element_ty), mask=keep[:, None])
    else:
        tl.store(at, cast(x, base.dtype.element_ty), mask=keep[:, None] & (f < WIDTH)[None, :])


@triton.jit
def feature(x, keep, CODE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """φ of float32 rows; zero in rows outside ``keep`` and in padded columns."""
    if CODE == 1:
        x = x * tl.rsqrt(tl.sum(x * x, axis=1) + 1e-12)[:, None]
    elif CODE == 2:
        x = tl.where(x > 0, x + 1.0, tl.exp(tl.minimum(x, 0.0)))
    elif CODE == 3:
        x = tl.maximum(x, 0.0)
    elif CODE == 4:
        x = tl.exp(x)
    elif CODE == 5:
        r = tl.maximum(x, 0.0) + 1e-6
        if WIDTH != PADDED:
            r = tl.where((tl.arange(0, PADDED) < WIDTH)[None, :], r, 0.0)
        cube = r * r * r
        x = cube * tl.sqrt(tl.sum(r * r, axis=1) / tl.sum(cube * cube, axis=1))[:, None]
    if CODE == 2 or CODE == 4 or CODE == 5:  # their value at a row or column of zeros is not zero
        x = tl.where(keep[:, None], x, 0.0)
        if WIDTH != PADDED:
            x = tl.where((tl.arange(0, PADDED) < WIDTH)[None, :], x, 0.0)
    return x


@triton.jit
def feature_vjp(x, g, CODE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """gᵀ ∂φ/∂x of float32 rows."""
    if CODE == 1:
        r = tl.rsqrt(tl.sum(x * x, axis=1) + 1e-12)[:, None]
        y = x * r
        g = (g - y * tl.sum(y * g, axis=1)[:, None]) * r
    elif CODE == 2:
        g = g * tl.where(x > 0, 1.0, tl.exp(tl.minimum(x, 0.0)))
    elif CODE == 3:
        g = tl.where(x > 0, g, 0.0)
    elif CODE == 4:
        g = g * tl.exp(x)
    elif CODE == 5:
        r = tl.maximum(x, 0.0) + 1e-6
        if WIDTH != PADDED:
            r = tl.where((tl.arange(0, PADDED) < WIDTH)[None, :], r, 0.0)
        cube = r * r * r
        m = tl.sqrt(tl.sum(r * r, axis=1))[:, None]
        c = tl.sqrt(tl.sum(cube * cube, axis=1))[:, None]
        along = tl.sum(g * cube, axis=1)[:, None] / (c * c)
        d = 3.0 * r * r * (m / c) * (g - cube * along) + r * (along * c / m)
        g = tl.where(x > 0, d, 0.0)
    return g


@triton.jit
def coefficients(d, n, scale, eps, CODE: tl.constexpr):
    """a(d, n) and b(d, n)."""
    zero = d * 0.0
    if CODE == 0:
        return 1.0 / (d + n * eps), zero
    elif CODE == 1:
        return 1.0 / (d + eps), zero
    elif CODE == 2:
        return 1.0 / (n + d), 1.0 / (n + d)
    elif CODE == 3:
        return zero + 0.5, zero + 0.5
    elif CODE == 4:
        return zero + 0.5 / n, zero + 0.5 / n
    elif CODE == 5:
        c = scale / n
        z = c * d
        return c * (1.0 + 1.0 / (z + eps)), -z / n
    elif CODE == 6:
        return zero + scale / n, (1.0 - scale * d / n) / n
    else:
        return zero + 1.0, zero


@triton.jit
def coefficients_by_d(d, n, scale, eps, CODE: tl.constexpr):
    """∂a/∂d and ∂b/∂d."""
    zero = d * 0.0
    if CODE == 0:
        r = 1.0 / (d + n * eps)
        return -r * r, zero
    elif CODE == 1:
        r = 1.0 / (d + eps)
        return -r * r, zero
    elif CODE == 2:
        r = 1.0 / (n + d)
        return -r * r, -r * r
    elif CODE == 5:
        c = scale / n
        r = c / (c * d + eps)
        return -r * r, zero - c / n
    elif CODE == 6:
        return zero, zero - scale / (n * n)
    else:
        return zero, zero


@triton.jit
def coefficients_by_n(d, n, scale, eps, CODE: tl.constexpr):
    """∂a/∂n and ∂b/∂n."""
    zero = d * 0.0
    if CODE == 0:
        r = 1.0 / (d + n * eps)
        return -eps * r * r, zero
    elif CODE == 2:
        r = 1.0 / (n + d)
        return -r * r, -r * r
    elif CODE == 4:
        return zero - 0.5 / (n * n), zero - 0.5 / (n * n)
    elif CODE == 5:
        c = scale / n
        z = c * d
        r = 1.0 / (z + eps)
        return -c / n * (1.0 + r - z * r * r), 2.0 * z / (n * n)
    elif CODE == 6:
        return zero - scale / (n * n), (2.0 * scale * d / n - 1.0) / (n * n)
    else:
        return zero, zero
