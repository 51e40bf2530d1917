"""`Setup`: what ran according to a published result; and its scenario, of one instance.

Maps publishers' names of engines, models and formats. An instance is the smallest part that serves alone; instances
share the load evenly, as in round robin. If its device count is not stated, it is the submitter's likely choice: of
those that hold the weights and keep the TPOT limit at the stated rate the one that serves most (`layouts`)."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from perfmodel.errors import SpecError
from perfmodel.evidence.observation import recorded_engine
from perfmodel.evidence.sources.local import DeviceTable, LocalModel, local_model
from perfmodel.files.tables import load_table
from perfmodel.models.architecture import QuantizationSpec
from perfmodel.models.cards import load_model
from perfmodel.models.number_formats import with_quantization
from perfmodel.models.spec import ModelSpec
from perfmodel.specs.cluster import ClusterSpec, KvTransferSpec, PoolSpec
from perfmodel.specs.engine.description import describe_engine
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.scenario_file import load_hardware
from perfmodel.specs.traffic import Arrivals, Lengths, Sampling, Traffic

_WORDS = load_table("published_words")
_VERSION = re.compile(r"\d+\.\d+(?:\.\d+)*")
Load = Literal["saturated", "burst", "open", "closed", "first_token"]
_LLAMA = re.compile(r"^llama[-_]?(\d)")
_TARGET = re.compile(r"-99(\.9)?(?=$|-)")
_DECORATION = re.compile(_WORDS["decoration"])


@dataclass(frozen=True)
class Setup:
    """A model on devices under an engine and a load. Unknown counts are 0, texts "", figures None.

    device_class:  gpu, apu, cpu or accelerator
    num_devices:   over all instances; tp, pp: of one instance; instances: that share the load
    roles:         disaggregated (prefill, decode) workers
    engine:        a name of hardware_specs/engines; version: as recorded
    precision:     of weights, as recorded; kv_dtype: likewise
    prompt, answer: mean tokens; is_varied: lengths vary as in a data set
    load:          saturated: requests always wait; burst: num_requests at once; open: Poisson at `rate`; closed:
                   `concurrency` in flight; first_token: one request alone, up to its first token
    rate:          requests/s over all instances; concurrency: likewise
    beams:         decoded sequences per request
    is_in_process: the load generator calls the engine: no HTTP, no tokenisation
    is_compiled:   the whole step was compiled ahead and launches at once, prompts included
    tpot_limit_s, ttft_limit_s: the submitter's limits
    is_static:     a burst is one batch, from prompts to last tokens
    is_expert_parallel: whole experts on each device
    block_size:    tokens of a KV block"""

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
    is_static: bool = False
    is_expert_parallel: bool = False
    block_size: int = 0

    def instances_of(self, num_devices: int) -> int:
        """Instances of `num_devices` devices that share the load."""
        return self.instances if self.tp else max(1, self.num_devices // num_devices)


def engine_of(text: str, device_class: str = "gpu") -> tuple[str, str]:
    """(engine profile, version text) from a result's framework; of one that vLLM stands in for (TGI, OpenVINO, PyTorch
    alone) no version, which would be another's."""
    lower = text.lower()
    profile = next((name for name, words in _WORDS["engines"] if re.search(words, lower)), "")
    if not profile:
        return "vllm", ""
    if device_class == "cpu" and profile == "trtllm":
        profile = "vllm"
    behind = lower[lower.find(profile.removesuffix("llm")) :] if profile in lower else lower
    version = _VERSION.search(behind)
    return profile, version[0] if version else ""


def quantization_of(text: str, is_nvidia: bool = True) -> str | None:
    """`engine.quantization` of a result's precision; None for 16 bits and unknown ones. is_nvidia: FP4 has blocks of 16
    there, elsewhere those of OCP MX formats"""
    lower = text.lower()
    result = next((name for words, name in _WORDS["formats"] if re.search(words, lower)), None)
    return "mxfp4" if result == "nvfp4" and not is_nvidia and "nvfp4" not in lower else result


