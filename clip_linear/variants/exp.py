"""Linear attention with φ = exp."""

from __future__ import annotations

from torch import Tensor

from clip_linear.attention import Variant, rotate, wide
from clip_linear.features import cancel_maxima, smallest
from clip_linear.registry import VariantInfo
from clip_linear_kernels import linear_attention

EPS = 1e-6  # beside the mean, as in the other plain forms


class Exp(Variant):
    """o_i = φ(q_i) Σ_j φ(k_j)ᵀ v_j / (φ(q_i)·Σ_j φ(k_j) + n ε) with φ(x) = exp(x) for each channel, ε = 1e-6.

    The form of Katharopoulos et al. 2020, arXiv 2006.16236, with another φ. Exponents are shifted so that nothing
    overflows; the shifts cancel, also in ε. Causal: a shift by the maximum over all keys cancels too, but keys that lie
    more than about 80 below a later one are lost to float32 underflow.
    """

    info = VariantInfo(
        name="exp",
        equation="oᵢ = φ(qᵢ)·Σⱼφ(kⱼ)ᵀvⱼ / φ(qᵢ)·Σⱼφ(kⱼ), φ = exp",
        source="Katharopoulos et al. 2020, arXiv 2006.16236, with φ = exp",
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
        q, k, shift = cancel_maxima(wide(rotate(q, rope)), wide(rotate(k, rope)), key_mask)
        eps = EPS * (-shift).clamp(max=60).exp()  # above 60 the output is 0 either way, and ε² must stay finite
        return linear_attention(
            q,
            k,
            v,
            feature="exp",
            normaliser="mean",
            causal=causal,
            key_mask=key_mask,
            eps=eps.clamp(min=smallest(q)),
        )
