"""What every test gets: the source roots on PYTHONPATH (also in subprocesses) and one quiet thread."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_roots = [str(ROOT / r) for r in (".", "kernels", "launch", "eval")]
os.environ["PYTHONPATH"] = os.pathsep.join([*_roots, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
