"""Which process of a run this is. Imports no torch: the number of ranks is part of the run's record."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from clip_linear.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Rank and size as the environment says (torchrun, the launcher, or a Slurm step)."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1


def place(env: Mapping[str, str] = os.environ) -> Place:
    """Read the environment. Raises UserError where it contradicts itself.

    RANK/WORLD_SIZE (torchrun, our launcher) come first; a Slurm *step* (srun) comes next. A mere allocation does not
    count: plain ``python`` inside ``salloc -n 8`` is one process, not the first of eight that never come.
    """
    in_step = "SLURM_STEP_ID" in env and "SLURM_PROCID" in env
    step_size = int(env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or 1) if in_step else 1
    if "RANK" in env and "WORLD_SIZE" in env:
        found = Place(
            int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", 0)), int(env.get("LOCAL_WORLD_SIZE", 1))
        )
        stale = in_step and step_size > 1 and "TORCHELASTIC_RUN_ID" not in env
        if stale and (found.rank, found.world_size) != (int(env["SLURM_PROCID"]), step_size):
            raise UserError(
                f"RANK={found.rank}, WORLD_SIZE={found.world_size} contradict Slurm's rank {env['SLURM_PROCID']} of "
                f"{step_size}; unset RANK and WORLD_SIZE"
            )
    elif in_step and step_size > 1:
        local = (env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or "1").split("(")[0]
        found = Place(int(env["SLURM_PROCID"]), step_size, int(env.get("SLURM_LOCALID", 0)), int(local.split(",")[0]))
    else:
        found = Place()
        if int(env.get("SLURM_NTASKS") or 1) > 1:
            log.warning("inside a Slurm allocation but not started by srun: this is a run of one process")
    if not 0 <= found.rank < found.world_size:
        raise UserError(f"rank {found.rank} is not below the number of ranks {found.world_size}; check RANK/WORLD_SIZE")
    return found
