"""``clip-linear``: the table of commands. Each is a module named as a string and imported only when it is used."""

from __future__ import annotations

import errno
import importlib.util
import logging
import os
import sys

# name -> (module whose main(argv) -> int is the command, one line). This table is the only upward reference.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("clip_linear_launch.demo", "the whole loop on embedded data: train, evaluate, fit, report"),
    "list": ("clip_linear.commands.list", "variants, models and backbones, with equations and sources"),
    "profile": ("clip_linear.commands.profile", "parameters, GMACs and state size per tower"),
    "train": ("clip_linear_launch.train", "train one model: OpenCLIP's flags, plus ours"),
    "launch": ("clip_linear_launch.cli", "sweeps: plan, run, status, collect, report"),
    "data": ("clip_linear.commands.data", "check shards; write shards from folders or tables"),
    "eval": ("clip_linear_eval.cli", "zero-shot classification and retrieval"),
    "fit": ("clip_linear_eval.commands.fit", "power-law fit of rows, with intervals and comparison"),
    "power": ("clip_linear_eval.commands.power", "how many seeds show a difference"),
    "report": ("clip_linear_eval.commands.report", "one self-contained HTML page and its Markdown"),
    "bench": ("clip_linear_launch.bench", "measured here and now, beside softmax and peers"),
    "convert": ("clip_linear.commands.convert", "official or softmax weights into our models"),
    "linearize": ("clip_linear_launch.linearize", "attention transfer from a softmax model"),
    "doctor": ("clip_linear.commands.doctor", "versions, devices, backends chosen and why"),
}


def usage() -> str:
    """The text of ``clip-linear --help``."""
    rows = "\n".join(f"  {name:<10} {line}" for name, (_, line) in COMMANDS.items() if _exists(COMMANDS[name][0]))
    return f"usage: clip-linear COMMAND [ARGS…]\n\n{rows}\n\nclip-linear COMMAND --help says more.\n"


def _exists(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code: 0 success, 1 failure, 2 a user's mistake, 130 Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] in (["-V"], ["--version"]):
        from importlib.metadata import version

        sys.stdout.write(f"clip-linear {version('clip-linear')}\n")
        return 0
    from clip_linear.errors import RunError, UserError, unknown

    name = argv[0] if argv and not argv[0].startswith("-") else ""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        if not argv or argv[0] in ("-h", "--help"):
            sys.stdout.write(usage())
            sys.stdout.flush()
            return 0 if argv else 2
        if argv[0] not in COMMANDS or not _exists(COMMANDS[argv[0]][0]):
            raise unknown(
                "command", argv[0], [c for c in COMMANDS if _exists(COMMANDS[c][0])], "run: clip-linear --help"
            )
        module = importlib.import_module(COMMANDS[argv[0]][0])
        return int(module.main(argv[1:]) or 0)
    except UserError as error:
        return _fail(name, error, 2)
    except RunError as error:
        return _fail(name, error, 1)
    except OSError as error:
        if error.errno == errno.EPIPE:  # the reader of our output went away (… | head)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        if isinstance(error, FileExistsError | FileNotFoundError | IsADirectoryError | NotADirectoryError):
            return _fail(name, error, 2)  # a path that the user gave
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM):
            return _fail(name, error, 1)
        raise
    except KeyboardInterrupt:
        return 130


def _fail(command: str, error: Exception, code: int) -> int:
    try:
        sys.stdout.flush()
    except OSError:  # the output is what failed; without this it would fail once more when the process ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.stderr.write(f"{' '.join(['clip-linear', command]).strip()}: {error}\n")
    return code


def entry() -> None:
    """The console script."""
    code = main()
    from clip_linear.ending import end

    end(code)


if __name__ == "__main__":
    entry()
