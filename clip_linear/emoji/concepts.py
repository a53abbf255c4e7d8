"""What the emoji mean: names and keywords, the split into training, validation and unseen, and the captions."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

TRAIN_TEAMS = ("noto", "fluent-flat", "fluent-color")
EVAL_TEAM = "twemoji"
TEMPLATES = ("{c}", "{c} emoji", "an icon of {c}", "a drawing of {c}")
_VAL_PER_10_000 = 400


@dataclass(frozen=True, kw_only=True)
class Concept:
    """One emoji. ``tiles`` maps a design team to the number of its tile; ``base`` is the name without skin tone."""

    hexcode: str
    name: str
    base: str
    keywords: list[str]
    group: str
    subgroup: str
    tone: str | None
    tiles: dict[str, int]

    @property
    def is_flag(self) -> bool:
        """Whether this is the flag of a country or of a part of one."""
        return self.subgroup in ("country flag", "subdivision flag")

    @property
    def is_unseen(self) -> bool:
        """Whether no team's image and no caption of it is trained on: one in ten of the skin-tone compositions."""
        return self.tone is not None and _hash("unseen" + self.hexcode, 10) == 0

    def is_validation(self, team: str) -> bool:
        """Whether this team's image of it is held out as a validation pair (other teams may still show it)."""
        return _hash(f"val{team}{self.hexcode}", 10_000) < _VAL_PER_10_000

    def caption(self, rng: random.Random) -> str:
        """One web-like caption: name, name and keywords, keywords and name, a templated name, or group and name."""
        keywords = [k for k in self.keywords if k.lower() != self.name.lower()]
        kind = rng.random()
        some = rng.sample(keywords, min(len(keywords), rng.randint(1, 4)))
        if kind < 0.40 or not some:
            return self.name
        if kind < 0.65:
            return f"{self.name}, {', '.join(some)}"
        if kind < 0.75:
            return f"{', '.join(some)} {self.name}"
        if kind < 0.90:
            return rng.choice(TEMPLATES[1:]).format(c=self.name)
        return f"{self.group}: {self.name}"


def load_concepts() -> list[Concept]:
    """All concepts in the order of Unicode's chart."""
    text = files("clip_linear.emoji").joinpath("concepts.jsonl").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    return [Concept(**row) for row in rows]


def _hash(text: str, buckets: int) -> int:
    """A bucket that depends on the text alone, so that a split survives new concepts and another order."""
    return int(hashlib.sha1(text.encode()).hexdigest(), 16) % buckets
