"""`VisionEncoder`: a model's encoder of images and videos, and how many tokens of a prompt an image becomes.

A rule per family turns pixels into an `ImageGrid` of patches and that into tokens, as its processor does:

Qwen-VL    sides rounded to multiples of patch x merge, shrunk or grown into [min, max] pixels; tokens are merged
           squares of patches; videos two frames at a time, their pixels counted per frame (2.5) or altogether (3)
Pixtral    the longest side at most `longest`; merged squares of patches, and a break behind each row
Gemma 3    one square of a fixed size, of which a fixed number of tokens is pooled (without pan and scan)
tiles      Llama 4: the canvas of tiles that an image needs the least upscaling, else downscaling, for; InternVL: the
           canvas nearest in aspect; and a thumbnail where there are several

Source: Hugging Face transformers 5, the processors of qwen2_vl, qwen3_vl, pixtral, gemma3, llama4 and got_ocr2
(Apache-2.0); limits of pixels from the models' preprocessor_config.json."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, floor, sqrt
from typing import Any, Literal, NamedTuple

from perfmodel.errors import SpecError


class ImageGrid(NamedTuple):
    """Patches of an image as the encoder has them. sequences: that see only themselves: tiles, pairs of frames"""

    sequences: int
    rows: int
    columns: int

    @property
    def num_patches(self) -> int:
        return self.sequences * self.rows * self.columns


@dataclass(frozen=True, slots=True)
class DynamicResolution:
    """Qwen-VL's. Pixels are limits on an image; video_pixels: on a frame, or with `sums_frames` on all frames. Tokens
    before and behind the placeholders: start and end."""

    patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    video_pixels: tuple[int, int]
    sums_frames: bool = False
    frames_per_patch: int = 2
    num_marks: int = 2

    def grid(self, width: int, height: int, num_frames: int) -> ImageGrid:
        least, most = self.video_pixels if num_frames > 1 else (self.min_pixels, self.max_pixels)
        side = self.patch * self.merge
        rows, columns = max(round(height / side), 1), max(round(width / side), 1)
        steps = max(round(num_frames / self.frames_per_patch), 1)
        frames = num_frames if self.sums_frames and num_frames > 1 else 1
        rounded = steps * self.frames_per_patch if frames > 1 else 1
        pixels, area = rounded * rows * columns * side**2, frames * width * height
        if pixels > most:
            factor = sqrt(area / most) * side
            rows, columns = max(floor(height / factor), 1), max(floor(width / factor), 1)
        elif pixels < least:
            factor = sqrt(least / area) / side
            rows, columns = ceil(height * factor), ceil(width * factor)
        return ImageGrid(steps, rows * self.merge, columns * self.merge)

    def num_tokens(self, grid: ImageGrid) -> int:
        return grid.num_patches // self.merge**2

    @property
    def max_tokens(self) -> int:
        return self.max_pixels // (self.patch * self.merge) ** 2


@dataclass(frozen=True, slots=True)
class LongestSide:
    """Pixtral's. longest: pixels of a side"""

    patch: int
    merge: int
    longest: int
    num_marks: int = 0

    def grid(self, width: int, height: int, num_frames: int) -> ImageGrid:
        ratio, side = max(width / self.longest, height / self.longest, 1.0), self.patch * self.merge
        rows, columns = (ceil(floor(size / ratio) / side) for size in (height, width))
        return ImageGrid(num_frames, rows * self.merge, columns * self.merge)

    def num_tokens(self, grid: ImageGrid) -> int:
        return grid.sequences * (grid.rows // self.merge) * (grid.columns // self.merge + 1)

    @property
    def max_tokens(self) -> int:
        side = ceil(self.longest / (self.patch * self.merge))
        return side * (side + 1)


@dataclass(frozen=True, slots=True)
class FixedGrid:
    """Gemma 3's. patches: of a side; num_marks: line breaks, start and end"""

    patches: int
    tokens: int
    num_marks: int = 4

    def grid(self, width: int, height: int, num_frames: int) -> ImageGrid:
        return ImageGrid(num_frames, self.patches, self.patches)

    def num_tokens(self, grid: ImageGrid) -> int:
        return grid.sequences * self.tokens

    @property
    def max_tokens(self) -> int:
        return self.tokens


@dataclass(frozen=True, slots=True)
class Tiles:
    """Llama 4's and InternVL's. tile: pixels of a side; num_separators: tokens behind each tile but the thumbnail"""

    tile: int
    patch: int
    tokens: int
    most: int
    chooses: Literal["best_fit", "aspect"]
    num_separators: int = 0
    num_marks: int = 2

    def grid(self, width: int, height: int, num_frames: int) -> ImageGrid:
        tiles = 1
        if num_frames == 1:
            rows, columns = (self._best_fit if self.chooses == "best_fit" else self._nearest)(width, height)
            tiles = rows * columns
        per_image = tiles + (tiles > 1)
        return ImageGrid(num_frames * per_image, self.tile // self.patch, self.tile // self.patch)

    def num_tokens(self, grid: ImageGrid) -> int:
        return grid.sequences * self.tokens + max(grid.sequences - 1, 0) * self.num_separators

    @property
    def max_tokens(self) -> int:
        return self.num_tokens(ImageGrid(self.most + (self.most > 1), 1, 1))

    def _best_fit(self, width: int, height: int) -> tuple[int, int]:
        scales = {
            (rows, columns): min(columns * self.tile / width, rows * self.tile / height)
            for rows in range(1, self.most + 1)
            for columns in range(1, self.most // rows + 1)
        }
        growing = [scale for scale in scales.values() if scale >= 1]
        best = min(growing) if growing else max(scales.values())
        return min(
            (canvas for canvas, scale in scales.items() if scale == best), key=lambda canvas: canvas[0] * canvas[1]
        )

    def _nearest(self, width: int, height: int) -> tuple[int, int]:
        canvases = [(r, c) for r in range(1, self.most + 1) for c in range(1, self.most // r + 1)]
        best, least = (1, 1), float("inf")
        for rows, columns in sorted(canvases, key=lambda canvas: canvas[0] * canvas[1]):
            apart = abs(width / height - columns / rows)
            is_filled = apart == least and width * height > 0.5 * self.tile**2 * rows * columns
            if apart < least or is_filled:
                best, least = (rows, columns), apart
        return best


ImageRule = DynamicResolution | LongestSide | FixedGrid | Tiles


@dataclass(frozen=True, slots=True)
class VisionEncoder:
    """An encoder of transformer blocks over patches. Sizes in elements.

    patch_elements: inputs of a patch's embedding
    window:         patches of a side that see each other, in all but `num_full_layers` layers; None: all see all
    projections:    (inputs, outputs) of the products that each token of the prompt goes through"""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    patch_elements: int
    rule: ImageRule
    projections: tuple[tuple[int, int], ...]
    is_gated: bool = False
    window: int | None = None
    num_full_layers: int = 0

    @property
    def takes_videos(self) -> bool:
        """Whether several frames may be one input."""
        rule = self.rule
        return isinstance(rule, DynamicResolution) or (isinstance(rule, Tiles) and rule.chooses == "aspect")

    @property
    def num_params(self) -> int:
        """Weights of its products: 4 d^2 + 2 d f a layer (3 d f with a gate), the patches' embedding, projections."""
        d, ups = self.hidden_size, 3 if self.is_gated else 2
        per_layer = 4 * d * d + ups * d * self.intermediate_size
        projected = sum(inputs * outputs for inputs, outputs in self.projections)
        return self.num_layers * per_layer + self.patch_elements * d + projected

    def of_image(self, width: int, height: int, num_frames: int = 1) -> tuple[ImageGrid, int]:
        """The grid of an image, or of a video of several frames, in pixels, and its tokens."""
        grid = self.rule.grid(width, height, num_frames)
        return grid, self.rule.num_tokens(grid)


def vision_encoder(file: Mapping[str, Any], hidden_size: int, source: str) -> VisionEncoder | None:
    """The encoder of a config.json's `vision_config`; None without one, or for a family whose rule is not known.

    hidden_size: of the text decoder; source: the file, for errors. Raises SpecError for a missing field."""
    block = file.get("vision_config")
    if not isinstance(block, Mapping):
        return None
    types = [str(of.get("model_type", "")) for of in (block, file)]
    family = next((name for kind in types for name in _FAMILIES if kind.startswith(name)), None)
    if family is None:
        return None
    config = {**block, **{name: file[name] for name in _OUTSIDE if name in file}}
    try:
        return _FAMILIES[family](config, hidden_size)
    except (KeyError, TypeError) as error:
        raise SpecError(f"{source}: vision_config: {error} is missing; without it the encoder is not known.") from None


def _qwen3_vl(config: Mapping[str, Any], hidden: int) -> VisionEncoder:
    return _qwen(config, hidden, (65536, 16_777_216), (4096, 25_165_824), sums_frames=True)


def _qwen2_5_vl(config: Mapping[str, Any], hidden: int) -> VisionEncoder:
    return _qwen(config, hidden, (3136, 12_845_056), (128 * 28**2, 768 * 28**2), sums_frames=False)


def _qwen(
    config: Mapping[str, Any], hidden: int, pixels: tuple[int, int], video: tuple[int, int], *, sums_frames: bool
) -> VisionEncoder:
    patch, merge, width = config["patch_size"], config["spatial_merge_size"], config["hidden_size"]
    frames = config.get("temporal_patch_size", 2)
    window, full = config.get("window_size"), config.get("fullatt_block_indexes", ())
    merged = width * merge**2
    num_mergers = 1 + len(config.get("deepstack_visual_indexes", ()))
    return VisionEncoder(
        width,
        config["depth"],
        config["num_heads"],
        config["intermediate_size"],
        3 * frames * patch**2,
        DynamicResolution(patch, merge, *pixels, video, sums_frames, frames),
        ((merged, merged), (merged, config.get("out_hidden_size", hidden))) * num_mergers,
        is_gated=config.get("hidden_act") == "silu",
        window=window // patch if window else None,
        num_full_layers=len(full),
    )


def _gemma3(config: Mapping[str, Any], hidden: int) -> VisionEncoder:
    rule = FixedGrid(config["image_size"] // config["patch_size"], 256)
    return _siglip(config, rule, ((config["hidden_size"], hidden),))


def _llama4(config: Mapping[str, Any], hidden: int) -> VisionEncoder:
    size, patch, ratio = config["image_size"], config["patch_size"], config.get("pixel_shuffle_ratio", 0.5)
    tokens = round((size // patch) ** 2 * ratio**2)
    inner, out = config.get("projector_input_dim", 4096), config.get("projector_output_dim", 4096)
    merged = round(config["hidden_size"] / ratio**2)
    rule = Tiles(size, patch, tokens, most=16, chooses="best_fit", num_separators=1, num_marks=3)
    return _siglip(config, rule, ((merged, inner), (inner, out), (out, hidden)))


def _internvl(config: Mapping[str, Any], hidden: int) -> VisionEncoder:
    size, patch = (_first(config[name]) for name in ("image_size", "patch_size"))
    rule = Tiles(size, patch, (size // patch // 2) ** 2, most=12, chooses="aspect")
    return _siglip(config, rule, ((4 * config["hidden_size"], hidden), (hidden, hidden)), patch)


def _pixtral(config: Mapping[str, Any], hidden: int) -> VisionEncoder:
    merge, width = config.get("spatial_merge_size", 1), config["hidden_size"]
    merged = ((width * merge**2, width),) if merge > 1 else ()
    rule = LongestSide(config["patch_size"], merge, config["image_size"])
    return _siglip(config, rule, (*merged, (width, hidden), (hidden, hidden)), is_gated=True)


def _siglip(
    config: Mapping[str, Any],
    rule: ImageRule,
    projections: tuple[tuple[int, int], ...],
    patch: int | None = None,
    *,
    is_gated: bool = False,
) -> VisionEncoder:
    return VisionEncoder(
        config["hidden_size"],
        config["num_hidden_layers"],
        config["num_attention_heads"],
        config["intermediate_size"],
        3 * (patch or config["patch_size"]) ** 2,
        rule,
        projections,
        is_gated=is_gated,
    )


def _first(size: int | list[int]) -> int:
    return size[0] if isinstance(size, list) else size


_OUTSIDE = ("spatial_merge_size",)  # of the encoder, and beside its block (Mistral 3)
# By how the type of the encoder or of the model begins.
_FAMILIES: Mapping[str, Callable[[Mapping[str, Any], int], VisionEncoder]] = {
    "qwen3_vl": _qwen3_vl,
    "qwen3_5": _qwen3_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "gemma3": _gemma3,
    "llama4": _llama4,
    "internvl": _internvl,
    "pixtral": _pixtral,
}
