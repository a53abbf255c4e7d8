"""``clip-linear list``: the variants, models and backbones there are."""

from __future__ import annotations

import argparse
import dataclasses
import json

from clip_linear.flags import Parser

KINDS = ("variants", "models", "backbones")
WIDTH, HEADS = 768, 12  # of ViT-B, for which the tables give parameters and state


def build_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = Parser(
        prog="clip-linear list", description="What there is: attention variants, OpenCLIP models, backbones."
    )
    parser.add_argument(
        "what", nargs="?", default="variants", help=f"{', '.join(KINDS)} (variants), or a PATTERN of these"
    )
    parser.add_argument("pattern", nargs="?", default="", help="only names that hold this")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print one JSON list and nothing else")
    how.add_argument(
        "--markdown", action="store_true", help="print Markdown (of the variants: the page docs/variants.md)"
    )
    how.add_argument("--bibtex", action="store_true", help="print the sources of the variants")
    return parser


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code. Raises UserError where nothing fits the pattern."""
    args = build_parser().parse_args(argv)
    if args.what not in KINDS and not args.pattern:  # ``clip-linear list mala``
        args.what, args.pattern = "variants", args.what
    from clip_linear.errors import UserError, unknown

    if args.what not in KINDS:
        raise unknown("list", args.what, KINDS, f"use one of: {', '.join(KINDS)}")
    names = [n for n in _names(args.what) if args.pattern.lower() in n.lower()]
    if not names and args.pattern:
        raise UserError(f"no {args.what[:-1]} has {args.pattern!r} in its name; run: clip-linear list {args.what}")
    if args.what == "backbones":
        return _print_backbones(names, args)
    if args.what == "models":
        print(json.dumps(names) if args.json else "\n".join(names))
        return 0
    from clip_linear.registry import declaration, variant_info

    if args.json:
        print(json.dumps([_record(n) for n in names], indent=2, ensure_ascii=False))
    elif args.bibtex:
        print("\n\n".join(dict.fromkeys(b for n in names if (b := variant_info(n).bibtex.strip()))))
    elif args.markdown:
        from clip_linear.variants_page import page

        print(page([declaration(n) for n in names]), end="")
    else:
        from clip_linear.table import render

        headers = ("name", "equation", "towers", "presets", "parameters core / paper", "state/head", "causal", "source")
        print(render(headers, [_row(n) for n in names]), end="")
        print(
            f"\nparameters: those a preset adds to one image layer of width {WIDTH} ({HEADS} heads, 14×14 grid + CLS)."
        )
    return 0


def _print_backbones(names: list[str], args: argparse.Namespace) -> int:
    from clip_linear.backbones import page
    from clip_linear.table import markdown, render

    if args.json:
        print(json.dumps([page.record(n) for n in names], indent=2, ensure_ascii=False))
        return 0
    print((markdown if args.markdown else render)(page.HEADERS, page.rows(names)), end="")
    print("\n" + "\n".join((page.FOOT, *page.notes(names))))
    return 0


def _names(what: str) -> list[str]:
    if what == "models":
        from clip_linear.names import known_models

        return known_models()
    if what == "backbones":
        from clip_linear.backbones.sizes import timm_names

        return timm_names()
    from clip_linear.registry import list_variants

    return list_variants()


def _parameters(name: str) -> dict[str, int]:
    from clip_linear.dress import Site, dress_parameters
    from clip_linear.registry import declaration, own_parameters

    site = Site(width=WIDTH, num_heads=HEADS, length=197, grid=(14, 14), prefix=1, mlp_width=4 * WIDTH)
    known = declaration(name)
    own = sum(own_parameters(known.info, site).values())
    return {p: own + sum(dress_parameters(known.dress(p, {}), site).values()) for p in known.info.presets}


def _record(name: str) -> dict[str, object]:
    from clip_linear.registry import declaration

    known = declaration(name)
    return {
        **dataclasses.asdict(known.info),
        "core": dataclasses.asdict(known.core),
        "paper": None if known.paper is None else dataclasses.asdict(known.paper),
        f"parameters_per_image_layer_at_width_{WIDTH}": _parameters(name),
    }


def _row(name: str) -> tuple[str, ...]:
    from clip_linear.registry import variant_info

    info = variant_info(name)
    parameters = " / ".join(f"{n:,}" for n in _parameters(name).values())
    towers, presets = ", ".join(info.towers), ", ".join(info.presets)
    return name, info.equation, towers, presets, parameters, info.state_per_head, info.causal_source, info.source
