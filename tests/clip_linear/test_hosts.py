"""Every model class that carries attention, and everything OpenCLIP does to a model after building it."""

import copy

import open_clip
import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

from clip_linear import hosts, list_variants, swap_attention
from clip_linear.attention import merge_heads, split_heads
from clip_linear.errors import UserError
from clip_linear.functional import attention
from clip_linear.layout import Layout
from clip_linear.masks import with_mask
from clip_linear.openclip import register
from clip_linear.registry import declaration
from tests.clip_linear.swap_helpers import COCA, TEXT, TOY, VISION, batch, build

PAPERS = [f"{v}.paper" for v in list_variants() if declaration(v).paper is not None]
GRID = [*PAPERS, "cosformer"]  # what must know where its tokens are
SIGLIP = {
    "embed_dim": 16,
    "init_logit_bias": -10,
    "vision_cfg": {"timm_model_name": "vit_tiny_patch16_224", "timm_pool": "map", "timm_proj": "none"},
    "text_cfg": {**TEXT, "no_causal_mask": True, "pool_type": "last"},
}


def vit(**kwargs):
    torch.manual_seed(0)
    small = {"embed_dim": 32, "num_heads": 4, "depth": 2, "img_size": (24, 32), "patch_size": 8, "num_classes": 5}
    return timm.models.VisionTransformer(**{**small, **kwargs})


# -- masks ----------------------------------------------------------------------------------------------------------


def causal_mask(length):
    return torch.full((length, length), float("-inf")).triu(1)


def test_masks_are_known_by_their_values():
    causal, free = Layout(causal=True).tokens(5, False), Layout().tokens(5, False)
    mask = causal_mask(5)
    assert with_mask(causal, mask, 2, True).key_mask is None
    assert with_mask(causal, mask < 0, 2, True).key_mask is None  # boolean, True = masked
    assert with_mask(causal, mask == 0, 2, False).key_mask is None  # boolean, True = keep
    keep = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1], [1, 1, 0, 1, 1]], dtype=torch.bool)
    keys = torch.zeros(3, 5, 5).masked_fill(~keep[:, None], float("-inf")).repeat_interleave(2, 0)  # [B·H, L, L]
    assert torch.equal(with_mask(causal, mask + keys, 2, True).key_mask, keep)
    assert torch.equal(with_mask(free, keys, 2, True).key_mask, keep)
    assert torch.equal(with_mask(free, keys.unflatten(0, (3, 2))[:, :1], 2, True).key_mask, keep)
    blocks = torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).log()
    bad = (
        (causal, None),
        (causal, blocks),
        (causal, torch.zeros(5, 5)),
        (causal, mask.mT),
        (causal, mask.clamp(min=-1)),  # a bias, not a mask
        (causal, keys),  # without its causal part
        (causal, torch.zeros(4, 5)),
        (free, mask),
        (free, (blocks + keys)),
        (free, torch.zeros(5)),
        (free, torch.zeros(3, 5, 5)),  # 3 rows are not B × 2 heads
    )
    for tokens, wrong in bad:
        with pytest.raises(ValueError, match="mask"):
            with_mask(tokens, wrong, 2, True)
    with pytest.raises(RuntimeError, match="mask"):  # as it is checked where nobody may wait for the values
        torch.compile(lambda m: with_mask(free, m, 2, True).key_mask + 0, backend="eager")(blocks + keys)


def test_cross_attention_is_refused():
    attn = build(image="elu").visual.transformer.resblocks[0].attn
    x, y = torch.randn(2, 13, 32), torch.randn(2, 13, 32)
    with pytest.raises(ValueError, match="stays softmax"):
        attn(x, y, y)
    out, weights = attn(x, x, x, need_weights=False, attn_mask=None)
    assert out.shape == x.shape and weights is None


# -- CoCa -----------------------------------------------------------------------------------------------------------


