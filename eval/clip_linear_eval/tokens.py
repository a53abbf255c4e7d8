"""Tokens of many prompts: OpenCLIP's own, word by word, kept on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clip_linear_eval.classnames import text_hash
from clip_linear_eval.datasets.base import digest

if TYPE_CHECKING:
    import numpy as np


def token_lengths(tokens: np.ndarray) -> np.ndarray:
    """Tokens per row without the zeros at its end, [B] (at least 1)."""
    import numpy as np

    used = tokens != 0
    return np.maximum(tokens.shape[1] - np.argmax(used[:, ::-1], axis=1), 1) * used.any(1) + ~used.any(1)


def tokens_of(tokenizer: Any, texts: Sequence[str], cache: Path | None = None) -> np.ndarray:
    """Tokens of texts, [P, L] as int32, L the longest text; cached in the folder ``cache`` where the tokenizer is one
    whose content can be hashed."""
    import numpy as np

    key = tokenizer_key(tokenizer)
    path = None
    if cache is not None and key is not None:
        path = cache / "tokens" / f"{digest(key, text_hash(texts))}.npy"
        if path.is_file():
            return np.load(path)
    tokens = by_words(tokenizer, texts) if key is not None else None
    if tokens is None:
        tokens = np.asarray(tokenizer(list(texts)), dtype=np.int32)
    if key is not None:  # OpenCLIP's own tokenizer pads with zeros behind the end-of-text token
        tokens = np.ascontiguousarray(tokens[:, : int(token_lengths(tokens).max())])
    if path is not None:
        from clip_linear.files import replacing

        with replacing(path) as temporary, open(temporary, "wb") as f:
            np.save(f, tokens)
    return tokens


def tokenizer_key(tokenizer: Any) -> str | None:
    """A hash of OpenCLIP's SimpleTokenizer (merges, context length, cleaning); None for any other tokenizer."""
    if not hasattr(tokenizer, "bpe_ranks") or getattr(tokenizer, "reduction_fn", None) is not None:
        return None
    clean = getattr(getattr(tokenizer, "clean_fn", None), "__name__", "")
    return digest(tokenizer.context_length, clean, sorted(tokenizer.encoder.items()))


def by_words(tokenizer: Any, texts: Sequence[str]) -> np.ndarray | None:
    """What OpenCLIP's SimpleTokenizer gives, [P, context], several times faster; None where that is not sure.

    Each distinct word is encoded once, and the repair of broken Unicode, most of the time, is left out for texts of
    printable ASCII without "&", which it does not change. A sample is compared with the tokenizer itself.
    """
    import numpy as np

    pattern, clean = getattr(tokenizer, "pat", None), getattr(tokenizer, "clean_fn", None)
    if pattern is None or clean is None or getattr(clean, "__name__", "") != "_clean_lower":
        return None
    words: dict[str, list[int]] = {}
    length, end = int(tokenizer.context_length), tokenizer.eot_token_id
    out = np.zeros((len(texts), length), np.int32)
    for row, text in zip(out, texts):
        plain = text.isascii() and text.isprintable() and "&" not in text
        ids = [tokenizer.sot_token_id]
        for word in pattern.findall(" ".join(text.split()).lower() if plain else clean(text)):
            if word not in words:
                words[word] = _word_ids(tokenizer, word)
            ids += words[word]
        ids.append(end)
        if len(ids) > length:
            ids = [*ids[: length - 1], end]
        row[: len(ids)] = ids
    sample = np.linspace(0, len(texts) - 1, min(len(texts), 64)).astype(int)
    same = np.array_equal(out[sample], np.asarray(tokenizer([texts[i] for i in sample])))
    return out if same else None


def _word_ids(tokenizer: Any, word: str) -> list[int]:
    letters = "".join(tokenizer.byte_encoder[b] for b in word.encode("utf-8"))
    return [tokenizer.encoder[part] for part in tokenizer.bpe(letters).split(" ")]
