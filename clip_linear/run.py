"""The second door: OpenCLIP's and CLIP_benchmark's own tools, unmodified, with our models in them.

``python -m clip_linear.run open_clip_train.main --model ViT-B-16+mala …`` is that module's command line after
``clip_linear.register()`` and the fixes of ``clip_linear.compat``. ``--model`` may be a JSON config here, too.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import runpy
import sys

from clip_linear.errors import UserError

_USAGE = """usage: python -m clip_linear.run MODULE [ARGS…]

  open_clip_train.main       OpenCLIP's trainer
  open_clip_train.profiler   its profiler
  clip_benchmark.cli         CLIP_benchmark

Names like ViT-B-16+mala+elu and JSON configs work in --model.
"""


def main(argv: list[str] | None = None) -> int:
    """Run a module's own ``main`` (or the module as a script). Returns its exit code; 1 where it returned a refusal."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(_USAGE)
        return 0 if argv else 2
    name = argv[0]
    try:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(name)
    except ModuleNotFoundError as error:
        raise UserError(
            f"there is no module {name!r} ({error}); install it, or see: python -m clip_linear.run -h"
        ) from None
    from clip_linear import compat
    from clip_linear.openclip import register

    register()
    compat.apply(name)
    args = with_known_models(argv[1:])
    module = importlib.import_module(name)
    sys.argv = [str(module.__file__), *args]
    entry = getattr(module, "main", None)
    if entry is None:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return 0
    takes = inspect.signature(entry).parameters
    result = entry(args) if takes else entry()
    # open_clip_train.main returns -1 when it refuses to start; as a script it would end with 0.
    return (result if 0 <= result < 256 else 1) if isinstance(result, int) else 0


def with_known_models(args: list[str]) -> list[str]:
    """The arguments with every JSON config in --model made known to OpenCLIP and replaced by its name.

    Raises UserError for a config that cannot be read.
    """
    from clip_linear.factory import known_name

    out, flag = [], ""
    for arg in args:
        if arg.startswith("--"):
            flag = arg.partition("=")[0]
        before, equals, value = arg.rpartition("=") if arg.startswith("--") else ("", "", arg)
        is_config = flag == "--model" and value.split("+")[0].endswith(".json")
        out.append(before + equals + known_name(value) if is_config else arg)
    return out


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.stderr.write(f"clip_linear.run: {error}\n")
        sys.exit(2)
