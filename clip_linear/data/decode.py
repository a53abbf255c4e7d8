"""Encoded bytes to an upright RGB image on white, with the size bounded before anything is allocated."""

from __future__ import annotations

import functools
import io
import struct
import warnings
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_IMAGE_PIXELS = 89_478_485  # Pillow's own limit: a 256 MiB RGB image
MAX_ASPECT = 20.0
# What Pillow's decoders raise on broken input, besides OSError; its format plugins parse untrusted bytes in Python.
DECODE_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    LookupError,
    EOFError,
    TypeError,
    AttributeError,
    ArithmeticError,
    MemoryError,
    RuntimeError,
    struct.error,
    zlib.error,
)
_ORIENTATION = 0x0112  # EXIF tag


class BadImageError(Exception):
    """An image that is not delivered: ``reason`` is one of the fault reasons."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


def decode_image(
    data: bytes, *, max_pixels: int = MAX_IMAGE_PIXELS, max_aspect: float = 0.0, at_least: int = 0
) -> Image:
    """Decode to RGB: EXIF orientation applied, 16 bit scaled, transparency on white, CMYK converted, first frame.

    ``max_aspect`` > 0 cuts a longer image to its centre (what a centre crop would keep anyway). ``at_least`` > 0 allows
    a JPEG to be decoded at 1/2, 1/4 or 1/8 of its size as long as the shorter side keeps that many pixels.
    Raises BadImageError with reason ``image_too_large`` or ``image_decode_error``.
    """
    import PIL.Image

    if not data:
        raise BadImageError("image_decode_error", "0 bytes")
    _quiet()
    try:
        image: Image = _open(data, max_pixels)
        if at_least and image.format == "JPEG":
            image.draft("RGB", _draft_size(image.size, at_least))
        orientation = _orientation(image)
        image = _to_rgb(image)
    except PIL.Image.DecompressionBombError as error:
        raise BadImageError("image_too_large", f"more than {max_pixels} pixels ({error})"[:200]) from None
    except DECODE_ERRORS as error:
        raise BadImageError("image_decode_error", _explain(error)) from None
    return _bound_aspect(_turn(image, orientation), max_aspect)


@functools.cache
def _quiet() -> None:
    """Silence Pillow's warnings (damaged EXIF, odd palettes) once; what matters of them is raised as an error."""
    warnings.filterwarnings("ignore", module=r"PIL\.")


def image_size(data: bytes) -> tuple[int, int]:
    """Width and height from the header, as stored (orientation not applied). Raises BadImageError."""
    try:
        return _open(data, 1 << 62).size
    except DECODE_ERRORS as error:
        raise BadImageError("image_decode_error", _explain(error)) from None


def _explain(error: BaseException) -> str:
    import PIL

    if isinstance(error, PIL.UnidentifiedImageError):  # its own text names an address in memory
        return "no known image format"
    return f"{type(error).__name__}: {error}"[:200]


def _open(data: bytes, max_pixels: int) -> Image:
    import PIL.Image

    limit = PIL.Image.MAX_IMAGE_PIXELS
    # Pillow allows twice its limit; half of ours makes its check ours,
    # also where a plugin allocates while it opens.
    PIL.Image.MAX_IMAGE_PIXELS = (max_pixels + 1) // 2
    try:
        image: Image = PIL.Image.open(io.BytesIO(data))
    finally:
        PIL.Image.MAX_IMAGE_PIXELS = limit
    if image.width * image.height > max_pixels:
        raise BadImageError("image_too_large", f"{image.width} × {image.height} pixels, allowed: {max_pixels}")
    return image


def _draft_size(size: tuple[int, int], at_least: int) -> tuple[int, int]:
    """The size to ask a JPEG decoder for: it then takes the smallest of its scales that is not below."""
    scale = max(1.0, min(size) / at_least)
    return max(1, int(size[0] / scale)), max(1, int(size[1] / scale))


def _orientation(image: Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except DECODE_ERRORS:  # a damaged EXIF block does not cost the image
        return 1


def _turn(image: Image, orientation: int) -> Image:
    if not 2 <= orientation <= 8:
        return image
    from PIL.Image import Transpose

    how = (
        Transpose.FLIP_LEFT_RIGHT,
        Transpose.ROTATE_180,
        Transpose.FLIP_TOP_BOTTOM,
        Transpose.TRANSPOSE,
        Transpose.ROTATE_270,
        Transpose.TRANSVERSE,
        Transpose.ROTATE_90,
    )
    return image.transpose(how[orientation - 2])


def _to_rgb(image: Image) -> Image:
    image.load()
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I") or image.mode == "F":
        return _sixteen_bit(image)
    if "transparency" in image.info or "A" in image.mode or "a" in image.mode:
        return _on_white(image.convert("RGBA"))
    return image.convert("RGB")


def _on_white(image: Image) -> Image:
    import PIL.Image

    white = PIL.Image.new("RGBA", image.size, (255, 255, 255, 255))
    white.alpha_composite(image)
    return white.convert("RGB")


def _sixteen_bit(image: Image) -> Image:
    """Grey of 16 bit to 8 bit by v/257 (65535 becomes 255); Pillow's own conversion would clip at 255."""
    import numpy as np
    import PIL.Image

    values = np.asarray(image).astype(np.float64)
    grey = np.clip(np.rint(values / 257.0), 0, 255).astype(np.uint8)
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        grey = np.where(values == clear, np.uint8(255), grey)
    return PIL.Image.fromarray(grey).convert("RGB")


def _bound_aspect(image: Image, max_aspect: float) -> Image:
    width, height = image.size
    short, long = min(width, height), max(width, height)
    if max_aspect <= 0 or long <= max_aspect * short:
        return image
    keep = max(short, int(short * max_aspect))
    first = (long - keep) // 2
    box = (first, 0, first + keep, height) if width > height else (0, first, width, first + keep)
    return image.crop(box)
