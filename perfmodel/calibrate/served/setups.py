"""What ran, as a published result states it: `Setup`, and `ServedRow`, a setup with its measured figures.

Names in such tables are their publishers': which engine, which model and which number format a text stands for is here.
"""

__all__ = ["Load", "ServedRow", "Setup", "engine_of", "model_names", "quantization_of"]

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

# Engines by words of their names; the first that fits counts. What none fits batches continuously, as vLLM does.
_ENGINES = (
    ("sglang", "sglang"),
    ("vllm", "vllm"),
    ("llamacpp", "llama-server|llama.cpp|llamacpp|llama_cpp|ollama|lemonade|llamafile|localscore"),
    ("mlx", "mlx"),
    ("trtllm", "tensorrt|trt|cuda"),
)
_VERSION = re.compile(r"\d+\.\d+(?:\.\d+)*")
# Formats of weights by words of what a result says of them.
_FORMATS = (
    ("bfp8|bfp4", "fp8"),
    ("mxfp4", "mxfp4"),
    ("nvfp4", "nvfp4"),
    ("fp4", "nvfp4"),
    ("fp8|float8", "fp8"),
    ("w4a16|awq|gptq|autoround|int4|4bit|w4|q4|exl3|exl2|int2", "int4"),
    ("smoothquant|int8|w8a8|8bit|q8", "int8"),
)
Load = Literal["saturated", "burst", "open", "closed", "first_token"]
_LLAMA = re.compile(r"^llama[-_]?(\d)")
_TARGET = re.compile(r"-99(\.9)?(?=$|-)")
_DECORATION = re.compile(
    r"[-_](instruct|chat|hf|it|base|fp8|fp4|nvfp4|mxfp4|awq|gptq|autoround|dynamic|int4|int8|4bit|8bit|kv|quark|pre|dyn|"
    r"trtllm|v0\.\d|\d{4}|qat|mobile|ct|f16|bf16|gguf|quantized|w4a16|w8a8|interactive)(?=$|[-_.])"
)


@dataclass(frozen=True)
class Setup:
    """A model on devices under an engine and a load. Counts are 0, texts "" and figures None where nothing is said.

    device_class:  gpu, apu, cpu or accelerator
    num_devices:   of all instances together; tp, pp: of one instance; instances: that share the load
    roles:         workers (prefill, decode) that are apart
    engine:        a name of hardware_specs/engines; version: as it was recorded
    precision:     of the weights, as it was recorded; kv_dtype: likewise
    prompt, answer: mean tokens; is_varied: lengths of requests differ as a data set's do
    load:          saturated: more requests wait than run; burst: num_requests at once; open: Poisson at `rate`; closed:
                   `concurrency` in flight; first_token: one request alone, up to its first token
    rate:          requests per second of all instances; concurrency: likewise
    beams:         sequences that a request decodes
    is_in_process: the load generator calls the engine: no HTTP, no tokenisation
    is_compiled:   the whole step was compiled ahead and is launched at once, with prompts too
    tpot_limit_s, ttft_limit_s: that the submitter had to keep
    steps_at_once: that the engine plans before it looks at arrivals again
    is_static:     all requests of a burst are one batch, from their prompts to their last tokens
    """

    device: str
    device_class: str
    num_devices: int
    engine: str
    version: str
    model: str
    precision: str
    kv_dtype: str
    load: Load
    prompt: int
    answer: int
    tp: int = 0
    pp: int = 1
    instances: int = 1
    roles: tuple[int, int] | None = None
    is_varied: bool = False
    rate: float = 0.0
    concurrency: int = 0
    num_requests: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    gguf_type: str = ""
    beams: int = 1
    is_eager: bool = False
    is_in_process: bool = False
    is_compiled: bool = False
    power_cap_w: float = 0.0
    tpot_limit_s: float = 0.0
    ttft_limit_s: float = 0.0
    steps_at_once: int = 1
    is_static: bool = False


@dataclass(frozen=True)
class ServedRow:
    """A result: its setup and what was measured (tokens/s, or ms), by metric.

    labels: groups that it belongs to, by dimension; group: rows of one setting share it
    flags:  what its table says of its worth; is_apart: they say that it does not count
    """

    row_id: str
    setup: Setup
    measured: Mapping[str, float]
    labels: Mapping[str, str]
    group: str
    flags: str = ""
    is_apart: bool = False


def engine_of(text: str, device_class: str = "gpu") -> tuple[str, str]:
    """(engine's profile, version as text) of what a result calls its framework."""
    lower = text.lower()
    profile = next((name for name, words in _ENGINES if re.search(words, lower)), "vllm")
    if device_class == "cpu" and profile == "trtllm":
        profile = "vllm"
    behind = lower[lower.find(profile.removesuffix("llm")) :] if profile in lower else lower
    version = _VERSION.search(behind)
    return profile, version[0] if version else ""


def quantization_of(text: str, is_nvidia: bool = True) -> str | None:
    """The `engine.quantization` that a result's precision stands for; None for 16 bits and what says nothing.

    is_nvidia: FP4 has blocks of 16 there, elsewhere those of the OCP's MX formats
    """
    lower = text.lower()
    found = next((name for words, name in _FORMATS if re.search(words, lower)), None)
    return "mxfp4" if found == "nvfp4" and not is_nvidia and "nvfp4" not in lower else found


def model_names(text: str) -> Iterator[str]:
    """Names to look a model up by, the one that was given first, then less and less of it."""
    yield text
    name = _TARGET.sub("", text.rpartition("/")[2].lower()).removesuffix(".gguf").replace("llama3_1", "llama-3.1")
    name = _LLAMA.sub(r"llama-\1", name.removeprefix("meta-"))
    name = re.sub(r"^gpt-?j(?![a-z])(-6b)?", "gpt-j-6b", name)
    yield name
    while _DECORATION.search(name):
        name = _DECORATION.sub("", name, count=1)
        yield name
