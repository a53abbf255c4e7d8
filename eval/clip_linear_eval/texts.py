"""Encoding texts only as far as their last token, where that is exact."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from clip_linear_eval.features import Batcher, normalized
from clip_linear_eval.tokens import token_lengths, tokenizer_key

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

_BATCH_TOKENS = {"cpu": 4096, "cuda": 262144}
_log = logging.getLogger(__name__)


def encode_sorted(encode: Callable[[Tensor], Tensor], tokens: np.ndarray, device: str) -> Tensor:
    """Unit features [P, D] in float32 of tokens [P, L], encoded in batches of similar length."""
    import numpy as np
    import torch

    lengths = token_lengths(tokens)
    order = np.argsort(lengths, kind="stable")
    budget = _BATCH_TOKENS.get(torch.device(device).type, _BATCH_TOKENS["cuda"])
    run, out, start = Batcher(encode), None, 0
    while start < len(order):
        # A batch costs its longest text times its size; the order is ascending, so the size shrinks to fit.
        pick = order[start : start + max(1, budget // int(lengths[order[start]]))]
        pick = pick[: max(1, budget // int(lengths[pick[-1]]))]
        batch = torch.from_numpy(tokens[pick, : int(lengths[pick[-1]])].astype(np.int64)).to(device)
        features = normalized(run(batch))
        out = torch.zeros(len(order), features.shape[1], device=device) if out is None else out
        out[torch.from_numpy(pick).to(device)] = features
        start += len(pick)
    assert out is not None, "there is at least one text"
    return out


def text_encoder(model: Any, tokenizer: Any, prompts: list[str]) -> Callable[[Tensor], Tensor]:
    """A function tokens [B, L] → features [B, D] that may be given prompts cut behind their last token.

    Where the tower is not causal, or cutting changes the features of the ``prompts`` given, tokens are padded again.
    """
    import torch
    import torch.nn.functional as F

    full = context_length(model, tokenizer)

    def padded(tokens: Tensor) -> Tensor:
        return model.encode_text(F.pad(tokens, (0, full - tokens.shape[1])))

    if tokenizer_key(tokenizer) is None or not _is_causal(model):
        return padded
    probe = tokenizer(prompts)
    probe = probe[:, : int(token_lengths(probe.numpy()).max())].to(next(model.parameters()).device)
    exact = normalized(padded(probe))
    try:
        close = torch.allclose(normalized(_encode_cut(model, probe)), exact, atol=_tolerance(model), rtol=0)
    except (RuntimeError, AttributeError) as error:  # a part of the tower that only takes the full context
        _log.info("prompts are not shortened: %s", str(error).splitlines()[0])
        close = False
    if not close:
        _log.info("prompts are not shortened: the text tower gives other features for shorter ones")
    return (lambda tokens: _encode_cut(model, tokens)) if close else padded


def context_length(model: Any, tokenizer: Any) -> int:
    """Tokens that the text tower takes."""
    tower = model if hasattr(model, "context_length") else getattr(model, "text", None)
    return int(getattr(tower, "context_length", None) or tokenizer.context_length)


def _tower(model: Any) -> Any:
    """The module that holds the text transformer: CLIP itself, or the text tower of CustomTextCLIP."""
    return getattr(model, "text", None) or model


def _pool_type(tower: Any) -> str | None:
    return getattr(tower, "text_pool_type", None) or getattr(tower, "pool_type", None)


def _is_causal(model: Any) -> bool:
    """Whether the text tower is OpenCLIP's causal one that pools at the end-of-text token and appends nothing."""
    tower = _tower(model)
    plain = getattr(tower, "cls_emb", None) is None and not getattr(tower, "use_pad_mask", False)
    return plain and _pool_type(tower) in ("argmax", "eos") and getattr(tower, "attn_mask", None) is not None


def _encode_cut(model: Any, tokens: Tensor) -> Tensor:
    """``encode_text`` for prompts shorter than the context; OpenCLIP's own takes the whole positional table."""
    from open_clip.transformer import text_global_pool

    tower, length = _tower(model), tokens.shape[1]
    dtype = tower.transformer.get_cast_dtype()
    x = tower.token_embedding(tokens).to(dtype) + tower.positional_embedding[:length].to(dtype)
    x = tower.ln_final(tower.transformer(x, attn_mask=tower.attn_mask[:length, :length]))
    eos = getattr(tower, "text_eos_id", None) or getattr(tower, "eos_id", None)
    x = text_global_pool(x, tokens, str(_pool_type(tower)), eos_token_id=eos)
    projection = tower.text_projection
    if projection is None:
        return x
    return projection(x) if callable(projection) else x @ projection


def _tolerance(model: Any) -> float:
    import torch

    half = (
        next(model.parameters()).dtype != torch.float32
        or torch.is_autocast_enabled("cpu")
        or (torch.is_autocast_enabled("cuda"))
    )
    return 2e-2 if half else 1e-5
