"""A finished sweep, made up: rows and run folders as the launcher leaves them."""

import json

import numpy as np

from clip_linear_eval.results import make_row, write_rows

SIZES = (31_000, 95_000, 210_000, 371_000)


def write_sweep(folder, variants=("softmax", "mala"), sizes=SIZES, provenance="measured", noise=0.01):
    """Rows and run folders as a finished sweep leaves them; errors follow a power law with a little noise."""
    rng = np.random.default_rng(0)
    rows = []
    for variant in variants:
        for i, size in enumerate(sizes):
            run_id = f"mini{i}+{variant}-s0"
            run = folder / "runs" / run_id
            run.mkdir(parents=True)
            steps = [
                {"step": s, "samples_seen": 128 * s, "loss": 4.8 * s**-0.1, "samples_per_s": 500.0 - 90 * i, "lr": 1e-3}
                for s in range(1, 41)
            ]
            (run / "metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))
            (run / "config.toml").write_text(f'model = "mini{i}+{variant}"\n')
            (run / "env.json").write_text(
                json.dumps({"commit": "c0ffee", "versions": {"torch": "2.6"}, "cpu": "a CPU"})
            )
            (run / "done.json").write_text("{}")
            shared = {
                "study": "made up", "run_id": run_id, "model": f"mini{i}+{variant}", "image_variant": variant,
                "n_params_vision": size, "samples_seen": 5120, "seed": 0, "provenance": provenance, "device": "a CPU",
            }  # fmt: skip
            for dataset in ("objects", "flags"):
                error = 2.2 * size**-0.085 * float(np.exp(noise * rng.standard_normal()))
                rows.append(make_row(**shared, dataset=dataset, metric="top1", value=1 - error, unit="fraction", n=900))
    write_rows(folder / "rows.csv", rows)
    return folder
