"""What can be wrong with a shard or a sample: the reasons, and one fault as a record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# A shard's own reasons: at most one row each for one reading of a shard.
SHARD_REASONS = ("missing_shard", "empty_shard", "corrupt_shard", "truncated_shard", "data_after_end")
# The shard gives nothing at all; counted against the limit of shards.
LOST_SHARD_REASONS = ("missing_shard", "empty_shard", "corrupt_shard")
# Reasons of one sample. ``filtered_<field>`` (a wish of the user) comes beside these.
SAMPLE_REASONS = (
    "image_decode_error",
    "image_too_large",
    "missing_image",
    "unsupported_extension",
    "missing_caption",
    "empty_caption",
    "caption_not_utf8",
    "duplicate_key",
    "bad_json",
)


@dataclass(frozen=True)
class Fault:
    """One loss, or one oddity that cost nothing (``bad_json``): why, and where."""

    reason: str
    shard: str
    key: str | None = None
    offset: int | None = None  # byte offset of the member's tar header in the (uncompressed) shard
    detail: str = ""

    def row(self, rank: int) -> dict[str, Any]:
        """The fault as a row of ``data_faults.jsonl``."""
        return {
            "reason": self.reason,
            "shard": self.shard.encode("utf-8", "backslashreplace").decode(),  # a path may hold any bytes
            "key": self.key,
            "offset": self.offset,
            "detail": self.detail,
            "rank": rank,
        }


def costs_a_sample(reason: str) -> bool:
    """Whether the reason counts against the limit of bad samples (a wanted filter and a bad json do not)."""
    return reason not in SHARD_REASONS and reason != "bad_json" and not reason.startswith("filtered_")
