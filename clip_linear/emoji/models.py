"""OpenCLIP model configs that fit the data, and the small vocabulary they share.

With OpenCLIP's 49,408 tokens the token table would be nearly all of such a small model. OpenCLIP's own tokenizer takes
another merge list by ``text_cfg.tokenizer_kwargs.bpe_path``; the first merges of its own list are cut out at run time.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any

from clip_linear.errors import RunError

WIDTHS = (16, 32, 48, 64)
VOCAB_SIZE = 4096
CONTEXT_LENGTH = 24
BPE_FILE = f"bpe_{VOCAB_SIZE}.txt.gz"
_HEAD_WIDTH = 16
_EMBED_DIM = 64
_NOT_MERGES = 2 * 256 + 2  # bytes, bytes that end a word, start and end of text


def write_models(out: Path) -> dict[str, Any]:
    """Write the vocabulary and ViT-emoji-wN.json for each width into ``out``; returns the counts."""
    out.mkdir(parents=True)
    (out / BPE_FILE).write_bytes(small_vocabulary())
    for width in WIDTHS:
        (out / f"ViT-emoji-w{width}.json").write_text(
            json.dumps(model_config(width), indent=4) + "\n", encoding="utf-8"
        )
    return {"models": len(WIDTHS), "vocab_size": VOCAB_SIZE, "context_length": CONTEXT_LENGTH}


def model_config(width: int) -> dict[str, Any]:
    """OpenCLIP's config: patch 4 at 32 px (65 image tokens), depth 4 + 2, heads of 16, both towers of this width.

    ``bpe_path`` is relative to the config's own folder.
    """
    return {
        "embed_dim": _EMBED_DIM,
        "vision_cfg": {"image_size": 32, "layers": 4, "width": width, "head_width": _HEAD_WIDTH, "patch_size": 4},
        "text_cfg": {
            "context_length": CONTEXT_LENGTH,
            "vocab_size": VOCAB_SIZE,
            "width": width,
            "heads": width // _HEAD_WIDTH,
            "layers": 2,
            "tokenizer_kwargs": {"bpe_path": BPE_FILE},
        },
    }


def small_vocabulary() -> bytes:
    """OpenCLIP's merge list cut to VOCAB_SIZE ids, gzipped without a time; end-of-text stays the largest id.

    Raises RunError when the installed OpenCLIP has no merge list.
    """
    spec = importlib.util.find_spec("open_clip")  # finds the folder without importing torch
    for place in (spec.submodule_search_locations or []) if spec else []:
        source = Path(place) / "bpe_simple_vocab_16e6.txt.gz"
        if source.is_file():
            lines = gzip.decompress(source.read_bytes()).decode("utf-8").split("\n")
            # One header line, then the merges; no newline at the end, which OpenCLIP would read as one more merge.
            kept = "\n".join(lines[: 1 + VOCAB_SIZE - _NOT_MERGES])
            return gzip.compress(kept.encode("utf-8"), mtime=0)
    raise RunError("OpenCLIP's merge list bpe_simple_vocab_16e6.txt.gz is not there; reinstall open_clip_torch>=3.3")
