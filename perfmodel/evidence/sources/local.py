"""Single-machine figures (`llama_bench.csv`): their device, model and steps.

Devices without a file are in a `devices.csv` beside the table. Models without a card are decoders of typical
proportions: width 110 times the layers, heads of 128, tied embeddings below 4e9 parameters, with the row's total and
active parameters. Number formats are the file type's, scaled to the file's bytes: types mix formats by vendor.

    tg N            N steps of one token per sequence, at the mean depth of depth + N / 2
    pp N            a prompt of N tokens in steps of the token budget
    LocalScore      mean rate over nine shapes, each a prompt and a generation after it (README of cjpais/localscore)
    llama-server    generation after a prompt of num_prompt tokens
    several devices pipeline parallel: layers are split, micro-batches follow one another"""

import datetime
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from perfmodel.errors import SpecError
from perfmodel.evidence.observation import Entry, Observation, Reasons, described, first_problem, lenient_rows, named
from perfmodel.files.tables import load_table
from perfmodel.models.architecture import Attention, DenseFFN, Layer, MoEFFN, QuantizationSpec
from perfmodel.models.cards import load_model
from perfmodel.models.number_formats import BITS_PER_WEIGHT, with_dtype, with_quantization
from perfmodel.models.params import count_parameters, weight_bytes
from perfmodel.models.spec import COMPONENTS, ModelSpec
from perfmodel.models.weights.gguf import GGUF_MIXES
from perfmodel.ops.work import BatchShape, decode_shape
from perfmodel.specs.engine.description import load_engine_description
from perfmodel.specs.engine.devices import with_defaults
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.scenario_file import load_hardware
from perfmodel.specs.traffic import Arrivals, Lengths, Traffic

# Flags of effects outside any device model: such rows are listed apart and never fitted.
_APART = ("slow", "anomalous", "weak host", "power limit", "patched-kernel", "rpc")
_NEEDED = ("id", "device", "device_class", "backend", "model", "gguf_type", "test", "tokens_per_s", "group")
METRICS = {"tg": "decode_tokens_per_s", "pp": "prompt_tokens_per_s"}


@dataclass(frozen=True)
class LocalSetup:
    """A single-machine test.

    params, active_params, file_size_bytes, depth, ...: 0 if unknown
    test:    pp (prompts) or tg (generation)
    batch:   sequences; the rate is over all of them
    flash:   attention without materialized scores; None if unknown
    ubatch:  tokens of a micro-batch"""

    device: str
    device_class: str
    num_devices: int
    tool: str
    backend: str
    build: str
    model: str
    gguf_type: str
    test: str
    params: float = 0.0
    active_params: float = 0.0
    file_size_bytes: float = 0.0
    flash: bool | None = None
    kv_type: str = ""
    num_prompt: int = 0
    num_generated: int = 0
    depth: int = 0
    batch: int = 1
    ubatch: int = 0
    backend_detail: str = ""
    date: datetime.date | None = None

    @property
    def metric(self) -> str:
        """The rate that the test measures."""
        return METRICS[self.test]

    def stored_model(self) -> "LocalModel":
        """The model as its file stores it."""
        return local_model(self.model, self.params, self.active_params, self.gguf_type, self.file_size_bytes)


def read_local_rows(path: str | Path) -> tuple[list[Observation], Reasons]:
    """Rows of a table, plain or gzipped, and (row, reason) of others. Raises SpecError for a missing or other file."""
    return described(named(lenient_rows(path, _NEEDED, "local figures")), _row)


