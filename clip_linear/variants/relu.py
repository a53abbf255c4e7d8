"""Linear attention with φ = ReLU."""

from __future__ import annotations

from torch import Tensor

from clip_linear.attention import Variant, rotate
from clip_linear.registry import VariantInfo
from clip_linear_kernels import linear_attention


class Relu(Variant):
    """o_i = φ(q_i) Σ_j φ(k_j)ᵀ v_j / (φ(q_i)·Σ_j φ(k_j) + n ε) with φ = ReLU and ε = 1e-6 beside the mean.

    The form of Katharopoulos et al. 2020, arXiv 2006.16236, with another φ. A token whose q is all negative sees
    nothing: its output and gradient are 0. ``enhanced`` is the same with ε beside the sum.
    """

    info = VariantInfo(
        name="relu",
        equation="oᵢ = φ(qᵢ)·Σⱼφ(kⱼ)ᵀvⱼ / φ(qᵢ)·Σⱼφ(kⱼ), φ = ReLU",
        source="Katharopoulos et al. 2020, arXiv 2006.16236, with φ = ReLU",
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
            feature="relu",
            normaliser="mean",
            causal=causal,
            key_mask=key_mask,
        )
