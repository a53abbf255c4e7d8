"""Performer: positive orthogonal random features."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from clip_linear.attention import Site, Tokens, Variant, rotate, wide
from clip_linear.blocks import by_blocks
from clip_linear.features import cancel_maxima, smallest
from clip_linear.registry import VariantInfo
from clip_linear_kernels import linear_attention

FEATURES_PER_CHANNEL = 2  # half of the paper's 256 at head_dim 64: the state and the features are as large as NaLa's


class Performer(Variant):
    """o_i = φ(q_i) Σ_j φ(k_j)ᵀ v_j / φ(q_i)·Σ_j φ(k_j), φ(x) = exp(ω x D^-¼ − ‖x‖²/(2√D)) / √m.

    Choromanski et al. 2020, "Rethinking Attention with Performers", arXiv 2009.14794, eq. 5 and section 3.2 (FAVOR+):
    an estimate of softmax attention. ω [m, D] is drawn once (blocks of orthogonal rows with the lengths of Gaussian
    vectors, m = 2 D), is a buffer of the checkpoint and is never drawn anew. √m cancels and is left out. Exponents are
    shifted so that nothing overflows; the shifts cancel. Without ``omega`` the features of one fixed seed are taken.
    """

    info = VariantInfo(
        name="performer",
        equation="oᵢ = φ(qᵢ)·Σⱼφ(kⱼ)ᵀvⱼ / φ(qᵢ)·Σⱼφ(kⱼ), φ(x) = exp(ωx/D^¼ − ‖x‖²/2√D), ω random",
        source="Choromanski et al. 2020, arXiv 2009.14794",
        title="Rethinking Attention with Performers",
        bibtex="@inproceedings{choromanski2021performers, title={Rethinking Attention with Performers}, "
        "author={Choromanski, Krzysztof and Likhosherstov, Valerii and Dohan, David and Song, Xingyou and Gane, "
        "Andreea and Sarlos, Tamas and Hawkins, Peter and Davis, Jared and Mohiuddin, Afroz and Kaiser, Lukasz "
        "and Belanger, David and Colwell, Lucy and Weller, Adrian}, booktitle={ICLR}, year={2021}, "
        "eprint={2009.14794}, archivePrefix={arXiv}}",
        causal_source="paper",
        state_per_head="2·D·E + 2·D",
        streams=(("2·D", "E"),),
        feature_macs="4·N·D²",
        options={"omega": "[m, D]: the random directions"},
    )

    def __init__(self, site: Site, **options: Any) -> None:
        super().__init__(site, **options)
        seed = int(torch.randint(2**31, (), device="cpu"))
        self.register_buffer("omega", orthogonal(FEATURES_PER_CHANNEL * site.head_dim, site.head_dim, seed).clone())

    @staticmethod
    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        omega: Tensor | None = None,
    ) -> Tensor:
        """Shapes of Variant.attention."""
        D = q.shape[-1]
        omega = orthogonal(FEATURES_PER_CHANNEL * D, D, 0) if omega is None else omega

        def exponents(x: Tensor) -> Tensor:
            x = wide(x) * D**-0.25
            return x @ omega.to(x).mT - 0.5 * x.square().sum(-1, keepdim=True)

        def core(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
            mask = None if keep is None else keep[:, 0, :, 0]
            q, k, _ = cancel_maxima(exponents(q), exponents(k), mask)
            return linear_attention(
                q, k, v, feature="exp", normaliser="mean", causal=causal, key_mask=mask, eps=smallest(q)
            )

        keep = None if key_mask is None else key_mask[:, None, :, None]
        return by_blocks(core, rotate(q, rope), rotate(k, rope), v, keep)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, rope: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """The equation with this module's directions."""
        own = {"omega": self.omega, **self.options}
        return self.attention(q, k, v, causal=tokens.causal, key_mask=tokens.key_mask, rope=rope, **own)


@functools.lru_cache(maxsize=8)
def orthogonal(features: int, width: int, seed: int) -> Tensor:
    """[features, width] float32: blocks of orthogonal rows, each as long as a Gaussian vector of its own."""
    generator = torch.Generator().manual_seed(seed)
    blocks = []
    for start in range(0, features, width):
        q, _ = torch.linalg.qr(torch.randn(width, width, generator=generator, device="cpu"))
        blocks.append(q.mT[: min(width, features - start)])
    lengths = torch.randn(features, width, generator=generator, device="cpu").norm(dim=-1, keepdim=True)
    return torch.cat(blocks) * lengths
