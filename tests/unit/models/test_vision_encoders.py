"""Tokens of images by the families' rules, counted by hand, and the size of encoders."""

import pytest

from perfmodel.models.cards import list_models, load_model
from perfmodel.models.vision import ImageGrid, VisionEncoder, vision_encoder

INTERNVL = {
    "model_type": "internvl_vision",
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "image_size": [448, 448],
    "patch_size": [14, 14],
}
PIXTRAL = {**INTERNVL, "model_type": "pixtral", "image_size": 1024, "patch_size": 16}


def encoder_of(name: str) -> VisionEncoder:
    vision = load_model(name).vision
    assert vision is not None
    return vision


def read(config: dict[str, object], **others: object) -> VisionEncoder:
    vision = vision_encoder({"model_type": "any", "vision_config": config, **others}, 4096)
    assert vision is not None
    return vision


@pytest.mark.parametrize(
    ("model", "size", "tokens"),
    [
        # Sides in multiples of 32: 23 x 40 (720 / 32 = 22.5 is rounded to even, as Python does): 22 x 40.
        ("qwen3-vl-8b", (1280, 720), 22 * 40),
        ("qwen3-vl-8b", (1024, 1024), 32 * 32),
        # Below 65,536 pixels: both sides grow by sqrt(65,536 / 100^2) = 2.56 to 256.
        ("qwen3-vl-8b", (100, 100), 8 * 8),
        # Above 16,777,216 pixels: 8,192^2 shrinks by 2 to 4,096 = 128 x 32.
        ("qwen3-vl-8b", (8192, 8192), 128 * 128),
        # Multiples of 28: the example of Qwen2-VL's report, 224 x 224 pixels are 8 x 8 = 64 tokens (66 with its marks).
        ("qwen2.5-vl-7b", (224, 224), 64),
        ("qwen2.5-vl-7b", (1280, 720), 26 * 46),
        ("gemma-3-27b", (1280, 720), 256),
        ("gemma-3-27b", (64, 3000), 256),
        # 336 x 336 fits one tile; 672 x 336 two and a thumbnail, with a separator behind each of the two.
        ("llama-4-scout", (336, 336), 144),
        ("llama-4-scout", (672, 336), 3 * 144 + 2),
        # No canvas of 16 tiles holds 6,000 x 6,000; 4 x 4 shrinks it least.
        ("llama-4-scout", (6000, 6000), 17 * 144 + 16),
        # 1,280 x 720: three rows of four tiles hold it with the least upscaling, 1,008 / 720 against 1,344 / 1,280.
        ("llama-4-scout", (1280, 720), 13 * 144 + 12),
    ],
)
def test_tokens_of_an_image(model: str, size: tuple[int, int], tokens: int) -> None:
    assert encoder_of(model).of_image(*size)[1] == tokens


def test_internvl_takes_the_canvas_nearest_in_aspect() -> None:
    """16:9 is nearest to 2:1, of which 4 x 2 tiles are preferred to 2 x 1: the image fills more than half of them."""
    vision = read(INTERNVL)
    assert vision.of_image(1280, 720)[1] == (8 + 1) * 256
    assert vision.of_image(448, 448)[1] == 256
    assert vision.of_image(448, 448, 8) == (ImageGrid(8, 32, 32), 8 * 256)  # frames have a tile each


def test_pixtral_ends_each_row_with_a_token() -> None:
    """1,280 x 720 shrinks to 1,024 x 576: 36 rows of 64 patches and a break; merged by 2, 18 rows of 32 and a break."""
    assert read(PIXTRAL).of_image(1280, 720)[1] == 36 * 65
    assert read(PIXTRAL, spatial_merge_size=2).of_image(1280, 720)[1] == 18 * 33


def test_videos_merge_two_frames() -> None:
    """Qwen2.5-VL limits each frame to 768 x 28^2 pixels: 1,280 x 720 = 921,600 shrinks by 1.237 to 20 x 36 tokens."""
    assert encoder_of("qwen2.5-vl-7b").of_image(1280, 720, 16)[1] == 8 * 20 * 36
    assert encoder_of("qwen3-vl-8b").of_image(640, 480, 16)[1] == 8 * 15 * 20
    # 25,165,824 pixels over 512 frames are 49,152 a frame: 640 x 480 shrinks by 2.5 to 256 x 192.
    assert encoder_of("qwen3-vl-8b").of_image(640, 480, 512)[1] == 256 * 8 * 6


@pytest.mark.parametrize("model", [name for name in list_models() if "-vl-" in name or name.startswith("llama-4")])
def test_counted_weights_are_the_cards_own(model: str) -> None:
    """The cards' figures have biases, norms and position tables besides, less than a hundredth."""
    spec = load_model(model)
    assert spec.vision is not None
    assert 0.99 < spec.vision.num_params / spec.extra_params <= 1


def test_the_largest_image() -> None:
    assert encoder_of("qwen3-vl-8b").max_tokens == 16_777_216 // 32**2
    assert encoder_of("llama-4-scout").max_tokens == 17 * 144 + 16
    assert read(INTERNVL).max_tokens == 13 * 256  # 4:3 fills 12 tiles


@pytest.mark.parametrize(
    "change", [{"intermediate_size": None}, {"patch_size": 0}, {"patch_size": "large"}, {"model_type": "moonvit"}]
)
def test_what_is_not_known_of_an_encoder_leaves_the_text_decoder(change: dict[str, object]) -> None:
    config = {name: value for name, value in {**PIXTRAL, **change}.items() if value is not None}
    assert vision_encoder({"vision_config": config}, 4096) is None
    assert vision_encoder({"vision_config": {**config, "model_type": "qwen3_vl"}}, 4096) is None
    assert load_model("llama-3.1-8b").vision is None