def _row(name: str, cells: Entry) -> Observation:
    rate = _number(cells, "tokens_per_s")
    if not rate > 0:
        raise SpecError("no figure in tokens_per_s")
    if cells["test"] not in METRICS:
        raise SpecError(f"test is {cells['test']!r}, compared are pp and tg")
    texts = ("device", "device_class", "tool", "backend", "backend_detail", "build", "model", "gguf_type", "test")
    flash, flags = cells.get("flash_attn", ""), cells.get("flags", "")
    setup = LocalSetup(
        **{key: cells.get(key, "") for key in texts},
        num_devices=max(1, int(_number(cells, "num_devices"))),
        date=_date(cells.get("date", "")),
        params=_number(cells, "model_params"),
        active_params=_number(cells, "active_params"),
        file_size_bytes=_number(cells, "file_size_bytes"),
        flash=None if flash == "" else flash != "0",
        kv_type=cells.get("kv_type", "").partition("/")[0],
        num_prompt=int(_number(cells, "n_prompt")),
        num_generated=int(_number(cells, "n_gen")),
        depth=int(_number(cells, "depth")),
        batch=max(1, int(_number(cells, "batch"))),
        ubatch=int(_number(cells, "n_ubatch")),
    )
    labels = {
        "device": setup.device,
        "device class": setup.device_class,
        "backend": setup.backend,
        "model": setup.model,
        "gguf type": setup.gguf_type,
        "test": setup.test,
        "engine": setup.tool or "not said",
    }
    tool = setup.tool or "tool not said"
    return Observation(
        name,
        setup,
        {METRICS[setup.test]: rate},
        label=f"{setup.model} {setup.gguf_type} on {setup.device}, {setup.backend}, {tool}",
        labels=labels,
        group=cells["group"],
        source=cells.get("source", ""),
        flags=flags,
        is_reliable=not any(word in flags for word in _APART),
    )


def _number(cells: Entry, name: str) -> float:
    return float(cells.get(name) or 0.0)


def _date(text: str) -> datetime.date | None:
    """The day; the first of a month, or of the earlier of two ("2025-11/2026-02")."""
    text = text.partition("/")[0]
    try:
        return datetime.date.fromisoformat(text if len(text) > 7 else f"{text}-01")
    except ValueError:
        return None


# ---------------------------------------------------------------- devices

_TABLE = load_table("published_words")
_COUNT = re.compile(r"\d+")
_DEFAULT_BYTES = 64e9  # of memory that a table leaves open: figures do not depend on it
_VECTOR_OPS = 8.0  # FLOPs per core and clock, where a table has no rate: four lanes that multiply and add


class DeviceTable:
    """Devices by the names that figures use."""

    def __init__(self, folder: Path) -> None:
        file = folder / "devices.csv"
        self._rows: dict[str, dict[str, str]] = {}
        self._known: dict[tuple[str, str], HardwareSpec] = {}
        if file.is_file():
            self._rows = {row["device"]: row for row in lenient_rows(file, ("device",), "devices")}

    def device(self, name: str, device_class: str) -> HardwareSpec:
        """The device called `name`. Raises SpecError if neither a file nor the table has it."""
        key = name, device_class
        if key not in self._known:
            self._known[key] = self._look_up(name, "cpu" if device_class == "cpu" else "gpu")
        return self._known[key]

    def facts(self, name: str) -> Mapping[str, str]:
        """The table's facts about a device; empty if missing."""
        return self._rows.get(name, {})

    def _look_up(self, name: str, kind: str) -> HardwareSpec:
        with suppress(SpecError):
            listed = load_hardware(name)
            if listed.kind == kind:
                return listed
        if name not in self._rows:
            raise SpecError(f"{name}: no file or alias names this device, and devices.csv has no row for it.")
        return _hardware(name, kind, self._rows[name])


