"""Write shards in img2dataset's layout: ``00000.tar`` with ``000000000.jpg/.json/.txt``, sizes, statistics."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clip_linear.data.decode import decode_image, image_size
from clip_linear.data.groups import IMAGE_EXTENSIONS
from clip_linear.errors import UserError
from clip_linear.files import replacing, write_json


@dataclass(frozen=True)
class Pair:
    """An encoded image with its caption; ``fields`` go into the json beside img2dataset's own."""

    image: bytes
    extension: str
    caption: str
    fields: Mapping[str, Any] = field(default_factory=dict)


class ShardWriter:
    """Writes pairs in the order they come; each shard appears whole or not at all. Use as a context manager.

    Keys are the shard's number (5 digits) and the sample's (4 digits, more for larger shards). Raises UserError for a
    folder that holds shards already.
    """

    def __init__(self, folder: Path, samples_per_shard: int = 10_000) -> None:
        if samples_per_shard < 1:
            raise UserError(f"samples per shard is {samples_per_shard}; give at least 1")
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{str(folder)!r} is a file; give a new or an empty folder")
        if any(folder.glob("*.tar")):
            raise UserError(f"folder {str(folder)!r} holds shards already; give a new or an empty one")
        self.folder = folder
        self.samples_per_shard = samples_per_shard
        self.digits = max(4, len(str(samples_per_shard - 1)))
        self.sizes: dict[str, int] = {}
        self._pairs: list[tuple[str, Pair, dict[str, Any]]] = []

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()

    def add(self, pair: Pair) -> None:
        """Add one pair. Raises BadImageError for an image that cannot be read, UserError for a blank caption."""
        if not pair.caption.strip():
            raise UserError("a caption is blank; leave the pair out")
        width, height = image_size(pair.image)
        key = f"{len(self.sizes):05d}{len(self._pairs):0{self.digits}d}"
        row = {
            "caption": pair.caption,
            "url": None,
            "key": key,
            "status": "success",
            "error_message": None,
            "width": width,
            "height": height,
            "original_width": width,
            "original_height": height,
            "exif": "{}",
            "sha256": hashlib.sha256(pair.image).hexdigest(),
            **pair.fields,
        }
        self._pairs.append((key, pair, row))
        if len(self._pairs) == self.samples_per_shard:
            self._flush()

    def close(self) -> None:
        """Write the last shard and ``sizes.json``, which OpenCLIP reads."""
        self._flush()
        if self.sizes:
            write_json(self.folder / "sizes.json", self.sizes)

    def _flush(self) -> None:
        if not self._pairs:
            return
        name = f"{len(self.sizes):05d}"
        with replacing(self.folder / f"{name}.tar") as tmp, tarfile.open(tmp, "w", format=tarfile.USTAR_FORMAT) as tar:
            for key, pair, row in self._pairs:
                _add(tar, f"{key}.{pair.extension}", pair.image)
                _add(tar, f"{key}.json", json.dumps(row, ensure_ascii=False).encode())
                _add(tar, f"{key}.txt", pair.caption.encode())
        n = len(self._pairs)
        stats = {"count": n, "successes": n, "failed_to_download": 0, "failed_to_resize": 0}
        write_json(self.folder / f"{name}_stats.json", {**stats, "status_dict": {"success": n}})
        self._write_parquet(name)
        self.sizes[f"{name}.tar"] = n
        self._pairs = []

    def _write_parquet(self, name: str) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:  # the extra [parquet]; the shards are whole without it
            return
        with replacing(self.folder / f"{name}.parquet") as tmp:
            pq.write_table(pa.Table.from_pylist([row for _, _, row in self._pairs]), tmp)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    info.mode = 0o644
    tar.addfile(info, io.BytesIO(content))  # no times, no owners: the same pairs give the same bytes


def write_shards(pairs: Iterable[Pair], folder: Path, samples_per_shard: int = 10_000) -> dict[str, int]:
    """Write all pairs; returns shard name -> samples (the content of ``sizes.json``)."""
    with ShardWriter(folder, samples_per_shard) as writer:
        for pair in pairs:
            writer.add(pair)
    return writer.sizes


def encode_pair(image: bytes, caption: str, max_pixels: int, fields: Mapping[str, Any] | None = None) -> Pair:
    """A pair whose image was decoded once to be sure; kinds that shards do not hold are re-encoded as JPEG.

    Raises BadImageError.
    """
    decoded = decode_image(image, max_pixels=max_pixels)
    kind = _kind(image)
    if kind is None:
        buffer = io.BytesIO()
        decoded.save(buffer, "JPEG", quality=95)
        image, kind = buffer.getvalue(), "jpg"
    return Pair(image, kind, caption, fields or {})


def _kind(image: bytes) -> str | None:
    import PIL.Image

    found = str(PIL.Image.open(io.BytesIO(image)).format).lower()
    kind = "jpg" if found in ("jpeg", "mpo") else found
    return kind if kind in IMAGE_EXTENSIONS else None
