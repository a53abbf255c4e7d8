"""Image–caption pairs of the training teams, as the shards that LAION's downloader img2dataset writes."""

from __future__ import annotations

import hashlib
import io
import json
import random
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

from clip_linear.emoji.concepts import TRAIN_TEAMS, Concept
from clip_linear.emoji.tiles import TILE, Tiles

Pair = tuple[str, Concept, str]  # design team, concept, caption
_KEYS_PER_SHARD = 10_000  # a key is shard number × this + place in the shard, in nine digits


def split_pairs(concepts: list[Concept]) -> tuple[list[Pair], list[Pair]]:
    """The training pairs, shuffled, and the validation pairs; unseen concepts are in neither."""
    train: list[Pair] = []
    val: list[Pair] = []
    for team in TRAIN_TEAMS:
        for concept in concepts:
            if team in concept.tiles and not concept.is_unseen:
                caption = concept.caption(random.Random(f"0/{team}/{concept.hexcode}"))
                (val if concept.is_validation(team) else train).append((team, concept, caption))
    random.Random(0).shuffle(train)
    return train, val


def write_shards(pairs: list[Pair], tiles: Tiles, out: Path, per_shard: int) -> dict[str, Any]:
    """Write NNNNN.tar (.jpg, .json, .txt a sample), NNNNN_stats.json and the sizes.json that OpenCLIP reads.

    Returns the counts. Times are fixed, so the bytes depend on the pairs alone.
    """
    out.mkdir(parents=True)
    sizes = {}
    for shard, start in enumerate(range(0, len(pairs), per_shard)):
        chunk = pairs[start : start + per_shard]
        sizes[f"{shard:05d}.tar"] = len(chunk)
        with tarfile.open(out / f"{shard:05d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for place, pair in enumerate(chunk):
                _add_pair(tar, f"{shard * _KEYS_PER_SHARD + place:09d}", pair, tiles)
        stats = {
            "count": len(chunk), "successes": len(chunk), "failed_to_download": 0, "failed_to_resize": 0,
            "duration": 0.0, "start_time": 0.0, "end_time": 0.0, "status_dict": {"success": len(chunk)},
        }  # fmt: skip
        (out / f"{shard:05d}_stats.json").write_text(json.dumps(stats, indent=4) + "\n", encoding="utf-8")
    (out / "sizes.json").write_text(json.dumps(sizes, indent=1) + "\n", encoding="utf-8")
    return {
        "pairs": len(pairs),
        "shards": len(sizes),
        "distinct_captions": len({caption for _, _, caption in pairs}),
        "per_team": dict(Counter(team for team, _, _ in pairs)),
    }


def add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Append one file with a fixed time and owner."""
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = len(data), 0, 0o644
    tar.addfile(info, io.BytesIO(data))


def _add_pair(tar: tarfile.TarFile, key: str, pair: Pair, tiles: Tiles) -> None:
    team, concept, caption = pair
    jpeg = tiles.jpeg(team, concept.tiles[team])
    record = {
        "caption": caption, "url": f"emoji:{team}/{concept.hexcode}", "key": key, "status": "success",
        "error_message": None, "width": TILE, "height": TILE, "original_width": TILE, "original_height": TILE,
        "exif": "{}", "sha256": hashlib.sha256(jpeg).hexdigest(), "punsafe": 0.0, "similarity": None,
        "vendor": team, "hexcode": concept.hexcode, "label": concept.name, "group": concept.group,
        "subgroup": concept.subgroup,
    }  # fmt: skip
    add_member(tar, key + ".jpg", jpeg)
    add_member(tar, key + ".json", json.dumps(record, ensure_ascii=False).encode())
    add_member(tar, key + ".txt", caption.encode())