def _hardware(name: str, kind: str, row: Mapping[str, str]) -> HardwareSpec:
    def figure(column: str) -> float:
        try:
            return float(row.get(column) or 0.0)
        except ValueError:
            return 0.0

    cores, clock_hz = row.get("cores", ""), 1e6 * figure("boost_mhz")
    count = _COUNT.match(cores)
    units = int(count[0]) if count else 1
    peaks = {rate: 1e12 * figure(column) for column, rate in _TABLE["peaks"].items() if figure(column)}
    if not peaks and clock_hz:
        peaks = {"fp32": units * clock_hz * _VECTOR_OPS}
    capacity_bytes, bandwidth = 1e9 * figure("memory_gb") or _DEFAULT_BYTES, 1e9 * figure("memory_bandwidth_gb_s")
    memory = [{"level": "hbm", "capacity_bytes": capacity_bytes, "bandwidth_bytes_per_s": bandwidth}]
    if figure("last_level_cache_mb"):
        memory.append({"level": "l2", "capacity_bytes": 1e6 * figure("last_level_cache_mb")})
    declared = {
        "source": f"devices.csv: {row.get('source') or 'no source'}",
        "compute_units": units,
        "clock_hz": clock_hz or 1e9,
        "peak_flops_per_s": peaks,
        "memory": memory,
        "tdp_w": figure("tdp_w") or None,
        "instructions": [item for word in row.get("simd", "").split("+") for item in _TABLE["simd"].get(word, ())],
        **({"vector_flops_per_s": peaks["fp32"]} if "fp32" in peaks else {}),
    }
    maker = None if kind == "cpu" else next((maker for word, maker in _TABLE["makers"] if word in cores), None)
    file_name = re.sub(r"[^\w.+-]+", "-", name).strip("-")
    try:
        return HardwareSpec.model_validate({"name": file_name, "kind": kind, "maker": maker, "declared": declared})
    except ValidationError as error:
        raise SpecError(f"{name}: devices.csv has too little to go by ({first_problem(error)}).") from None


# ---------------------------------------------------------------- models

_WIDTH_PER_LAYER = 110.0  # of Llama 3 (128, 102), Qwen2.5 (107, 80) and Qwen3 (114, 80): the mean of all
_HEAD = 128
_WORDS = 128_256
_FEWEST_PARAMS = 3e7  # below it a table of words would be all
_TIED_BELOW = 4e9
_LAYER_SHARE = 12.6  # parameters of a layer over the square of its width, gated blocks with grouped heads
_EXPERTS_PER_TOKEN = 8
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*[bB](?![a-z])")
_KEPT = frozenset({"router", "norms"})
_STORED = tuple(name for name in COMPONENTS if name not in _KEPT)
_FLOATS = ("f16", "bf16", "fp16", "all f32", "f32", "fp32")
_OWN_BITS = re.compile(r"mlx-q(\d)")
_OWN_SCALE_BITS = 0.5  # MLX: a scale and a bias of 16 bits for 64 weights
# By bits of a weight, where a type's name says nothing.
_BY_BITS = ("iq1_m", "iq2_xxs", "q2_k", "iq3_xxs", "q3_k", "q4_k", "q5_k", "q6_k", "q8_0")


@dataclass(frozen=True)
class LocalModel:
    """A model; is_known: its shape is from a card"""

    spec: ModelSpec
    is_known: bool


@lru_cache(maxsize=4096)
def local_model(name: str, params: float, active_params: float, file_type: str, file_size_bytes: float) -> LocalModel:
    """The model called `name` as a file of `file_type` stores it. Raises SpecError for a model without card, parameters
    and a size in its name. params, active_params: total and per token, 0 if unknown or equal; file_type,
    file_size_bytes: GGUF or MLX format; of the tensors, 0 if unknown"""
    # As llama.cpp calls it: publishers' prefixes, and mixes larger than M, left out.
    key = file_type.lower().replace("ud-", "").replace("_xl", "_m")
    try:
        spec, is_known = load_model(name), True
    except SpecError:
        size, types = _SIZE.search(name), [item for item in BITS_PER_WEIGHT if key.startswith(item)]
        params = params or (1e9 * float(size[1]) if size is not None else 0.0)
        if not params and types:
            params = 8 * file_size_bytes / BITS_PER_WEIGHT[max(types, key=len)]
        spec, is_known = _of_parameters(name, params, active_params), False
    stored = _as_stored(
        with_dtype(replace(spec, quantization=QuantizationSpec()), "float16"), spec, key, file_size_bytes
    )
    if file_size_bytes and stored.quantization.bits:  # formats that take the bytes which the file has
        ratio = file_size_bytes / sum(weight_bytes(stored).values())
        bits = tuple((part, value * ratio) for part, value in stored.quantization.bits)
        stored = replace(stored, quantization=replace(stored.quantization, bits=bits))
    return LocalModel(stored, is_known)