def test_coca_equals_attention_with_an_explicit_mask(monkeypatch):
    """Its 3-D mask is causal and hides padding, shifted by one as in the weights that exist."""
    for variant in ("mala", "affine_eq7", "rala"):
        model = build(COCA, text=variant, kind="CoCa").eval()
        _, texts = batch(config=COCA)
        got = model.text(texts)
        legacy = torch.cat([torch.ones(len(texts), 1, dtype=torch.bool), texts != 0], 1)

        def explicit(self, query, key, value, attn_mask=None, legacy=legacy, variant=variant, **_):
            q, k, v = F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
            heads = [split_heads(t, self.num_heads) for t in (q, k, v)]
            o = merge_heads(attention(variant, *heads, causal=True, key_mask=legacy))
            return self.out_proj(o if self.body.gate is None else o * self.body.gate(query)), None

        with monkeypatch.context() as patch:
            patch.setattr(hosts.SwappedMultiheadAttention, "forward", explicit)
            want = model.text(texts)
        for a, b in zip(got, want):
            assert torch.equal(a, b)


def test_coca_decoder_and_poolers_stay_softmax():
    model = build(COCA, image="mala.paper", text="elu", kind="CoCa")
    images, texts = batch(config=COCA)
    out = model(images, texts)
    out["logits"].sum().backward()
    assert type(model.visual.attn_pool.attn) is nn.MultiheadAttention
    assert not [m for m in model.text_decoder.modules() if hasattr(m, "body")]
    assert len([m for m in model.modules() if hasattr(m, "body")]) == 5


# -- timm -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", [*PAPERS, "hydra", "performer"])
def test_bare_timm_vit(preset):
    for extra in ({}, {"reg_tokens": 2}, {"qk_norm": True, "class_token": False, "global_pool": "avg"}):
        model, plain = vit(**extra), vit(**extra)
        assert swap_attention(model, image=preset) is model
        for name, value in plain.state_dict().items():
            assert torch.equal(model.state_dict()[name], value)
        out = model(torch.randn(2, 3, 24, 32))
        out.sum().backward()
        assert out.shape == (2, 5) and not [n for n, p in model.named_parameters() if p.grad is None]


def test_softmax_wrapper_equals_timm():
    images = torch.randn(2, 3, 24, 32)
    for extra in ({}, {"qk_norm": True}, {"scale_attn_norm": True}):
        plain = vit(**extra).eval()
        assert torch.allclose(swap_attention(copy.deepcopy(plain), image="softmax")(images), plain(images), atol=1e-5)


def test_siglip_model():
    register()
    model = build(SIGLIP, "mala.paper", "elu", kind="CustomTextCLIP")
    model.visual.set_input_size(32)  # as --force-image-size does after building
    images, texts = torch.randn(2, 3, 32, 32), batch(2)[1]
    out = model(images, texts)
    sum(o.sum() for o in out if o is not None).backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None and n != "logit_scale"]
    # A bidirectional text tower sees what follows.
    other = texts.clone()
    other[:, 0] = 5
    assert not torch.allclose(model.encode_text(other), model.encode_text(texts))
    with pytest.raises(ValueError, match="the grid of this tower"):
        model.visual.trunk.blocks[0].attn(torch.randn(2, 9, 192))


def test_trunk_sizes_change_with_key_positions():
    model = swap_attention(vit(img_size=(16, 16)), image="pola.paper")
    table = model.blocks[0].attn.body.table
    table.data = torch.arange(5.0).repeat_interleave(32)
    model.set_input_size((32, 32))
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 5)
    from clip_linear.attention import Tokens

    rows = model.blocks[0].attn.body._positions(Tokens(grid=(4, 4), prefix=1), 17)[0, :, 0]
    assert rows[0] == 0 and rows[1:].view(4, 4)[0, 0] < 1.5 < 3.5 < rows[1:].view(4, 4)[3, 3]


# -- OpenCLIP's own Attention, of 3.x and of the main branch ---------------------------------------------------------


def test_custom_blocks():
    switches = {"qk_norm": True, "scale_heads": True, "scale_attn_inner": True, "scale_attn": True, "scale_fc": True}
    config = {**TOY, "vision_cfg": {**VISION, **switches}, "text_cfg": {**TEXT, **switches}}
    images, texts = batch()
    plain, same = build(config), build(config, "softmax", "softmax")
    for a, b in zip(plain(images, texts), same(images, texts)):
        assert torch.allclose(a, b, atol=1e-5)
    model = build(config, "nala.paper", "enhanced.paper")
    out = model(images, texts)
    sum(o.sum() for o in out).backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None]
    with pytest.raises(UserError, match="scaled_cosine_attn"):
        build({**TOY, "vision_cfg": {**VISION, "scaled_cosine_attn": True}}, "elu")


