"""`VisionEncoder`: a model's encoder of images and videos, and how many tokens of a prompt an image becomes.

A rule per family turns pixels into an `ImageGrid` of patches and that into tokens, as its processor does:

Qwen-VL    sides rounded to multiples of patch x merge, shrunk or grown into [min, max] pixels; tokens are merged
           squares of patches; videos two frames at a time, their pixels counted per frame (2.5) or altogether (3)
Pixtral    the longest side at most `longest`; merged squares of patches, and a break behind each row
tiles      Llama 4: the canvas of tiles that an image needs the least upscaling, else downscaling, for; InternVL: the
           canvas nearest in aspect; a thumbnail where there are several; Gemma 3: always one (no pan and scan)

Source: Hugging Face transformers 5, the processors of qwen2_vl, qwen3_vl, pixtral, gemma3, llama4 and got_ocr2
(Apache-2.0); limits of pixels from the models' preprocessor_config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, floor, sqrt
from typing import Any, Literal, NamedTuple

_HUGE = 20_000  # pixels of a side: larger than any limit
_VIDEO_PIXELS = (128 * 28**2, 768 * 28**2)  # of a frame (Qwen2.5-VL)


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
    """Qwen-VL's. pixels: least and most of an image; video_pixels: of a frame, or with `sums_frames` of all frames"""

    patch: int
    merge: int
    pixels: tuple[int, int]
    video_pixels: tuple[int, int]
    sums_frames: bool
    frames_per_patch: int
    num_marks: int = 2  # tokens beside an image's own: its start and end

    def grid(self, width: int, height: int, num_frames: int) -> ImageGrid:
        least, most = self.video_pixels if num_frames > 1 else self.pixels
        side, steps = self.patch * self.merge, max(round(num_frames / self.frames_per_patch), 1)
        rows, columns = max(round(height / side), 1), max(round(width / side), 1)
        counted, rounded = (
            (num_frames, steps * self.frames_per_patch) if self.sums_frames and num_frames > 1 else (1, 1)
        )
        pixels, area = rounded * rows * columns * side**2, counted * width * height
        if pixels > most:
            factor = sqrt(area / most) * side
            rows, columns = max(floor(height / factor), 1), max(floor(width / factor), 1)
        elif pixels < least:
            factor = sqrt(least / area) / side
            rows, columns = ceil(height * factor), ceil(width * factor)
        return ImageGrid(steps, rows * self.merge, columns * self.merge)

    def num_tokens(self, grid: ImageGrid) -> int:
        return grid.num_patches // self.merge**2


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


