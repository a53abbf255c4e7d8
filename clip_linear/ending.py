"""The end of a process that met other ranks.

``destroy_process_group`` leaves Gloo's threads running, and they can crash an interpreter that is being torn down
(SIGABRT or SIGSEGV; pytorch/pytorch#179291): a run that had finished would count as one that failed. So such a process
ends without tearing the interpreter down.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from typing import NoReturn

_met = False


def leave_group() -> None:
    """Destroy the process group and remember that there was one."""
    import torch.distributed as dist

    global _met
    _met = True
    dist.destroy_process_group()


def end(code: int) -> NoReturn:
    """End the process with ``code``: what else runs at an interpreter's end runs here too."""
    if _met:
        threading._shutdown()  # type: ignore[attr-defined]  # joins the threads that are no daemons
        atexit._run_exitfuncs()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
