"""Rows: every measured number with its conditions, in one schema, as CSV or JSON lines."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from clip_linear.errors import UserError
from clip_linear.files import write_text

# The order of the columns. `gmacs`: 1e9 multiply–accumulates of ONE image + ONE text forward pass;
# `gmacs_total` = gmacs × samples_seen (no factor 3 for the backward pass, as in Cherti et al. 2023).
ROW_FIELDS = (
    "study", "run_id", "model", "image_variant", "text_variant", "n_params_vision", "n_params_text",
    "n_params_embedding", "n_params_total", "samples_seen", "gmacs", "gmacs_total", "seed", "dataset", "metric",
    "value", "unit", "n", "ci_low", "ci_high", "provenance", "device", "versions", "commit", "date",
)  # fmt: skip
PROVENANCE = ("measured", "published", "synthetic")
_INTEGERS = {"n_params_vision", "n_params_text", "n_params_embedding", "n_params_total", "samples_seen", "seed", "n"}
_FLOATS = {"gmacs", "gmacs_total", "value", "ci_low", "ci_high"}


def make_row(**values: Any) -> dict[str, Any]:
    """A row with all columns in order; columns that are not given are None. Columns beyond the schema are kept last.

    Raises ValueError for an unknown provenance.
    """
    if values.get("provenance") not in (*PROVENANCE, None):
        raise ValueError(f"provenance {values['provenance']!r} is not one of {', '.join(PROVENANCE)}")
    row = {field: values.get(field) for field in ROW_FIELDS}
    return row | {key: value for key, value in values.items() if key not in row}


def write_rows(path: Path | str, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows atomically; ``.jsonl`` as JSON lines, anything else as CSV. Floats keep full precision."""
    rows = list(rows)
    if str(path).endswith(".jsonl"):
        write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return
    columns = list(dict.fromkeys([*ROW_FIELDS, *(key for row in rows for key in row)]))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: "" if v is None else v for k, v in row.items()} for row in rows)
    write_text(path, out.getvalue())


def read_rows(path: Path | str) -> list[dict[str, Any]]:
    """Read rows from CSV or JSON lines; the schema's numbers become int or float, empty cells None.

    Raises UserError when the file is missing or is not a table.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"rows file {str(path)!r} does not exist; give a CSV or JSONL file of rows")
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    with open(path, newline="", encoding="utf-8") as f:
        return [{k: _typed(k, v) for k, v in row.items() if k is not None} for row in csv.DictReader(f)]


def _typed(column: str, text: str | None) -> Any:
    if text is None or text == "":
        return None
    try:
        if column in _INTEGERS:
            return int(float(text))
        return float(text) if column in _FLOATS else text
    except ValueError:
        return text
