"""Shifted windows against a pairwise computation in the image's own coordinates."""

import pytest
import torch

from clip_linear.attention import Tokens
from clip_linear.backbones.swin import Block, WindowSoftmax


def pairwise(attn, x, size, window, shift):
    """What each token of an image [B, H·W, C] gets: softmax over its window, with the bias of every offset, −100 for
    tokens that were not neighbours before the roll."""
    H, W = size
    B, _, C = x.shape
    heads, D = attn.num_heads, C // attn.num_heads
    q, k, v = (t.view(B, -1, heads, D).transpose(1, 2) for t in attn.qkv(x).chunk(3, -1))
    table = attn.bias_table.view(2 * window - 1, 2 * window - 1, heads)
    scores = q @ k.mT / D**0.5
    for i in range(H * W):
        for j in range(H * W):
            together, neighbours, offset = True, True, []
            for a, b, side in ((i // W, j // W, H), (i % W, j % W, W)):
                ra, rb = (a - shift) % side, (b - shift) % side  # where the roll puts them
                together &= ra // window == rb // window
                neighbours &= (a < shift) == (b < shift)
                offset.append(ra % window - rb % window + window - 1)
            bias = table[offset[0], offset[1]] - (0 if neighbours else 100) if together else -torch.inf
            scores[:, :, i, j] += bias
    return attn.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("size", [(6, 6), (6, 9)])
@pytest.mark.parametrize("shift", [0, 1])
def test_windows_of_softmax(size, shift):
    torch.manual_seed(0)
    window = 3
    attn = WindowSoftmax(8, 2, window).double()
    attn.bias_table.data.normal_()
    block = Block(attn, 8, 16, window, shift, 0.0).double()
    x = torch.randn(2, size[0] * size[1], 8, dtype=torch.float64)
    want = x + pairwise(attn, block.norm1(x), size, window, shift)
    want = want + block.mlp(block.norm2(want), Tokens(grid=size))
    torch.testing.assert_close(block(x, Tokens(grid=size)), want, rtol=0, atol=1e-12)