class MainAttention(nn.Module):
    """The interface of the ``Attention`` of OpenCLIP's main branch: every block calls (x, k_x, v_x, attn_mask)."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.logit_scale, self.head_scale = num_heads, None, None
        self.in_proj_weight = nn.Parameter(torch.randn(3 * dim, dim) * dim**-0.5)
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * dim))
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, x, k_x=None, v_x=None, attn_mask=None):
        raise NotImplementedError


class SwappedMainAttention(hosts.OpenClipHost, MainAttention):
    pass


def test_attention_of_the_main_branch(monkeypatch):
    monkeypatch.setitem(hosts.HOSTS, MainAttention, SwappedMainAttention)
    model = build()
    for block in model.transformer.resblocks:
        theirs = MainAttention(24, 3)
        theirs.in_proj_weight, theirs.in_proj_bias = block.attn.in_proj_weight, block.attn.in_proj_bias
        theirs.out_proj, block.attn = block.attn.out_proj, theirs
        block.attention = lambda q_x, k_x=None, v_x=None, attn_mask=None, b=block: b.attn(q_x, k_x, v_x, attn_mask)
    swap_attention(model, text="mala")
    _, texts = batch()
    assert torch.allclose(model.encode_text(texts), build(text="mala").encode_text(texts), atol=1e-6)
    attn, x = model.transformer.resblocks[0].attn, torch.randn(1, 4, 24)
    attn(x, attn_mask=causal_mask(4) == 0)  # its boolean masks say True = keep
    with pytest.raises(ValueError, match="stays softmax"):
        attn(x, torch.randn(1, 4, 24))


# -- what cannot be swapped -----------------------------------------------------------------------------------------


class ModernTextTransformer(nn.Module):
    pass


class HFTextEncoder(nn.Module):
    pass


@pytest.mark.parametrize("tower", [ModernTextTransformer, HFTextEncoder])
def test_foreign_text_towers_are_named(tower):
    model = nn.Module()
    model.text = tower()
    with pytest.raises(UserError, match=tower.__name__):
        swap_attention(model, text="elu")


def test_foreign_image_towers_are_named():
    with torch.device("meta"):
        eva = timm.create_model("eva02_tiny_patch14_224")
        rope = timm.create_model("vit_pe_core_tiny_patch16_384")
        conv = timm.create_model("convnext_atto")
        resnet = open_clip.modified_resnet.ModifiedResNet([1, 1, 1, 1], 16, 2)
    for tower, name in ((eva, "EvaAttention"), (rope, "AttentionRope"), (conv, "ConvNeXt"), (resnet, "ModifiedResNet")):
        with pytest.raises(UserError, match=name):
            swap_attention(tower, image="elu")


# -- patch dropout --------------------------------------------------------------------------------------------------


def dropping(preset, prob=0.5, **kwargs):
    return build({**TOY, "vision_cfg": {**VISION, "patch_dropout": prob}}, image=preset, **kwargs).visual


@pytest.mark.parametrize("preset", GRID)
def test_patch_dropout_keeps_the_positions(preset):
    visual, images = dropping(preset), batch()[0]
    torch.manual_seed(3)
    out = visual(images)
    torch.manual_seed(3)
    theirs = open_clip.transformer.PatchDropout(0.5)(torch.arange(13.0).expand(4, -1)[..., None])[..., 0]
    index = visual.patch_dropout.layout.index
    assert torch.equal(index + 1, theirs[:, 1:].long())  # OpenCLIP's own draw, in its order

    layout, dropout = visual.patch_dropout.layout, visual.patch_dropout
    order = torch.tensor([3, 1, 0, 5, 4, 2])

    class Reordered(nn.Module):  # the same tokens in another order give the same features
        def forward(self, x):
            ids = torch.cat([torch.zeros(4, 1, dtype=torch.long), theirs[:, 1:].long()[:, order]], 1)
            layout.index = ids[:, 1:] - 1
            return x.gather(1, ids[..., None].expand(-1, -1, x.shape[-1]))

    visual.patch_dropout = Reordered()
    assert torch.allclose(visual(images), out, atol=1e-5)
    visual.patch_dropout = dropout
    visual.eval()
    full = visual(images)
    assert layout.index is None and not torch.allclose(full, out, atol=1e-3)


def test_patch_dropout_of_timm():
    model = swap_attention(vit(patch_drop_rate=0.5, class_token=True, reg_tokens=1), image="mala.paper")
    torch.manual_seed(0)
    model(torch.randn(2, 3, 24, 32)).sum().backward()
    assert model.patch_drop.layout.index.shape == (2, 6) and model.patch_drop.layout.index.max() < 12


def test_core_presets_leave_patch_dropout_alone():
    assert type(dropping("mala").patch_dropout) is open_clip.transformer.PatchDropout


@pytest.mark.parametrize("preset", ["mala.paper", "pola.paper", "enhanced.paper", "cosformer"])
def test_two_forward_passes_before_a_backward_pass_under_checkpointing(preset):
    """A side channel that holds the last draw would recompute the first pass with the second one's positions."""
    grads = []
    for checkpointing in (False, True):
        visual = dropping(preset)
        visual.set_grad_checkpointing(checkpointing)
        torch.manual_seed(9)
        first, second = visual(batch(seed=1)[0]), visual(batch(seed=2)[0])
        (first.sum() + 2 * second.sum()).backward()
        grads.append([p.grad.clone() for p in visual.parameters()])
    assert all(torch.allclose(a, b, atol=1e-5, rtol=1e-4) for a, b in zip(*grads))