@dataclass(frozen=True, slots=True)
class ImageTiles:
    """Llama 4's, InternVL's and Gemma 3's. tile: pixels of a side; num_separators: tokens behind all but the last"""

    tile: int
    patch: int
    tokens: int
    most: int
    chooses: Literal["best_fit", "aspect"]
    num_marks: int
    num_separators: int = 0

    def grid(self, width: int, height: int, num_frames: int) -> ImageGrid:
        choose = self._best_fit if self.chooses == "best_fit" else self._nearest
        tiles = choose(width, height) if num_frames == 1 else 1
        return ImageGrid(num_frames * (tiles + (tiles > 1)), self.tile // self.patch, self.tile // self.patch)

    def num_tokens(self, grid: ImageGrid) -> int:
        return grid.sequences * self.tokens + (grid.sequences - 1) * self.num_separators

    @property
    def _canvases(self) -> list[tuple[int, int]]:
        """(rows, columns), the smallest first."""
        canvases = [(r, c) for r in range(1, self.most + 1) for c in range(1, self.most // r + 1)]
        return sorted(canvases, key=lambda canvas: canvas[0] * canvas[1])

    def _best_fit(self, width: int, height: int) -> int:
        scales = [(min(c * self.tile / width, r * self.tile / height), r * c) for r, c in self._canvases]
        return min(scales, key=lambda fit: (fit[0] < 1, fit[0] if fit[0] >= 1 else -fit[0]))[1]

    def _nearest(self, width: int, height: int) -> int:
        """The largest of the nearest canvases that the image fills by half, else the smallest."""
        distances = [(abs(width / height - c / r), r * c) for r, c in self._canvases]
        nearest = [tiles for distance, tiles in distances if distance == min(distances)[0]]
        return max((tiles for tiles in nearest if tiles < 2 * width * height / self.tile**2), default=nearest[0])


ImageRule = DynamicResolution | LongestSide | ImageTiles


@dataclass(frozen=True, slots=True)
class VisionEncoder:
    """An encoder of transformer blocks over patches. Sizes in elements.

    processor:      the family whose processor of images it has; patch_elements: inputs of a patch's embedding
    projections:    (inputs, outputs) of the products that each token of the prompt goes through
    window:         patches of a side that see each other, in all but `num_full_layers` layers; None: all see all"""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    patch_elements: int
    rule: ImageRule
    projections: tuple[tuple[int, int], ...]
    processor: str
    is_gated: bool = False
    window: int | None = None
    num_full_layers: int = 0

    @property
    def takes_videos(self) -> bool:
        """Whether several frames may be one input."""
        return isinstance(self.rule, DynamicResolution) or (isinstance(self.rule, ImageTiles) and self.rule.most == 12)

    @property
    def frames_per_patch(self) -> int:
        """Frames of a video that are one input."""
        return getattr(self.rule, "frames_per_patch", 1)

    @property
    def num_params(self) -> int:
        """Weights of its products: 4 d^2 + 2 d f a layer (3 d f with a gate), the patches' embedding, projections."""
        d, ups = self.hidden_size, 3 if self.is_gated else 2
        projected = sum(inputs * outputs for inputs, outputs in self.projections)
        return self.num_layers * (4 * d * d + ups * d * self.intermediate_size) + self.patch_elements * d + projected

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest image."""
        aspects = ((1, 1), (4, 3), (3, 4))
        return max(self.of_image(_HUGE * width, _HUGE * height)[1] for width, height in aspects)

    def of_image(self, width: int, height: int, num_frames: int = 1) -> tuple[ImageGrid, int]:
        """The grid of an image, or of a video of several frames, in pixels, and its tokens."""
        grid = self.rule.grid(width, height, num_frames)
        return grid, self.rule.num_tokens(grid)


def vision_encoder(file: Mapping[str, Any], hidden_size: int) -> VisionEncoder | None:
    """The encoder of a config.json's `vision_config`; None without one, or where it lacks what its family's rule needs.

    hidden_size: of the text decoder"""
    config = file.get("vision_config")
    if not isinstance(config, Mapping):
        return None
    types = f"{config.get('model_type', '')} {file.get('model_type', '')}"
    try:
        vision: VisionEncoder | None
        if "qwen3_vl" in types or "qwen3_5" in types:
            vision = _qwen(config, hidden_size, (65_536, 16_777_216), (4096, 25_165_824), sums_frames=True)
        elif "qwen2_5_vl" in types:
            vision = _qwen(config, hidden_size, (3136, 12_845_056), _VIDEO_PIXELS, sums_frames=False)
        else:
            vision = _plain(config, hidden_size, types, file.get("spatial_merge_size", 1))
        return vision if vision is not None and vision.num_params > 0 and vision.max_tokens > 0 else None
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return None


def _qwen(
    config: Mapping[str, Any], hidden: int, pixels: tuple[int, int], video: tuple[int, int], *, sums_frames: bool
) -> VisionEncoder:
    patch, merge, width = config["patch_size"], config["spatial_merge_size"], config["hidden_size"]
    frames, merged = config.get("temporal_patch_size", 2), width * merge**2
    num_mergers = 1 + len(config.get("deepstack_visual_indexes", ()))
    return VisionEncoder(
        width,
        config["depth"],
        config["num_heads"],
        config["intermediate_size"],
        3 * frames * patch**2,
        DynamicResolution(patch, merge, pixels, video, sums_frames, frames),
        ((merged, merged), (merged, config.get("out_hidden_size", hidden))) * num_mergers,
        "qwen_vl",
        is_gated=config.get("hidden_act") == "silu",
        window=config["window_size"] // patch if "window_size" in config else None,
        num_full_layers=len(config.get("fullatt_block_indexes", ())),
    )


def _plain(config: Mapping[str, Any], hidden: int, types: str, merge: int) -> VisionEncoder | None:
    """Encoders with one kind of layer."""
    width = config["hidden_size"]
    size, patch = (value[0] if isinstance(value := config[n], list) else value for n in ("image_size", "patch_size"))
    merged = round(width / config.get("pixel_shuffle_ratio", 0.5) ** 2)
    rule: ImageRule
    projections: tuple[tuple[int, int], ...]
    if "gemma3" in types:
        rule, projections = ImageTiles(size, patch, 256, 1, "best_fit", num_marks=4), ((width, hidden),)
    elif "llama4" in types:
        inner, out = config.get("projector_input_dim", 4096), config.get("projector_output_dim", 4096)
        rule = ImageTiles(size, patch, (size // patch) ** 2 * width // merged, 16, "best_fit", 3, num_separators=1)
        projections = ((merged, inner), (inner, out), (out, hidden))
    elif "internvl" in types:
        rule = ImageTiles(size, patch, (size // patch) ** 2 * width // merged, 12, "aspect", num_marks=2)
        projections = ((merged, hidden), (hidden, hidden))
    elif "pixtral" in types:
        merger = ((width * merge**2, width),) if merge > 1 else ()
        rule, projections = LongestSide(patch, merge, size), (*merger, (width, hidden), (hidden, hidden))
    else:
        return None
    layers, heads, inner = (config[n] for n in ("num_hidden_layers", "num_attention_heads", "intermediate_size"))
    elements = 3 * patch**2
    family = next(name for name in ("gemma3", "llama4", "internvl", "pixtral") if name in types)
    return VisionEncoder(width, layers, heads, inner, elements, rule, projections, family, is_gated="pixtral" in types)
