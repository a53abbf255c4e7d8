"""Magnitude-aware linear attention."""

from __future__ import annotations

from torch import Tensor

from clip_linear.attention import Dress, Variant, rotate, wide
from clip_linear.errors import unknown
from clip_linear.features import smallest, visible_count
from clip_linear.registry import VariantInfo
from clip_linear_kernels import linear_attention
from clip_linear_kernels.spec import elu1

EPS = 1e-6
FORMS = ("code", "paper")


class Mala(Variant):
    """o_i = β_i c φ(q_i) Σ_j φ(k_j)ᵀ v_j − γ_i Σ_j v_j, z_i = c φ(q_i)·Σ_j φ(k_j), β_i = 1 + 1/(z_i + ε), γ_i = z_i/n.

    φ = ELU + 1, c = D^-½ / n. Fan et al. 2025, "Rectifying Magnitude Neglect in Linear Attention", arXiv 2507.00698.
    The released code has the factor c that the paper's formula lacks (unscaled, weights are about a thousand times
    larger); the code is the default here. Rotary embeddings rotate φ(q) and φ(k) in the sum over v only, never in z, so
    that with them the weights no longer add up to 1. Negative weights are normal. ε = 1e-6 stands where the code has
    it. The causal form (ours) takes n, and with it c, as the number of keys seen so far. ``form="paper"`` is the
    paper's formula as it stands, c = 1 and ε = 0.
    """

    info = VariantInfo(
        name="mala",
        equation="oᵢ = βᵢ φ(qᵢ)·Σⱼφ(kⱼ)ᵀvⱼ − γᵢ Σⱼvⱼ, βᵢ = 1 + 1/zᵢ, γᵢ = zᵢ/N",
        source="Fan et al. 2025, arXiv 2507.00698",
        title="Rectifying Magnitude Neglect in Linear Attention",
        causal_source="derived",
        bibtex="@inproceedings{fan2025mala, title={Rectifying Magnitude Neglect in Linear Attention}, author={Fan, "
        "Qihang and Huang, Huaibo and Ai, Yuang and He, Ran}, booktitle={ICCV}, year={2025}, eprint={2507.00698}, "
        "archivePrefix={arXiv}}",
        state_per_head="D·E + D + E",
        options={"form": '"code" (default) or "paper": without the factor D^-½ / N'},
    )
    paper = Dress(rope=True, local="dw5", gate="linear")

    @staticmethod
    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        form: str = "code",
    ) -> Tensor:
        """Shapes of Variant.attention. Raises UserError for an unknown form."""
        if form not in FORMS:
            raise unknown("form of mala", form, FORMS, 'use "code" or "paper"')
        feature, scale, eps = "elu1", q.shape[-1] ** -0.5, EPS
        q_den = k_den = None
        if rope is not None or form == "paper":
            feature, q, k = "identity", elu1(wide(q)), elu1(wide(k))
            if form == "paper":  # c = 1 through queries that are n times as large
                q, scale, eps = q * visible_count(k, causal, key_mask), 1.0, smallest(q)
            q_den, k_den = q, k
        return linear_attention(
            rotate(q, rope),
            rotate(k, rope),
            v,
            feature=feature,
            q_den=q_den,
            k_den=k_den,
            normaliser="mala",
            scale=scale,
            eps=eps,
            causal=causal,
            key_mask=key_mask,
        )
