"""A CLIP model small enough for every test, and helpers to build it with and without swaps."""

import copy

import torch

from clip_linear.names import with_variants
from clip_linear.openclip import register

VISION = {"image_size": [24, 32], "patch_size": 8, "width": 32, "head_width": 8, "layers": 3}
TEXT = {"width": 24, "heads": 3, "layers": 2, "vocab_size": 64, "context_length": 11}
TOY = {"embed_dim": 16, "vision_cfg": VISION, "text_cfg": TEXT}
COCA_POOL = {"attentional_pool": True, "attn_pooler_queries": 5, "attn_pooler_heads": 2, "output_tokens": True}
COCA_TEXT = {**TEXT, "embed_cls": True, "output_tokens": True, "width": 16, "heads": 2}
COCA = {
    "embed_dim": 16,
    "vision_cfg": {**VISION, **COCA_POOL},
    "text_cfg": COCA_TEXT,
    "multimodal_cfg": {"context_length": 11, "vocab_size": 64, "width": 16, "heads": 2, "layers": 2},
}


def build(config=TOY, image=None, text=None, seed=0, kind="CLIP"):
    """A model of a config; specs as in a name (``"mala.paper"``) or as dicts."""
    from open_clip import coca_model, model

    register()
    torch.manual_seed(seed)
    cls = coca_model.CoCa if kind == "CoCa" else getattr(model, kind)
    return cls(**with_variants(copy.deepcopy(config), image, text))


def batch(size=4, seed=1, config=TOY):
    """(images, texts): end-of-text is the largest id; the rest is padded with 0."""
    generator = torch.Generator().manual_seed(seed)
    length = config["text_cfg"]["context_length"]
    texts = torch.randint(1, 62, (size, length), generator=generator)
    for row in range(size):
        end = int(torch.randint(2, length, (), generator=generator))
        texts[row, end], texts[row, end + 1 :] = 63, 0
    return torch.randn(size, 3, *config["vision_cfg"]["image_size"], generator=generator), texts
