"""Linear attention with φ = ELU + 1."""

from __future__ import annotations

from torch import Tensor

from clip_linear.attention import Variant, rotate
from clip_linear.registry import VariantInfo
from clip_linear_kernels import linear_attention


class Elu(Variant):
    """o_i = φ(q_i) Σ_j φ(k_j)ᵀ v_j / (φ(q_i)·Σ_j φ(k_j) + n ε) with φ(x) = ELU(x) + 1.

    Katharopoulos et al. 2020, "Transformers are RNNs", arXiv 2006.16236, eq. 5 and 7; causal by prefix sums (eq. 8–10).
    ε = 1e-6 stands beside the mean over the n keys, so that it does not depend on their number.
    """

    info = VariantInfo(
        name="elu",
        equation="oᵢ = φ(qᵢ)·Σⱼφ(kⱼ)ᵀvⱼ / φ(qᵢ)·Σⱼφ(kⱼ), φ = ELU + 1",
        source="Katharopoulos et al. 2020, arXiv 2006.16236",
        title="Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention",
        bibtex="@inproceedings{katharopoulos2020transformers, title={Transformers are {RNN}s: Fast Autoregressive "
        "Transformers with Linear Attention}, author={Katharopoulos, Angelos and Vyas, Apoorv and Pappas, Nikolaos and "
        "Fleuret, Fran{\\c{c}}ois}, booktitle={ICML}, year={2020}, eprint={2006.16236}, archivePrefix={arXiv}}",
        causal_source="paper",
        state_per_head="D·E + D",
    )

    @staticmethod
    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Shapes of Variant.attention."""
        return linear_attention(
            rotate(q, rope),
            rotate(k, rope),
            v,
            feature="elu1",
            normaliser="mean",
            causal=causal,
            key_mask=key_mask,
        )
