"""``clip-linear eval``: zero-shot classification and retrieval of one or several models on one or several sets."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from clip_linear.flags import Parser

TYPES = ("auto", "imagefolder", "wds", "parquet", "csv", "retrieval")


def parser() -> argparse.ArgumentParser:
    """The command's flags; needs neither torch nor open_clip."""
    p = Parser(
        prog="clip-linear eval",
        description="Zero-shot classification and retrieval. Names and templates come from the set's own files "
        "(classnames.txt, zeroshot_classification_templates.txt) unless given.",
    )
    what = p.add_argument_group("what")
    what.add_argument(
        "--model",
        help="OpenCLIP name, NAME+IMAGE[+TEXT], JSON config, local-dir:RUN, or module:function returning "
        "(model, preprocess, tokenizer); may be left out for weights in a run folder",
    )
    what.add_argument(
        "--pretrained",
        nargs="+",
        metavar="WEIGHTS",
        help="run folder, .pt or .safetensors (several, or a pattern: one curve over samples seen), OpenCLIP tag, "
        "or random",
    )
    what.add_argument("--dataset", nargs="+", required=True, metavar="PATH|NAME", help="data sets, task names, groups")
    what.add_argument("--dataset-type", default="auto", choices=TYPES, help="layout; auto looks at what is there")
    what.add_argument("--classnames", metavar="FILE|NAME", help="one name a line, id<TAB>name, JSON, or LIST[:STYLE]")
    what.add_argument("--templates", metavar="FILE|NAME", help="one template a line, JSON, openai-80, simple-7 or 1")
    what.add_argument("--labels", metavar="FILE|real", help="labels of a flat folder (file,class), or ReaL's")
    what.add_argument("--restrict", action="store_true", help="score against the classes that are there only")
    what.add_argument("--split", default="test", help="split of webdataset and caption files (default test)")
    what.add_argument("--tasks", nargs="+", default=[], metavar="FILE.toml", help="task files of your own")
    what.add_argument("--data-root", metavar="DIR", help="where built-in tasks look ($CLIP_LINEAR_DATA, else here)")
    how = p.add_argument_group("how")
    how.add_argument("--batch-size", type=int, default=64, help="images a step; halves itself when memory runs out")
    how.add_argument("--precision", default="fp32", help="fp32 (default), amp, amp_bf16, bf16, fp16, pure_bf16, …")
    how.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1; auto (default) takes a GPU where there is one"
    )
    how.add_argument("--workers", type=int, help="threads that decode images (default: one per core, at most 8)")
    how.add_argument("--limit", type=int, metavar="N", help="at most N images, evenly spaced over the set")
    how.add_argument("--on-error", default="fail", choices=("fail", "skip"), help="for images that cannot be read")
    how.add_argument("--topk", nargs="+", type=int, default=[1, 5], metavar="K", help="accuracies (default: 1 5)")
    how.add_argument(
        "--hierarchy", metavar="FILE", help="WordNet's data.noun or wordnet.is_a.txt: hierarchy-aware accuracy"
    )
    how.add_argument("--probe", choices=("linear", "knn"), help="instead of prompts: a probe on frozen features")
    how.add_argument("--train-dataset", metavar="PATH", help="what --probe is fitted on; a fifth of it validates")
    out = p.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print the rows as JSON and nothing else")
    out.add_argument(
        "--out", metavar="FILE", help="write rows to .csv, .jsonl or .json; what stands there is not redone"
    )
    out.add_argument("--predictions", metavar="FILE", help="a line per image: .parquet or .csv")
    out.add_argument("--compare", metavar="FILE", help="paired test against the --predictions of another model")
    out.add_argument("--per-class", metavar="FILE.csv", help="a line per class")
    out.add_argument("--html", metavar="FILE", help="a page to look at")
    out.add_argument(
        "--format", default="rows", choices=("rows", "clip-benchmark"), help="what --json prints (default: rows)"
    )
    return p


def main(argv: list[str]) -> int:
    """Evaluate; exit 0 on success, 2 for a user's mistake, 1 where data or weights cannot be read."""
    args = parser().parse_args(argv)
    from clip_linear_eval.runner import run
    from clip_linear_eval.saved import clip_benchmark, finite

    evaluations, prints = run(args, say=_say)
    rows = [finite(row) for evaluation in evaluations for row in evaluation.rows]
    if not prints:
        return 0
    if args.json or args.format == "clip-benchmark":
        import json

        shown: Any = rows
        if args.format == "clip-benchmark":
            shown = [clip_benchmark(evaluation.rows) for evaluation in evaluations]
        print(json.dumps(shown, indent=1, ensure_ascii=False, allow_nan=False))
    else:
        from clip_linear_eval.shown import print_rows

        print_rows(rows)
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
