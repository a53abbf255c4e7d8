"""``clip-linear bench``: what is measured here and now. Each subject is a module, named as a string until used."""

from __future__ import annotations

import importlib
import importlib.util
import sys

from clip_linear.errors import unknown

SUBJECTS: dict[str, tuple[str, str]] = {
    "attention": ("clip_linear_launch.bench_attention", "every variant and backend beside softmax"),
    "train": ("clip_linear_launch.bench_train", "training steps beside softmax"),
    "data": ("clip_linear_launch.bench_data", "samples a second beside OpenCLIP's own pipeline"),
    "eval": ("clip_linear_launch.bench_eval", "zero-shot evaluation beside CLIP_benchmark"),
}


def main(argv: list[str]) -> int:
    """Run one subject's benchmark; returns its exit code."""
    subjects = {name: s for name, s in SUBJECTS.items() if importlib.util.find_spec(s[0]) is not None}
    if not argv or argv[0] in ("-h", "--help"):
        lines = "\n".join(f"  {name:<10} {line}" for name, (_, line) in subjects.items())
        sys.stdout.write(
            f"usage: clip-linear bench SUBJECT [ARGS…]\n\n{lines}\n\nclip-linear bench SUBJECT --help says more.\n"
        )
        return 0 if argv else 2
    if argv[0] not in subjects:
        raise unknown("subject", argv[0], subjects, "run: clip-linear bench --help")
    return int(importlib.import_module(subjects[argv[0]][0]).main(argv[1:]))
