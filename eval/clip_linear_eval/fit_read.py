"""Rows from CSV, JSON lines or parquet, and where they come from."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from clip_linear.errors import UserError
from clip_linear.provenance import commit, date, versions_text

if TYPE_CHECKING:
    import pandas as pd


def read_table(path: Path | str) -> pd.DataFrame:
    """The rows as text and numbers. Raises UserError if the file is missing, empty or no table."""
    import pandas as pd

    path = Path(path)
    if not path.is_file():
        raise UserError(f"rows file {str(path)!r} does not exist; give a CSV, JSONL or parquet file of rows")
    try:
        if path.suffix in (".parquet", ".pq"):
            return pd.read_parquet(path)
        if path.suffix in (".jsonl", ".ndjson"):
            return pd.read_json(path, lines=True, dtype=False)
        table = pd.read_csv(path, encoding="utf-8-sig", skipinitialspace=True, skip_blank_lines=True)
    except ImportError:
        raise UserError(f"{str(path)!r} needs pyarrow; install clip-linear[parquet] or give CSV") from None
    except (ValueError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{str(path)!r} is not a table of rows: {str(error).splitlines()[0]}") from None
    table.columns = [str(c).strip() for c in table.columns]
    return table


def source(path: Path) -> dict[str, str]:
    """Where a fit's numbers come from: the file, its SHA-256, and the versions and commit that fitted it."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return {"rows": path.name, "sha256": digest, "versions": versions_text(), "commit": commit(), "date": date()}
