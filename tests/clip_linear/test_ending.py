"""The end of a process that met other ranks."""

import subprocess
import sys

import pytest

# Gloo's threads are alive while the interpreter is torn down, unless it is not.
RANK = """
import atexit, os, sys
import torch, torch.distributed as dist
from clip_linear.ending import end, leave_group

class Late:
    def __del__(self, write=os.write):
        write(1, b"torn down\\n")

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
late = Late()
atexit.register(print, "hooks ran")
print("done")
"""


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("dist.destroy_process_group(); sys.exit(3)", ["done", "hooks ran", "torn down"]),
        ("leave_group(); end(3)", ["done", "hooks ran"]),
    ],
)
def test_a_process_that_met_others_is_not_torn_down(tmp_path, ending, said):
    command = [sys.executable, "-c", RANK + ending, str(tmp_path / "store")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout.split("\n")[:-1]) == (3, said), ended.stderr


def test_without_other_ranks_it_is_a_plain_exit():
    from clip_linear.ending import end

    with pytest.raises(SystemExit) as stop:
        end(75)
    assert stop.value.code == 75
