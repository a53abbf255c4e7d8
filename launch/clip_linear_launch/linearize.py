"""``clip-linear linearize``: softmax attention taught to linear attention, by the trainer of ``clip-linear train``."""

from __future__ import annotations

import sys

USAGE = """\
usage: clip-linear linearize --model NAME+IMAGE[+TEXT] --pretrained FILE|TAG --train-data SHARDS --samples N [FLAGS…]

Attention transfer: the model starts from the softmax weights of --pretrained, and only its swapped attention layers are
trained, each to give what the softmax layer gives for the same input. The logged loss is the squared error relative to
softmax's output, image_attention_loss plus text_attention_loss; each is 0 for softmax itself and 1 for no output.

FLAGS are those of clip-linear train (clip-linear train --help); a run is killed, resumed, spread over ranks and
evaluated (--eval-data) like any other. Patch dropout is off. Afterwards train the whole model a little, to let the
layers learn to work together:

  clip-linear train --model NAME+IMAGE[+TEXT] --pretrained RUN --train-data … --lr …

Without training at all: clip-linear convert softmax.
"""


_NO_DROPOUT = ["--force-patch-dropout", "0"]


def main(argv: list[str]) -> int:
    """Run the command; returns the trainer's exit code."""
    if "-h" in argv or "--help" in argv:
        sys.stdout.write(USAGE)
        return 0
    from clip_linear_launch.train import main as train

    return train([*argv, "--attention-transfer", *([] if "--force-patch-dropout" in argv else _NO_DROPOUT)])
