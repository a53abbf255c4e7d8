"""``clip-linear convert``: weights of others in our models."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from clip_linear.flags import Parser


def build_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = Parser(prog="clip-linear convert", description="Weights of others in our models.")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    official = kinds.add_parser(
        "official",
        help="a released checkpoint of a paper's backbone",
        description="A released checkpoint of MAViT, RAVLT, NaLaFormer, PolaFormer, FLatten or InLine as one of our "
        "backbones (clip-linear list backbones). Wrappers are taken off, names and shapes changed, positional tables "
        "interpolated. Load the result by timm.create_model(ARCH, checkpoint_path=OUT) after clip_linear.register().",
    )
    official.add_argument("file", type=Path, help="the released .pth, .pt or .safetensors file")
    official.add_argument("--arch", required=True, help="the backbone, e.g. mavit_small")
    official.add_argument(
        "--flags",
        help="which stages are linear (l or i) and softmax (v or s), as trained, e.g. llvv. MAViT, RAVLT and "
        "NaLaFormer need it: their weights fit every choice",
    )
    official.add_argument(
        "--image-size", type=int, metavar="PIXELS", help="of the result, instead of the backbone's own"
    )
    official.add_argument("--ema", action="store_true", help="take the averaged weights (model_ema)")
    official.add_argument(
        "--allow-pickle",
        action="store_true",
        help="read files that hold other objects than tensors and argparse.Namespace. Loading such a file can run any "
        "code: only for files whose origin you trust",
    )
    official.add_argument("--out", type=Path, help="the result (default: ARCH.pt)")
    official.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    softmax = kinds.add_parser(
        "softmax",
        help="a softmax CLIP's weights in a model with linear attention",
        description="A softmax checkpoint in a swapped model, as a folder for open_clip.create_model('local-dir:OUT') "
        "after clip_linear.register(). New tensors keep their initial values: train the result before use.",
    )
    softmax.add_argument("--model", required=True, help="NAME+IMAGE[+TEXT] or the path of an OpenCLIP JSON config")
    softmax.add_argument("--pretrained", required=True, help="a checkpoint's path, or a tag of the base model")
    softmax.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="a new or empty folder")
    softmax.add_argument("--seed", type=int, default=0, help="of the new tensors' initial values")
    softmax.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code. Raises UserError."""
    args = build_parser().parse_args(argv)
    return _softmax(args) if args.kind == "softmax" else _official(args)


def _softmax(args: argparse.Namespace) -> int:
    from clip_linear.export import export_swapped

    count = export_swapped(args.model, args.pretrained, args.out, args.seed)
    if args.json:
        print(json.dumps({"out": str(args.out), "model": args.model, "seed": args.seed, "parameters": count}, indent=2))
    else:
        print(f"{args.out}: {args.model}, {count:,} parameters")
    return 0


def _official(args: argparse.Namespace) -> int:
    from clip_linear.backbones import checkpoint
    from clip_linear.errors import UserError

    out = args.out or Path(f"{args.arch}.pt")
    if out.is_dir() or not out.parent.is_dir():
        raise UserError(f"--out {str(out)!r} is no file in a folder that exists; give the path of a new .pt file")
    if out.exists() and out.samefile(args.file):
        raise UserError(f"--out {str(out)!r} is the released file itself; give another path")
    if args.image_size is not None and args.image_size < 32:
        raise UserError(f"--image-size {args.image_size} is below 32 pixels, the coarsest stride; give more")
    if args.allow_pickle:
        sys.stderr.write(f"warning: --allow-pickle: whatever code {args.file} holds is run\n")
    weights = checkpoint.read_weights(args.file, ema=args.ema, allow_pickle=args.allow_pickle)
    model = checkpoint.convert(args.arch, weights, args.flags, args.image_size)
    origin = {
        "arch": args.arch,
        "flags": args.flags or "as released",
        "ema": args.ema,
        "source": args.file.name,
        "source_sha256": checkpoint.sha256(args.file),
    }
    checkpoint.write(out, model, origin)
    numbers = {"parameters": sum(p.numel() for p in model.parameters()), "classes": model.num_classes}
    blocks = " ".join(model.block_variants())
    if args.json:
        print(json.dumps({"out": str(out), **origin, **numbers, "blocks": blocks.split()}, indent=2))
    else:
        softmax = blocks.split().count("softmax")
        print(
            f"{out}: {args.arch}, {numbers['parameters']:,} parameters, {numbers['classes']} classes, "
            f"softmax in {softmax} of {len(blocks.split())} blocks"
        )
    return 0
