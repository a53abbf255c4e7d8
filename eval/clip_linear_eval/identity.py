"""What makes two evaluations the same: weights, data and settings, as one hash."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from clip_linear_eval.classifier import weights_hash
from clip_linear_eval.classnames import text_hash
from clip_linear_eval.datasets.base import EvalSet, Source, digest
from clip_linear_eval.tokens import tokenizer_key

if TYPE_CHECKING:
    from clip_linear_eval.settings import Settings

VERSION = 1  # raise it when a change of the code changes a number


def eval_id(model: Any, preprocess: Any, tokenizer: Any, data: EvalSet | Source, settings: Settings) -> str:
    """Hash of everything that decides the numbers; batch size, ranks, threads and device do not."""
    content: tuple[Any, ...]
    if isinstance(data, EvalSet):
        content = (data.fingerprint(), text_hash(data.names), data.templates.hash, settings.ks)
    else:
        content = (digest(list(data.files), list(data.captions or ()), list(data.sizes or ())), settings.limit)
    return digest(
        VERSION,
        weights_hash(model),
        re.sub(r" at 0x[0-9a-f]+", "", repr(preprocess)),
        tokenizer_key(tokenizer) or type(tokenizer).__name__,
        content,
        settings.precision,
        settings.on_error,
    )
