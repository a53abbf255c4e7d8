"""``clip-linear profile``: what a model costs before it is built."""

from __future__ import annotations

import argparse
import dataclasses
import json

from clip_linear.flags import Parser


def build_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = Parser(
        prog="clip-linear profile",
        description="Parameters, 1e9 multiply-accumulates of one forward pass and attention state of each tower. "
        "'core' is the share of the attention equations in a tower's multiply-accumulates; 'state' is how many "
        "numbers the attention states of all layers hold (keys and values for softmax).",
    )
    parser.add_argument("model", nargs="+", help="NAME, NAME+IMAGE[+TEXT] or the path of an OpenCLIP JSON config")
    parser.add_argument("--image-size", type=int, metavar="PIXELS", help="instead of the model's own")
    parser.add_argument("--json", action="store_true", help="print one JSON list and nothing else")
    return parser


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code. Raises UserError."""
    args = build_parser().parse_args(argv)
    from clip_linear.errors import UserError
    from clip_linear.names import model_config
    from clip_linear.profile import profile

    if args.image_size is not None and args.image_size < 1:
        raise UserError(f"--image-size {args.image_size} is no size; give a number of pixels above 0")
    found = {name: profile(model_config(name)[1], args.image_size) for name in args.model}
    if args.json:
        print(json.dumps([{"model": name, **dataclasses.asdict(p)} for name, p in found.items()], indent=2))
        return 0
    from clip_linear.table import render

    rows = []
    for name, p in found.items():
        image = ("image", p.n_params_vision, 0, p.gmacs_image, p.core_share_image, p.state_image)
        text = ("text", p.n_params_text, p.n_params_embedding, p.gmacs_text, p.core_share_text, p.state_text)
        for tower, parameters, embedding, gmacs, share, state in (image, text):
            state_text = "?" if state is None else f"{state:,}"
            rows.append((name, tower, f"{parameters:,}", f"{embedding:,}", f"{gmacs:.3f}", f"{share:.1%}", state_text))
        rows.append((name, "total", f"{p.n_params_total:,}", f"{p.n_params_embedding:,}", f"{p.gmacs:.3f}", "", ""))
    headers = ("model", "tower", "parameters", "of these embedding", "GMACs", "core (of GMACs)", "state (numbers)")
    print(render(headers, rows), end="")
    return 0