def model_names(text: str) -> Iterator[str]:
    """Names to look a model up by, from the given one to shorter ones."""
    yield text
    name = _TARGET.sub("", text.rpartition("/")[2].lower()).removesuffix(".gguf").replace("llama3_1", "llama-3.1")
    name = _LLAMA.sub(r"llama-\1", name.removeprefix("meta-"))
    name = re.sub(r"^gpt-?j(?![a-z])(-6b)?", "gpt-j-6b", name)
    yield name
    while _DECORATION.search(name):
        name = _DECORATION.sub("", name, count=1)
        yield name


_SPREAD = 0.8  # standard deviation over mean of a data set's lengths [assumed: answers of chats have 0.7 to 1]
_LONGEST = 4.0  # times the mean: data sets cut what is longer (OpenOrca at 1,024 tokens)
_MAX_SLOTS = 256  # if a server's is not stated
_KV_FORMATS = {"fp8": "fp8", "int8": "int8", "int4": "int4"}
_MAX_DEVICES = 64  # if an instance's is not stated
_MAX_SHARE = 0.95  # of what an instance of several workers may take of its devices' memory


@lru_cache(maxsize=512)
def served_model(name: str, precision: str, gguf_type: str = "", is_nvidia: bool = True) -> LocalModel:
    """The model that a result calls `name`, in its format; without a card a decoder of typical proportions. Raises
    SpecError without a size in its name. precision: as recorded; gguf_type: of its file, "" for a checkpoint;
    is_nvidia: see `quantization_of`"""
    card = _known(name)
    is_known = card is not None
    if card is None or gguf_type:
        active = 0.0 if card is not None else _active(name)
        spec = local_model(name if card is None else card.name, 0.0, active, gguf_type or "bf16", 0.0).spec
        if gguf_type:
            return LocalModel(spec, is_known)
    else:
        spec = card
    wanted = quantization_of(precision or name, is_nvidia)
    if wanted is None and spec.quantization.weights and "16" in precision:
        return LocalModel(replace(spec, quantization=QuantizationSpec()), is_known)
    return LocalModel(with_quantization(spec, wanted), is_known)


def has_card(name: str) -> bool:
    """Whether the shape of the model called `name` is known."""
    return _known(name) is not None


@lru_cache(maxsize=1024)
def _known(name: str) -> ModelSpec | None:
    """The card of the first name with one."""
    for item in model_names(name):
        with suppress(SpecError, OSError, ValueError):
            return load_model(item)
    return None


def _active(name: str) -> float:
    """Active parameters in a name ("35B-A3B"), or 0."""
    for part in name.replace("_", "-").split("-"):
        if part[:1] in "aA" and part[-1:] in "bB" and part[1:-1].replace(".", "", 1).isdigit():
            return 1e9 * float(part[1:-1])
    return 0.0


def served_device(setup: Setup, table: DeviceTable) -> HardwareSpec:
    """The device of a result: by name, by shorter names, then from `table`. Raises SpecError if unknown."""
    result = known_device(setup.device)
    if result is not None and (result.kind == "cpu") == (setup.device_class == "cpu"):
        return result
    return table.device(setup.device, setup.device_class)


def known_device(name: str) -> HardwareSpec | None:
    """The device that a result calls `name`, or begins with, as in "h200-nv"; None without a file."""
    words = name.split("-")
    for count in range(len(words), 0, -1):
        with suppress(SpecError, OSError, ValueError):
            return load_hardware("-".join(words[:count]))
    return None


def layouts(setup: Setup, hardware: HardwareSpec) -> list[int]:
    """Possible device counts of an instance: as stated, else powers of two."""
    if setup.tp:
        return [setup.tp]
    most = min(setup.num_devices, hardware.declared.max_devices, _MAX_DEVICES)
    return [1 << power for power in range(most.bit_length())]