def test_reentrant_checkpointing_is_detected():
    visual = dropping("mala.paper")
    block = visual.transformer.resblocks[1]
    x = visual._embeds(batch()[0])
    y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        y.sum().backward()


def test_deepcopy_is_independent():
    visual, images = dropping("enhanced.paper"), batch()[0]
    twin = copy.deepcopy(visual)
    torch.manual_seed(0)
    out = visual(images)
    torch.manual_seed(0)
    assert torch.equal(twin(images), out)
    assert twin.patch_dropout.layout is twin.transformer.resblocks[0].attn.layout is not visual.patch_dropout.layout
    assert twin.transformer.resblocks[0].attn.layout.source is twin
    with torch.no_grad():
        twin.transformer.resblocks[0].attn.body.mlp_conv.weight.zero_()
    torch.manual_seed(0)
    assert torch.equal(visual(images), out)
    torch.manual_seed(0)
    assert not torch.equal(twin(images), out)  # the hook of the copy runs the copy's convolution


# -- what OpenCLIP does to models -----------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PAPERS)
def test_grad_checkpointing(preset):
    images, texts = batch()
    grads = []
    for enable in (False, True):
        model = build(image=preset, text=preset)
        model.set_grad_checkpointing(enable)
        sum(o.sum() for o in model(images, texts)).backward()
        grads.append({n: p.grad for n, p in model.named_parameters()})
    for name, grad in grads[0].items():
        assert torch.allclose(grads[1][name], grad, atol=1e-6), name


def test_locks_intermediates_and_position_resizing():
    model, (images, texts) = build(image="focused.paper", text="pola.paper"), batch()
    out = model.forward_intermediates(images, texts)
    assert len(out["image_intermediates"]) == 3 and out["image_intermediates"][0].shape == (4, 32, 3, 4)
    assert torch.allclose(out["image_features"], model.encode_image(images, normalize=True), atol=1e-6)
    model.lock_image_tower(unlocked_groups=2)
    model.lock_text_tower(unlocked_layers=1)
    sum(o.sum() for o in model(images, texts)).backward()
    state = model.state_dict()
    open_clip.model.resize_pos_embed(state, model)


def test_checkpoints_of_another_image_size():
    small = {**TOY, "vision_cfg": {**VISION, "image_size": 16}}
    large = {**TOY, "vision_cfg": {**VISION, "image_size": 32}}
    state = build(small, image="pola.paper").state_dict()
    state["visual.transformer.resblocks.0.attn.body.table"] = torch.arange(5.0).repeat_interleave(32)
    model = build(large, image="pola.paper")
    open_clip.model.resize_pos_embed(state, model)
    model.load_state_dict(state)
    rows = model.visual.transformer.resblocks[0].attn.body.table.view(17, 32)[:, 0]
    assert rows[0] == 0 and rows[1] < rows[16]
    wide = build(image="pola.paper").state_dict()  # 3×4 patches: no square
    with pytest.raises(UserError, match="not a square grid"):
        build(large, image="pola.paper").visual.load_state_dict(
            {n.removeprefix("visual."): v for n, v in wide.items() if n.startswith("visual.")}
        )