def _of_parameters(name: str, params: float, active_params: float) -> ModelSpec:
    """A decoder of typical proportions."""
    if not params:
        raise SpecError(f"{name}: no card, no parameters, no size in its name and none of its file.")
    if params < _FEWEST_PARAMS:
        raise SpecError(f"{name}: {params:,.0f} parameters are no language model.")
    active = active_params if 0 < active_params < 0.9 * params else params
    tables, words = 1 if params < _TIED_BELOW else 2, _WORDS
    while words * tables * _width(active) > 0.4 * active:
        words //= 2
    body = active - words * tables * _width(active)
    hidden = _width(body)
    layers = max(1, round(body / (_LAYER_SHARE * hidden**2)))
    if active < params:  # mixtures of experts have the layers of a dense model twice as wide (Qwen3: 48 at 2,048)
        layers = max(8, round(2 * hidden / _WIDTH_PER_LAYER))
    heads = max(1, hidden // _HEAD)
    mixer = Attention(heads, max(1, heads // 4), _HEAD, _HEAD)
    left = body / layers - hidden * _HEAD * (2 * heads + 2 * mixer.num_kv_heads)
    if active == params:
        layer = Layer(mixer, DenseFFN(max(_HEAD, round(left / (3 * hidden)))))
    else:
        unused, used = (params - active) / layers, max(left, 0.2 * body / layers)
        num_experts = max(_EXPERTS_PER_TOKEN + 1, round(_EXPERTS_PER_TOKEN * (1 + unused / used)))
        inner = max(64, round((used + unused) / (3 * hidden * num_experts)))
        layer = Layer(mixer, MoEFFN(num_experts, _EXPERTS_PER_TOKEN, inner))
    return ModelSpec(name, "llama", hidden, words, 1 << 17, ((layer, layers),), tie_word_embeddings=tables == 1)


def _width(params: float) -> int:
    """Hidden size of a dense decoder with so many layer parameters."""
    width: float = (params * _WIDTH_PER_LAYER / _LAYER_SHARE) ** (1 / 3)
    return _HEAD * max(2, round(width / _HEAD))


def _as_stored(plain: ModelSpec, card: ModelSpec, key: str, file_size_bytes: float) -> ModelSpec:
    """The model in a file type's formats; unknown types by the beginning of their name, else by bits per weight."""
    own = _OWN_BITS.fullmatch(key)
    if key == "mxfp4" or (key in _FLOATS and card.quantization.weights == "mxfp4"):
        return _of_bits(plain, "mxfp4", {name: "mxfp4" if "experts" in name else "q8_0" for name in _STORED})
    if key in _FLOATS:
        return plain
    if own is not None:
        form, bits = "int4" if int(own[1]) < 6 else "int8", int(own[1]) + _OWN_SCALE_BITS
        return _of_bits(plain, form, dict.fromkeys(_STORED, bits))
    names = [key] if key in GGUF_MIXES else [name for name in (*GGUF_MIXES, *BITS_PER_WEIGHT) if key.startswith(name)]
    if not names and file_size_bytes:
        per_weight = 8 * file_size_bytes / count_parameters(plain).total
        names = [min(_BY_BITS, key=lambda name: abs(BITS_PER_WEIGHT[name] - per_weight))]
    name = max(names or [name for name in GGUF_MIXES if name.startswith(key[:3])] or ["q4_k_m"], key=len)
    return with_quantization(plain, name) if name in GGUF_MIXES else _of_bits(plain, name, dict.fromkeys(_STORED, name))


def _of_bits(plain: ModelSpec, form: str, bits: Mapping[str, float | str]) -> ModelSpec:
    """bits: per weight by component, or the format that has them"""
    stored = sorted((name, BITS_PER_WEIGHT[item] if isinstance(item, str) else item) for name, item in bits.items())
    return replace(plain, quantization=QuantizationSpec("gguf", form, kept=_KEPT, bits=tuple(stored)))


# ---------------------------------------------------------------- engines and their steps

_USUAL_GENERATED = 128  # of a tool that does not say
_SHORT_PROMPT = 32  # in front of what such a tool generates
_BUILD = re.compile(r"\(b?(\d+)\)|^b?(\d{4,})$")
_KV_FORMATS = {"q8_0": "q8_0", "q4_0": "q4_0", "q5_1": "q5_1"}


class Test(NamedTuple):
    """Steps timed together, and the tokens they yield; a figure is the mean of its tests' rates."""

    shapes: tuple[BatchShape, ...]
    tokens: int


def local_engine(row: LocalSetup) -> EngineSpec:
    """The engine of a row, at the version of its build or date."""
    profile = "mlx" if row.backend == "mlx" else "llamacpp"
    given = {
        "profile": profile,
        "version": _version(profile, row),
        "backend": row.backend,
        "attention": None if row.flash is None else "flash" if row.flash else "standard",
        "kv_cache_dtype": _KV_FORMATS.get(row.kv_type, "auto"),
        "max_num_seqs": row.batch,
        "enable_prefix_caching": False,
    }
    if row.ubatch:
        given["ubatch_size"] = row.ubatch
    if row.num_devices > 1:
        is_tensor = row.backend_detail.upper().startswith("TP")
        given["tensor_parallel_size" if is_tensor else "layer_split"] = row.num_devices
    return EngineSpec.model_validate({name: value for name, value in given.items() if value is not None})


def local_scenario(row: LocalSetup, model: LocalModel, hardware: HardwareSpec) -> Scenario:
    """The scenario for pricing the row's steps."""
    prompts, answers = (Lengths(distribution="fixed", value=max(1, n)) for n in (row.num_prompt, row.num_generated))
    arrivals = Arrivals(process="closed_loop", concurrency=row.batch)
    traffic = Traffic(arrivals=arrivals, num_requests=row.batch, input_tokens=prompts, output_tokens=answers)
    engine = with_defaults(local_engine(row), hardware)
    return Scenario(name="", model=model.spec, hardware=hardware, engine=engine, traffic=traffic)


def row_tests(row: LocalSetup, spans: tuple[int, ...], budget: int) -> list[Test]:
    """The tests whose mean rate is the figure. spans: `ModelSpec.attention_spans`; budget: tokens of a step"""
    if row.tool == "localscore":
        pairs = _TABLE["localscore"]
        if row.test == "pp":
            return [_prompt(prompt, 1, 0, budget) for prompt, _ in pairs]
        return [_decode(prompt + generated // 2, 1, spans) for prompt, generated in pairs]
    if row.test == "pp":
        return [_prompt(max(1, row.num_prompt), row.batch, row.depth, budget)]
    before = row.depth
    if not before and row.tool != "llama-bench":
        before = row.num_prompt or _SHORT_PROMPT
    return [_decode(before + (row.num_generated or _USUAL_GENERATED) // 2, row.batch, spans)]


def _decode(context: int, batch: int, spans: tuple[int, ...]) -> Test:
    return Test((decode_shape(batch, max(1, context), spans),), batch)


def _prompt(length: int, batch: int, depth: int, budget: int) -> Test:
    """Prompts of `batch` sequences one after another in steps of up to `budget` tokens."""
    total, shapes = length * batch, []
    for begin in range(0, total, budget):
        end = min(begin + budget, total)
        starts = range(begin - begin % length, end, length)  # of the prompts in this step
        chunks = [(max(begin - start, 0), min(end - start, length)) for start in starts]
        prefills = tuple((last - first, depth + first) for first, last in chunks)
        shapes.append(BatchShape(end - begin, len(chunks), prefills))
    return Test(tuple(shapes), total)


def _version(profile: str, row: LocalSetup) -> str | None:
    """The described version at or before the row's build or date; the oldest for earlier ones."""
    versions = load_engine_description(profile).versions
    if not versions:
        return None
    build = _BUILD.search(row.build)
    if build is not None:
        number = int(build[1] or build[2])
        before = [text for text in versions if int(text.split(".")[0]) <= number]
    else:
        day = row.date or datetime.date.max
        before = [text for text, facts in versions.items() if facts.released is None or facts.released <= day]
    return before[-1] if before else next(iter(versions))
