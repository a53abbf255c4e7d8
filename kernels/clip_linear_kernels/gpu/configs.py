"""Block sizes and warps of every kernel, by architecture and width: a table, never a search at run time.

Every entry compiles without spills (tests/kernels/test_offline_compile.py); ``kernels/bench/tune.py`` proposes others
from measurements on a device. Columns: 64 (F and E up to 64), 128 (F up to 128, E up to 64), 256 (wider values). A
kernel without an entry is not used there: ``launch`` takes the torch path.
"""

from __future__ import annotations

from typing import NamedTuple


class Config(NamedTuple):
    """Tokens per block, warps, pipeline stages."""

    block: int
    warps: int
    stages: int


Table = dict[str, dict[int, Config]]

SM90: Table = {
    "fused_forward": {64: Config(64, 4, 2), 128: Config(64, 8, 2), 256: Config(64, 8, 2)},
    "state_forward": {64: Config(128, 8, 3), 128: Config(64, 8, 2), 256: Config(64, 8, 2)},
    "apply_forward": {64: Config(128, 8, 2), 128: Config(64, 8, 2), 256: Config(64, 8, 2)},
    "backward_q": {64: Config(64, 8, 2), 128: Config(32, 8, 1), 256: Config(16, 8, 1)},
    "backward_kv": {64: Config(64, 8, 2), 128: Config(64, 8, 1), 256: Config(64, 8, 1)},
    "causal_forward": {64: Config(64, 8, 1), 128: Config(32, 8, 1)},
    "causal_forward_den": {64: Config(32, 8, 1), 128: Config(16, 8, 1)},
    "causal_backward_q": {64: Config(32, 8, 1), 128: Config(32, 8, 1)},
    "causal_backward_q_den": {64: Config(16, 8, 1), 128: Config(16, 8, 1)},
    "causal_suffix": {64: Config(32, 8, 1), 128: Config(32, 8, 1)},
    "causal_backward_kv": {64: Config(32, 8, 1), 128: Config(32, 8, 1)},
}
# No wgmma: an operand that every warp needs whole stands in the registers of each, so that blocks are smaller, and the
# non-causal gradient by q does not fit at F = 128 (tried: blocks of 16 to 64, 4 to 16 warps, values in quarters).
SM80: Table = {
    "fused_forward": {64: Config(64, 4, 2), 128: Config(64, 8, 2), 256: Config(32, 8, 1)},
    "state_forward": {64: Config(128, 8, 2), 128: Config(64, 8, 2), 256: Config(32, 8, 2)},
    "apply_forward": {64: Config(128, 8, 2), 128: Config(64, 8, 2), 256: Config(64, 8, 2)},
    "backward_q": {64: Config(16, 8, 1)},
    "backward_kv": {64: Config(32, 8, 1)},
    "causal_forward": {64: Config(32, 8, 1), 128: Config(16, 8, 1)},
    "causal_backward_q": {64: Config(16, 8, 1), 128: Config(16, 8, 1)},
    "causal_suffix": {64: Config(16, 8, 1), 128: Config(16, 8, 1)},
    "causal_backward_kv": {64: Config(16, 8, 1), 128: Config(16, 8, 1)},
}
TABLES = {90: SM90, 80: SM80}

# Up to here one program does a whole head, when there are heads enough to fill the device.
FUSED_LENGTH = 1024
FUSED_ROWS = 132
# Programs that fill a device several times over; split-K aims at this many.
TARGET_PROGRAMS = 4 * 132


def generation(arch: int) -> int:
    """The key of TABLES for a compute capability (90 for 9.0); newer ones take the newest, AMD (0) the careful one."""
    return 90 if arch >= 90 else 80


def lookup(kernel: str, arch: int, F: int, E: int, den: bool = False) -> Config | None:
    """The entry of a kernel at padded widths F and E; ``den``: the denominator has its own q and k."""
    table = TABLES[generation(arch)]
    column = 64 if max(F, E) <= 64 else 128 if E <= 64 else 256
    found = table.get(f"{kernel}_den" if den else kernel, table[kernel]).get(column)
    if kernel in ("causal_suffix", "causal_backward_kv") and found is not None:
        # The three backward kernels cut the sequence at the same tokens.
        first = lookup("causal_backward_q", arch, F, E, den)
        return None if first is None else found._replace(block=first.block)
    return found


def value_slice(arch: int, F: int, causal: bool, den: bool) -> int:
    """Channels of v that one launch takes; more are done in slices, which is exact, as o is linear in v."""
    if not causal:
        return 128
    return 32 if den and F <= 64 and generation(arch) == 80 else 64


def kv_passes(arch: int, F: int) -> tuple[tuple[bool, bool], ...]:
    """(DO_K, DO_V) of each launch of causal_backward_kv."""
    return ((True, True),) if F <= 64 and generation(arch) == 90 else ((True, False), (False, True))
