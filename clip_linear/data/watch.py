"""Waiting for data, bounded: a wait that takes too long, or a worker that dies, ends the run with the reason."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess

from clip_linear.errors import RunError

log = logging.getLogger(__name__)
_GRACE_S = 10.0  # for the main thread to notice that it was interrupted; one stuck in the kernel never does


_SIGNAL = signal.SIGVTALRM  # nobody else's; SIGINT is ignored in what a script has put into the background


class _Stuck(BaseException):
    pass


class Watchdog:
    """For reading in the main process: past the limit it prints all stacks and interrupts the main thread."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._deadline: float | None = None
        self._in_main = threading.current_thread() is threading.main_thread()
        if self._in_main:
            self._before = signal.signal(_SIGNAL, self._interrupt)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="data-watchdog")
        self._thread.start()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Bound the time spent inside. Raises RunError past the limit."""
        self._deadline = time.monotonic() + self.timeout_s
        try:
            yield
        except _Stuck:
            self._stop.set()
            raise RunError(too_slow(self.timeout_s)) from None
        finally:
            self._deadline = None

    def close(self) -> None:
        """End the watching thread."""
        self._stop.set()
        self._thread.join()
        if self._in_main:
            signal.signal(_SIGNAL, self._before)

    def _interrupt(self, number: int, frame: object) -> None:
        if self._deadline is not None:  # else the batch came at the last moment
            raise _Stuck

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self.timeout_s / 4)):
            deadline = self._deadline
            if deadline is None or time.monotonic() < deadline:
                continue
            dump_stacks()
            if self._in_main:  # a real signal, since only that ends a blocking system call
                signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)
            if not self._stop.wait(_GRACE_S) and self._deadline == deadline:
                log.error(too_slow(self.timeout_s))
                os._exit(1)


def too_slow(timeout_s: float) -> str:
    """The sentence for a batch that did not come."""
    return (
        f"no batch for {timeout_s:g} s: reading the shards hangs or is too slow; the stacks are above; look at the "
        "file system or the server, or raise --data-timeout-s"
    )


def dump_stacks() -> None:
    """Print the stacks of all threads of this process to stderr."""
    faulthandler.dump_traceback(file=2, all_threads=True)


def dump_workers(workers: Sequence[BaseProcess]) -> None:
    """Let worker processes print their stacks and end (they have faulthandler on)."""
    for worker in workers:
        if worker.is_alive() and worker.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGABRT)
    for worker in workers:
        worker.join(5.0)


def describe_dead(workers: Sequence[BaseProcess], rss_bytes: Mapping[int, int], patience_s: float) -> str | None:
    """What is known of the worker processes that have died; None when all live."""
    dead = []
    for worker in workers:
        worker.join(patience_s)  # one that has just been killed may still be on its way out
        code = worker.exitcode
        if code is None or worker.pid is None:
            continue
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        rss = rss_bytes.get(worker.pid)
        size = f", {rss / 2**20:.0f} MiB resident at its last batch" if rss else ", before its first batch"
        hint = (
            "; the system may be out of memory: fewer --workers or a smaller buffer" if code == -signal.SIGKILL else ""
        )
        dead.append(f"data worker {worker.pid} {how}{size}{hint}")
    return "; ".join(dead) or None