def test_hybrids():
    model = build(image={"kind": "mala", "preset": "paper", "layers": "1-2"}, text={"kind": "elu", "layers": [0]})
    assert [hasattr(b.attn, "body") for b in model.visual.transformer.resblocks] == [False, True, True]
    assert [hasattr(b.attn, "body") for b in model.transformer.resblocks] == [True, False]
    sum(o.sum() for o in model(*batch())).backward()


def test_softmax_in_another_dress():
    model = build(image={"kind": "softmax", "dress": {"rope": True, "local": "dw5", "gate": "linear"}})
    own = {n.split(".body.")[1] for n in model.state_dict() if ".body." in n}
    assert own == {"gate.weight", "gate.bias", "local.weight", "local.bias"}
    sum(o.sum() for o in model(*batch())).backward()


@pytest.mark.parametrize("preset", [f"{v}.{p}" for v in list_variants() for p in declaration(v).info.presets])
def test_low_precision_models(preset):
    """As ``--precision bf16`` and ``pure_bf16`` build them, and under autocast: same features, finite gradients."""
    images, texts = batch()
    exact = build(image=preset, text=preset).eval()
    want = torch.cat([exact.encode_image(images, normalize=True), exact.encode_text(texts, normalize=True)])
    for precision in ("bf16", "pure_bf16", "amp_bf16"):
        config = {**TOY, "cast_dtype": torch.bfloat16} if precision == "bf16" else TOY
        model, x = build(config, preset, preset).eval(), images
        if precision == "bf16":
            open_clip.model.convert_weights_to_lp(model, torch.bfloat16)
        elif precision == "pure_bf16":
            model.to(torch.bfloat16)
        if precision != "amp_bf16":
            x = images.to(torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "amp_bf16"):
            got = torch.cat([model.encode_image(x, normalize=True), model.encode_text(texts, normalize=True)])
        got.float().square().sum().backward()
        assert torch.nn.functional.cosine_similarity(got.float(), want).min() > 0.99
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_new_gains_are_kept_out_of_weight_decay():
    """OpenCLIP's own rule decays everything with two dimensions that is no norm, bias or logit scale."""
    for preset in PAPERS:
        model = build(image=preset, text=preset)
        extras = {n.split(".attn.body.")[1]: p.ndim for n, p in model.named_parameters() if ".attn.body." in n}
        decayed = {n for n, ndim in extras.items() if ndim >= 2 and "bias" not in n}
        assert decayed <= {"gate.weight", "local.weight", "mlp_conv.weight", "local.net.0.weight", "local.net.2.weight"}


SHALLOW = {**TOY, "vision_cfg": {**VISION, "layers": 1}, "text_cfg": {**TEXT, "layers": 1}}


def compiled_equals_eager(model, images, texts, backend):
    torch._dynamo.reset()
    out = torch.compile(model, fullgraph=True, backend=backend)(images, texts)
    sum(o.sum() for o in out).backward()
    for a, b in zip(out, model(images, texts)):
        assert torch.allclose(a, b, atol=1e-4)


def test_a_model_is_traced_without_graph_breaks():
    compiled_equals_eager(build(SHALLOW, "pola.paper", "mala.paper"), *batch(), "eager")


@pytest.mark.slow
@pytest.mark.parametrize("preset", [f"{v}.{declaration(v).info.presets[-1]}" for v in list_variants()])
def test_models_are_traced_without_graph_breaks(preset):
    compiled_equals_eager(build(SHALLOW, preset, preset), *batch(), "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_patch_dropout_in_a_compiled_tower(checkpointing):
    config = {**SHALLOW, "vision_cfg": {**VISION, "layers": 1, "patch_dropout": 0.5}}
    visual, images = build(config, "mala.paper").visual, batch()[0]
    visual.set_grad_checkpointing(checkpointing)
    torch._dynamo.reset()
    grads = []
    for function in (torch.compile(visual, backend="aot_eager"), visual):
        visual.zero_grad()
        torch.manual_seed(4)
        function(images).sum().backward()
        grads.append([p.grad.clone() for p in visual.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*grads))


def test_distributed_data_parallel(tmp_path):
    """DDP is built without find_unused_parameters: it would fail in the second step."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(build(image="pola.paper", text="nala.paper"))
        for _ in range(2):
            model.zero_grad()
            sum(o.sum() for o in model(*batch())).backward()
        unused = [name for name, p in model.named_parameters() if p.grad is None]
        assert not unused
    finally:
        torch.distributed.destroy_process_group()
