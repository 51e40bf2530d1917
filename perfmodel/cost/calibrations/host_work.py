"""Work of libraries on the host: grammars of required shapes, suffix decoding's trees, and images.

    compile_s, again_s   a grammar that the server has not compiled yet, and one that it has, by one thread
    mask_s               the mask of a token that an answer may have next, and taking that token in
    step_s               of a sequence: its newest tokens enter its tree, which is asked for a draft
    prompt_token_s       of a prompt, whose tree is made with the request's first token

    pixel_s, byte_s      of an image's file, which is decoded
    image_s, pixel_s, encoded_pixel_s   of a model's processor: an image, its pixels, and those that the encoder gets

Measured by `benchmarks/host_libraries.py` and `host_images.py` on one core; a vocabulary of another size is taken to
cost the same."""

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from pydantic import Field

from perfmodel.files.base import Spec
from perfmodel.files.catalog import data_dir
from perfmodel.files.fitted import CommittedFits, load_fitted
from perfmodel.specs.scenario import Scenario


class GrammarFit(Spec):
    """Seconds of one backend, which of vLLM's `auto` is xgrammar; library: and its version."""

    library: str
    compile_s: float = Field(ge=0, le=10)
    again_s: float = Field(ge=0, le=1)
    mask_s: float = Field(ge=0, le=1e-2)


class SuffixFit(Spec):
    """Seconds of suffix decoding."""

    library: str
    step_s: float = Field(ge=0, le=1e-3)
    prompt_token_s: float = Field(ge=0, le=1e-4)


class HostWork(CommittedFits):
    """grammars: by the backend's name in vLLM"""

    grammars: Mapping[str, GrammarFit]
    suffix: SuffixFit


@cache
def load_host_work() -> HostWork:
    """The committed measurements. Raises SpecError for a file that is missing or malformed."""
    return load_fitted(HostWork, data_dir("calibrations") / "host_libraries.yaml")


def grammar_fit(scenario: Scenario) -> GrammarFit | None:
    """What shapes of the scenario's answers cost its engine's host; None where none has one."""
    shapes = scenario.traffic.structured_outputs
    if shapes is None:
        return None
    backend = scenario.engine.structured_outputs_config.backend
    fit = load_host_work().grammars["xgrammar" if backend == "auto" else backend]
    given = {"compile_s": shapes.compile_s, "mask_s": shapes.mask_s}
    return fit.model_copy(update={name: value for name, value in given.items() if value is not None})


class DecoderFit(Spec):
    """Seconds of a kind of file."""

    pixel_s: float = Field(ge=0, le=1e-6)
    byte_s: float = Field(default=0.0, ge=0, le=1e-6)


class ProcessorFit(Spec):
    """Seconds of a family's processor of images, with the message to the engine."""

    image_s: float = Field(ge=0, le=1)
    pixel_s: float = Field(ge=0, le=1e-6)
    encoded_pixel_s: float = Field(ge=0, le=1e-6)


class ImageWork(CommittedFits):
    """decoders: by the kind of file; processors: by the model's family"""

    decoders: Mapping[str, DecoderFit]
    processors: Mapping[str, ProcessorFit]


@cache
def load_image_work() -> ImageWork:
    """The committed measurements. Raises SpecError for a file that is missing or malformed."""
    return load_fitted(ImageWork, data_dir("calibrations") / "host_images.yaml")


class ImageSeconds(NamedTuple):
    """Work for an image: to decode its file, and to process it; num_bytes: that its encoder gets"""

    decode_s: float
    process_s: float
    num_bytes: int


class HostImages(NamedTuple):
    """Work for images of each of the traffic's sizes; request_s, new_request_s: see `ImageRequests`"""

    sizes: tuple[ImageSeconds, ...]
    request_s: float
    new_request_s: float

    def times(self, factor: float) -> "HostImages":
        sizes = [ImageSeconds(factor * decode, factor * process, size) for decode, process, size in self.sizes]
        return HostImages(tuple(sizes), factor * self.request_s, factor * self.new_request_s)


def host_images(scenario: Scenario) -> HostImages | None:
    """Work for the scenario's images; None without. A video's file costs nothing, as its decoder was not measured."""
    images, vision = scenario.traffic.images, scenario.model.vision
    own = scenario.engine.described.facts.api_server_images
    if images is None or vision is None or own is None:
        return None
    work, sizes = load_image_work(), []
    decoder, fit = work.decoders[images.encoding], work.processors[vision.processor]
    for size in images.sizes:
        grid, pixels = vision.of_image(size.width, size.height, size.num_frames)[0], size.width * size.height
        decode_s = pixels * (decoder.pixel_s + images.bytes_per_pixel * decoder.byte_s) * (size.num_frames == 1)
        encoded = grid.num_patches * vision.rule.patch**2 * min(size.num_frames, vision.frames_per_patch)
        process_s = fit.image_s + fit.pixel_s * pixels * size.num_frames + fit.encoded_pixel_s * encoded
        num_bytes = grid.num_patches * vision.patch_elements * 2  # bfloat16
        sizes.append(ImageSeconds(decode_s, own.new_image_s + process_s, num_bytes))
    return HostImages(tuple(sizes), own.request_s, own.new_request_s).times(scenario.overheads.host)
