"""One group to one caption and one image: the rule for captions, filters on fields, and the name of each loss."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clip_linear.data.decode import BadImageError, image_size
from clip_linear.data.faults import Fault
from clip_linear.data.filters import IMAGE_FIELDS, Filter
from clip_linear.data.groups import IMAGE_EXTENSIONS

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Sample:
    """A good pair: an upright RGB image and its caption."""

    image: Image
    caption: str
    key: str
    shard: str


@dataclass(frozen=True, slots=True)
class Encoded:
    """A pair before decoding; ``captions`` holds all the captions that its json offers (mostly one)."""

    image: bytes
    captions: tuple[str, ...]
    key: str
    offset: int

    @property
    def n_bytes(self) -> int:
        """What the pair weighs in a shuffle buffer."""
        return len(self.image) + sum(map(len, self.captions))

    def caption(self, draw: str) -> str:
        """The caption; one of several is drawn by the text ``draw`` (the same text draws the same)."""
        if len(self.captions) == 1:
            return self.captions[0]
        return self.captions[random.Random(draw).randrange(len(self.captions))]


class CaptionError(Exception):
    """No usable caption: ``reason`` is one of the fault reasons."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


def encode(
    members: Mapping[str, bytes],
    key: str,
    shard: str,
    offset: int,
    caption_key: str | None = None,
    filters: Sequence[Filter] = (),
) -> tuple[Encoded | None, list[Fault]]:
    """The pair in a group's members (extension -> bytes), or None, and its faults.

    The members hold an image; a ``bad_json`` is reported but costs nothing unless the caption stands in it.
    """
    faults = []
    fields: dict[str, Any] = {}
    if "json" in members:
        try:
            parsed = json.loads(members["json"])
            fields = parsed if isinstance(parsed, dict) else {}
        except (ValueError, RecursionError) as error:
            faults.append(Fault("bad_json", shard, key, offset, str(error)[:200]))
    image = next(members[e] for e in IMAGE_EXTENSIONS if e in members)
    try:
        captions = find_captions(members, fields, caption_key)
        rejected = _rejecting(filters, fields, image)
    except (CaptionError, BadImageError) as error:
        return None, [*faults, Fault(error.reason, shard, key, offset, error.detail)]
    if rejected is not None:
        detail = f"{rejected.field} {rejected.sign} {rejected.value} does not hold"
        return None, [*faults, Fault(rejected.reason, shard, key, offset, detail)]
    return Encoded(image, captions, key, offset), faults


def find_captions(members: Mapping[str, bytes], fields: Mapping[str, Any], caption_key: str | None) -> tuple[str, ...]:
    """The captions of a sample: ``.txt``, else the json's ``caption``; or the json fields that ``caption_key`` names.

    ``caption_key`` may name several sources in order of preference, ``txt`` being the member: ``"long,caption,txt"``.
    A json field may hold a list of captions. Raises CaptionError.
    """
    sources = ["txt", "caption"] if caption_key is None else [k.strip() for k in caption_key.split(",")]
    is_blank = False
    for source in sources:
        texts = _texts(source, members, fields)
        if texts is None:
            continue
        good = tuple(t for t in texts if t.strip())
        if good:
            return good
        is_blank = True
        if caption_key is None:  # an empty .txt is the writer's word: the json must not speak for it
            break
    if is_blank:
        raise CaptionError("empty_caption", "the caption has no characters")
    raise CaptionError("missing_caption", f"no {' or '.join(sources)}; members: {' '.join('.' + e for e in members)}")


def _texts(source: str, members: Mapping[str, bytes], fields: Mapping[str, Any]) -> list[str] | None:
    if source == "txt":
        if "txt" not in members:
            return None
        try:
            return [members["txt"].decode("utf-8-sig")]
        except UnicodeDecodeError as error:
            raise CaptionError("caption_not_utf8", str(error)) from None
    value = fields.get(source)
    values = value if isinstance(value, list) else [value]
    # A json escape can spell half a surrogate pair, which no tokenizer and no file takes.
    return [v.encode("utf-8", "replace").decode() for v in values if isinstance(v, str)] or None


def _rejecting(filters: Sequence[Filter], fields: Mapping[str, Any], image: bytes) -> Filter | None:
    """The first filter that does not keep the sample."""
    for each in filters:
        if each.field in IMAGE_FIELDS and each.field not in fields:
            fields = {**fields, each.field: IMAGE_FIELDS[each.field](*image_size(image))}
        if not each.keeps(fields):
            return each
    return None