def scenario_of(name: str, setup: Setup, table: DeviceTable, tp: int) -> tuple[Scenario, LocalModel]:
    """One instance of `setup`, called `name`, over `tp` devices, under its share of the load. table: devices without a
    file. Raises SpecError for invalid setups."""
    hardware = served_device(setup, table)
    if setup.power_cap_w:
        hardware = hardware.model_copy(update={"power_cap_w": setup.power_cap_w})
    model = served_model(setup.model, setup.precision, setup.gguf_type, hardware.maker in (None, "nvidia"))
    engine = _engine(setup, hardware, tp)
    traffic = _traffic(setup, setup.instances_of(tp))
    sampling = Sampling(method="greedy" if setup.is_in_process else "default")
    scenario = Scenario(
        name=name, model=model.spec, hardware=hardware, engine=engine, traffic=traffic, sampling=sampling
    )
    if setup.roles is None:
        return scenario, model
    apart = engine.model_copy(update={"gpu_memory_utilization": min(engine.gpu_memory_utilization, _MAX_SHARE)})
    roles = zip(("prefill", "decode"), setup.roles, strict=True)
    pools = tuple(PoolSpec(role=role, replicas=count, engine=apart) for role, count in roles)
    return scenario.model_copy(update={"cluster": ClusterSpec(pools=pools, kv_transfer=KvTransferSpec())}), model


def _engine(setup: Setup, hardware: HardwareSpec, tp: int) -> EngineSpec:
    facts = describe_engine(setup.engine).facts
    slots = setup.max_num_seqs or max(_MAX_SLOTS, -(-setup.concurrency // max(setup.instances, 1)))
    template = 0 if setup.is_in_process else 64  # tokens that a server's chat template may add
    longest = round((_LONGEST if setup.is_varied else 1.0) * (setup.prompt + setup.answer)) + template
    arguments: dict[str, Any] = {"max_num_seqs": slots, "max_model_len": longest, "enable_prefix_caching": False}
    if facts.backends:
        words = setup.version.removeprefix("b").split()  # of a build, "b9010 d05fe1d7d"
        arguments["max_num_seqs"] = max(1, setup.concurrency)
        version = words[0] if words and words[0].isdigit() else ""
        if setup.max_num_batched_tokens:
            arguments["max_num_batched_tokens"] = setup.max_num_batched_tokens
        arguments["layer_split"] = setup.pp
        return recorded_engine(setup.engine, version, hardware, arguments)
    arguments |= {
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": setup.pp,
        "kv_cache_dtype": _KV_FORMATS.get(setup.kv_dtype, "auto"),
        "enforce_eager": setup.is_eager,
        "enable_expert_parallel": setup.is_expert_parallel,
        **({"batching": "static"} if setup.is_static else {}),
        **({"block_size": setup.block_size} if setup.block_size else {}),
    }
    if setup.load in ("saturated", "open"):  # tuned servers compute long prompts in chunks, whatever the default
        arguments["enable_chunked_prefill"] = True
    budget, need = setup.max_num_batched_tokens, slots
    if not budget:  # the engine's default, or as many as its slots and whole prompts need, or a preempted request
        usual = recorded_engine(setup.engine, setup.version, hardware, {"max_num_seqs": 1})
        budget = usual.max_num_batched_tokens
        if not usual.rules.chunks_prompts:
            need += round(_LONGEST * setup.prompt if setup.is_varied else setup.prompt)
            budget = max(budget, longest)
    arguments["max_num_batched_tokens"] = max(budget, need)
    return recorded_engine(setup.engine, setup.version, hardware, arguments)


def _traffic(setup: Setup, instances: int) -> Traffic:
    def lengths(mean: int) -> Lengths:
        if not setup.is_varied or mean < 4:
            return Lengths(distribution="fixed", value=max(mean, 1))
        return Lengths(distribution="lognormal", mean=mean, std=_SPREAD * mean, max=round(_LONGEST * mean))

    if setup.load == "closed":
        arrivals = Arrivals(process="closed_loop", concurrency=max(1, round(setup.concurrency / instances)))
    elif setup.load == "open":
        # Round robin over k instances hands each of them every k-th arrival.
        arrivals = Arrivals(process="gamma", rate=setup.rate / instances, cv=instances**-0.5)
    else:
        arrivals = Arrivals(process="burst")
    count = max(1, round(setup.num_requests / instances))
    prompts, answers = lengths(setup.prompt), lengths(setup.answer)
    return Traffic(arrivals=arrivals, num_requests=count, input_tokens=prompts, output_tokens=answers)
