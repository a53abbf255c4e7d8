"""Images and texts to features: decoding beside the model, explicit precision, smaller batches on out-of-memory."""

from __future__ import annotations

import contextlib
import io
import logging
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from clip_linear.errors import UserError, unknown
from clip_linear_eval.datasets.base import DECODE_ERRORS

if TYPE_CHECKING:
    from torch import Tensor, nn

PRECISIONS = ("fp32", "amp", "amp_bf16", "bf16", "fp16", "pure_bf16", "pure_fp16")
_PIECE = 8  # images that a thread takes at a time: handing over single ones costs as much as decoding small ones
_log = logging.getLogger(__name__)


def check_precision(precision: str) -> str:
    """The precision, or a UserError; ``amp_bfloat16`` is OpenCLIP's other spelling of ``amp_bf16``."""
    precision = "amp_bf16" if precision == "amp_bfloat16" else precision
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS, "fp32 is the one to cite")
    return precision


def bare(model: nn.Module) -> Any:
    """The model inside DistributedDataParallel and torch.compile."""
    while hasattr(model, "_orig_mod") or (hasattr(model, "module") and not hasattr(model, "encode_image")):
        model = getattr(model, "_orig_mod", None) or model.module  # type: ignore[assignment]
    return model


@contextlib.contextmanager
def inference(model: nn.Module, precision: str, device: str) -> Iterator[None]:
    """Evaluation mode, no gradients and the wished arithmetic; the model's mode is put back afterwards.

    ``fp32`` means it: TF32 is off for matrix products and convolutions.
    """
    import torch

    training = model.training
    kind = torch.device(device).type
    tf32 = torch.backends.cuda.matmul.allow_tf32
    dtype = {"amp": torch.float16, "amp_bf16": torch.bfloat16}.get(precision)
    cast = torch.autocast(kind, dtype=dtype) if dtype else contextlib.nullcontext()
    model.eval()
    try:
        torch.backends.cuda.matmul.allow_tf32 = tf32 and precision != "fp32"
        with torch.inference_mode(), cast, torch.backends.cudnn.flags(allow_tf32=precision != "fp32"):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        model.train(training)


def input_dtype(precision: str) -> Any:
    """The dtype that images must have for a model of this precision; None leaves float32."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision.removeprefix("pure_"))


class Batcher:
    """Runs a function over batches and halves the batch size, for good, when the device runs out of memory."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function
        self.most: int | None = None

    def __call__(self, batch: Tensor) -> Tensor:
        """``function`` over the batch, [B, …] → [B, …], in as many pieces as memory asks for."""
        import torch

        while True:
            try:
                pieces = batch.split(self.most or len(batch))
                return torch.cat([self.function(p) for p in pieces]) if len(pieces) > 1 else self.function(batch)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                size = min(self.most or len(batch), len(batch))
                if size == 1 or not _is_out_of_memory(error):
                    raise
            # Outside the handler, so that the failed step's tensors are released before the next try.
            self.most = size // 2
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            _log.warning("out of memory at %d a batch; going on with %d", size, self.most)


def _is_out_of_memory(error: Exception) -> bool:
    import torch

    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def normalized(features: Tensor) -> Tensor:
    """Unit-length features in float32, [B, D]."""
    import torch.nn.functional as F

    return F.normalize(features.float(), dim=-1)


def decode(data: bytes, border: int = 0) -> Any:
    """Bytes → RGB PIL image as torchvision and CLIP_benchmark decode it; ``border`` pixels cropped on each side.

    Raises one of DECODE_ERRORS for damaged data.
    """
    from PIL import Image

    with Image.open(io.BytesIO(data)) as opened:
        image = opened.convert("RGB")
    return image.crop((border, border, image.width - border, image.height - border)) if border else image


def image_batches(
    read: Callable[[int], bytes],
    batches: Sequence[Sequence[int]],
    preprocess: Callable[[Any], Tensor],
    *,
    border: int = 0,
    workers: int = 2,
) -> Iterator[tuple[list[int], Tensor | None, dict[int, str]]]:
    """Decode and transform batches of image indices in threads, two batches ahead.

    Yields (indices that worked, their images [B, 3, H, W] or None where none did, index → reason for those that
    did not). The order is that of ``batches``; a bad image makes its batch shorter and changes nothing else.
    """
    import torch
    from PIL import Image

    def load(index: int) -> Tensor | str:
        try:
            return preprocess(decode(read(index), border))
        except (*DECODE_ERRORS, Image.DecompressionBombError) as error:
            # Pillow names the buffer by its address, which would differ from run to run.
            return f"{type(error).__name__}: {re.sub(r' ?<_io.*?>', '', str(error))}"

    def load_some(indices: Sequence[int]) -> list[Tensor | str]:
        return [load(index) for index in indices]

    with ThreadPoolExecutor(max(1, workers)) as pool:
        waiting: deque[tuple[Sequence[int], list[Future[list[Tensor | str]]]]] = deque()
        todo = iter(batches)
        try:
            while True:
                while len(waiting) < 3 and (indices := next(todo, None)) is not None:
                    pieces = [indices[i : i + _PIECE] for i in range(0, len(indices), _PIECE)]
                    waiting.append((indices, [pool.submit(load_some, piece) for piece in pieces]))
                if not waiting:
                    return
                indices, futures = waiting.popleft()
                results = dict(zip(indices, [r for future in futures for r in future.result()]))
                good = {i: r for i, r in results.items() if not isinstance(r, str)}
                faults = {i: r for i, r in results.items() if isinstance(r, str)}
                yield list(good), torch.stack(list(good.values())) if good else None, faults
        finally:
            pool.shutdown(cancel_futures=True)


def decode_workers(workers: int | None) -> int:
    """Threads for decoding: as asked, else one per core up to eight."""
    from clip_linear.provenance import available_cores

    if workers is not None and workers < 1:
        raise UserError(f"--workers {workers} is too few; give 1 or more")
    return workers or min(8, available_cores())
