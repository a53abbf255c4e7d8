"""A step-counting training command: the contract between the worker and the trainer, without any training.

It takes the train flags, counts --samples / --batch-size steps, keeps the count in a checkpoint, and obeys signals as
the trainer does (USR2: save, exit 75; TERM: save, exit 143; a second one: end at once). The words of --name say how
it behaves: ``step_s=0.05,fail_at=3`` and so on; ``hold_at=3`` waits at step 3 for a file ``go``.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

ARGV = sys.argv[1:]


def flag(name, default=None):
    return ARGV[ARGV.index(f"--{name}") + 1] if f"--{name}" in ARGV else default


def write(path, value):
    tmp = path.with_suffix(f".{os.getpid()}.tmp")
    tmp.write_text(json.dumps(value))
    os.replace(tmp, path)


def main() -> int:
    how = dict(part.split("=") for part in flag("name", "").split(",") if "=" in part)
    run_dir, rank, world = Path(flag("run-dir")), int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    batch = int(flag("batch-size", "64")) * world
    steps = -(-int(flag("samples")) // batch)
    mine = rank == int(how.get("rank", 0))
    asked = []

    def stop(number, frame):
        if asked:
            os._exit(128 + number)
        asked.append(number)

    signal.signal(signal.SIGUSR2, stop)
    signal.signal(signal.SIGTERM, stop)
    checkpoint = run_dir / "checkpoints" / "step.json"
    checkpoint.parent.mkdir(exist_ok=True)
    kept = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"step": 0, "total": 0.0}
    step = kept["step"]
    total = kept["total"]
    print(f"rank {rank}/{world} pid {os.getpid()} starts at step {step} on port {os.environ.get('MASTER_PORT')}")

    def save():
        if rank == 0:
            write(checkpoint, {"step": step, "total": total})

    def beat(state):
        if rank == 0:
            numbers = {"step": step, "samples_seen": step * batch, "loss": 5.0 / (step + 1), "samples_per_s": 100.0}
            write(run_dir / "state.json", {"state": state, "t": time.time(), "eta_s": 1.0} | numbers)

    beat("RUNNING")
    while step < steps:
        time.sleep(float(how.get("step_s", 0.0)))
        while step == int(how.get("hold_at", -1)) and not (run_dir / "go").exists() and not asked:
            time.sleep(0.01)
        if asked and how.get("deaf") != "1":
            beat("STOPPING")
            save()
            print("stopped by signal", asked[0], flush=True)
            return (75 if asked[0] == signal.SIGUSR2 else 143) if rank == 0 else 0
        if mine and step == int(how.get("fail_at", -1)) and not (run_dir / "failed_once").exists():
            (run_dir / "failed_once").touch()
            print("Traceback (most recent call last):\nZeroDivisionError: planned")
            return 1
        if mine and step == int(how.get("net_at", -1)):
            print("RuntimeError: Connection closed by peer [127.0.0.1]:1234")
            return 1
        if mine and step == int(how.get("kill_at", -1)) and not (run_dir / "killed_once").exists():
            (run_dir / "killed_once").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if how.get("stuck") == "1":
            continue
        step += 1
        total += 1.0 / step  # depends on every step, so that a lost or repeated one shows
        beat("RUNNING")
        if step % int(how.get("save_every", 5)) == 0:
            save()
        if rank == 0:
            with open(run_dir / "metrics.jsonl", "a") as f:
                f.write(json.dumps({"step": step, "loss": 5.0 / (step + 1)}) + "\n")
    if rank == 0:
        save()
        row = {"dataset": "flags", "metric": "acc1", "value": 0.5, "unit": "fraction", "n": 10, "model": flag("model")}
        write(run_dir / "eval.json", [row | {"samples_seen": steps * batch, "provenance": "synthetic"}])
        write(run_dir / "done.json", {"step": step, "samples_seen": step * batch, "total": total})
    return 0


if __name__ == "__main__":
    sys.exit(main())
