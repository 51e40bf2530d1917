"""Server arguments to scenario fields, and an engine back to arguments, which `line.py` reads back."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import PurePath
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.files.catalog import expanded, looked_up
from perfmodel.files.sandbox import is_allowed
from perfmodel.models.spec import ModelSpec
from perfmodel.specs.commands.arguments import Arguments, Given
from perfmodel.specs.commands.description import ModelledFlag, load_command
from perfmodel.specs.engine.offload import KvOffload
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.engine.speculation import RIGHT_OF_MTP, RIGHT_OF_NGRAMS

_LINE, _ENGINE, _CONFIG = "line.", "engine.", "engine.speculative_config"
_GIB = 2**30
_ALL_LAYERS = 99  # of -ngl: above any layer count
_GGUF_TYPE = re.compile(r"(?:[it]?q\d\w*|fp16|b?f16|f32|mxfp4)", re.IGNORECASE)
_TYPE_AT_END = re.compile(rf"(.+?)[-_.]({_GGUF_TYPE.pattern})", re.IGNORECASE)
_HUBS = ("hf.co", "huggingface.co")  # `ollama run` fetches repositories of these
_FLOATS = {"f16": "float16", "fp16": "float16", "bf16": "bfloat16", "f32": "float32"}
# Of drafted tokens, right where a command says nothing: EAGLE's first tokens (Li et al. 2024, table 1: 0.7 to 0.8), a
# small sibling as drafter (Chen et al. 2023: 0.71 to 0.85), suffix decoding in prose (benchmarks/host_libraries.py:
# 1.6 tokens a step). What one's own server has is in its metrics.
_RIGHT = {"ngram": RIGHT_OF_NGRAMS, "draft_model": 0.7, "medusa": 0.6, "eagle": 0.75, "suffix": 0.4}
_FOR_SEVERAL = ("role", "further_rank", "is_further_rank")  # requested by a reader of several servers
_DEEPEP_MODES = {"normal": "deepep_high_throughput", "low_latency": "deepep_low_latency"}
_EVERY_STEP = {"dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2}
_OFFLOADED = {"write_policy": "write_through", "load": "async"}  # vLLM's OffloadingConnector
_STEPS = 3  # sglang/srt/server_args.py, auto_choose_speculative_params
_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "prefill": "prefill", "decode": "decode"}


@dataclass(slots=True)
class Reading:
    """Scenario fields of a command. notes: approximations; assumed: what the command leaves open."""

    data: dict[str, Any] = field(default_factory=dict)  # the blocks of a scenario file that it fills
    sources: dict[str, str] = field(default_factory=dict)  # field -> the argument that set it, as it was written
    line: dict[str, Any] = field(default_factory=dict)  # what its engine's own rules still turn into fields
    irrelevant: list[str] = field(default_factory=list)  # what has no part in time, as it was written
    unmodelled: list[tuple[str, str]] = field(default_factory=list)  # what has one that is not modelled, and why
    notes: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)

    def put(self, path: str, value: Any, source: str = "") -> None:
        """Set the field at `path`."""
        around, keys = self.data, path.split(".")
        for key in keys[:-1]:
            around = around.setdefault(key, {})
        around[keys[-1]] = value
        if source:
            self.sources[path] = source

    def get(self, path: str) -> Any:
        """Field value, or None."""
        value: Any = self.data
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def take(self, name: str, default: Any = None) -> Any:
        """Pop an argument from `line`."""
        return self.line.pop(name, default)

    def source(self, name: str) -> str:
        """Argument of `line` as written; empty if absent."""
        return self.sources.get(f"{_LINE}{name}", "")

    def move(self, name: str, path: str) -> None:
        """Move argument `name` of `line`, if present, to the field at `path`."""
        if name in self.line:
            self.put(path, self.take(name), self.source(name))

    def add_remarks(self, other: "Reading") -> None:
        """Merge the remarks of another command of the scenario."""
        for name in ("irrelevant", "unmodelled", "notes", "assumed"):
            getattr(self, name).extend(getattr(other, name))

    @property
    def ranks(self) -> int:
        """Tensor-parallel degree."""
        return self.get("engine.tensor_parallel_size") or 1


def read_server(arguments: Arguments, environment: Mapping[str, str]) -> Reading:
    """Translate arguments and environment one by one."""
    reading, description = Reading(notes=list(arguments.notes)), arguments.description
    for given in arguments.given.values():
        _take(given, reading)
    for name, value in environment.items():
        if (flag := description.environment.modelled.get(name)) is not None:
            rule = description.rules[flag]
            assert rule.modelled is not None
            is_count = rule.modelled.kind == "integer" and value.isdecimal()
            if rule.modelled.field in reading.sources:
                reading.irrelevant.append(f"{name}={value}")
            else:
                _take(Given(rule, flag, int(value) if is_count else value, f"{name}={value}"), reading)
        elif (why := description.unmodelled_variable(name)) is None:
            reading.irrelevant.append(name)
        else:
            reading.unmodelled.append((f"{name}={value}", why))
    return reading


def _take(given: Given, reading: Reading) -> None:
    flag, value, text = given.rule.modelled, given.value, str(given.value)
    if flag is None:
        if given.rule.kind == "irrelevant" or given.rule.says_nothing(value):
            reading.irrelevant.append(given.written)
        else:
            reading.unmodelled.append((given.written, given.rule.why))
        return
    if text in flag.not_modelled:
        reading.unmodelled.append((given.written, flag.why))
    if isinstance(value, bool):
        text = text.lower()
    if text in flag.map:
        value = flag.map[text]
    elif flag.only is not None and text not in flag.only:
        reading.unmodelled.append((given.written, flag.why))
        return
    if value is None or flag.field is None:
        if text not in flag.not_modelled:
            reading.irrelevant.append(given.written)
        return
    for entry in flag.approximate:
        pattern, _, what = entry.partition(": ")
        if fnmatchcase(text, pattern):
            reading.notes.append(f"{given.written}: {what}")
    if flag.inverse and isinstance(value, bool):
        value = not value
    if flag.field.startswith(_LINE):
        reading.line[flag.field.removeprefix(_LINE)] = value
        reading.sources[flag.field] = given.written
    else:
        reading.put(flag.field, value, given.written)


def complete(reading: Reading, command: str, engine: str) -> None:
    """Fill fields that depend on several arguments; an undescribed `engine` follows that of its `command`.

    Raises SpecError for contradictions."""
    if engine != "vllm":
        reading.put("engine.profile", engine)
    _BY_COMMAND[command](reading)
    _complete_drafts(reading)
    if reading.line.keys() & {"kv_role", "kv_connector", "worker_role"}:
        role, connector = reading.take("kv_role", "kv_both"), reading.take("kv_connector")
        role = reading.take("worker_role", role)
        source = reading.source("worker_role") or reading.source("kv_role") or reading.source("kv_connector")
        if role in _ROLES:
            reading.line["role"] = _ROLES[role]
            reading.sources["line.role"] = source
        elif role not in ("null", None):
            what = f"where {connector or 'a connector'} takes KV blocks to and from; see engine.kv_offload"
            reading.unmodelled.append((source, what))
    for name in [name for name in reading.line if name not in _FOR_SEVERAL]:
        del reading.line[name]
        reading.unmodelled.append((reading.sources[f"{_LINE}{name}"], "an argument of what the line has not"))


def _vllm(reading: Reading) -> None:
    if gib := reading.take("kv_offloading_gib"):
        source = reading.sources.pop("line.kv_offloading_gib")
        ranks = reading.ranks * (reading.get("engine.pipeline_parallel_size") or 1)
        reading.put("engine.kv_offload.capacity_bytes", int(gib * _GIB / ranks), f"{source}, of all ranks")
        has_drafts = reading.line.get("draft_model") is not None or reading.get(f"{_CONFIG}.method") is not None
        for name, value in _OFFLOADED.items():
            if name != "load" or not has_drafts:  # loads beside steps are not modelled with drafts
                reading.put(f"engine.kv_offload.{name}", value, source)
    model = reading.line.get("draft_model")
    if reading.get(f"{_CONFIG}.method") is None and model is not None:
        # vllm/config/speculative.py: by what its name has in it
        method = next((name for name in ("eagle", "medusa") if name in str(model).lower()), "draft_model")
        reading.put(f"{_CONFIG}.method", method, reading.source("draft_model"))
    if reading.get(_CONFIG) is not None and reading.get(f"{_CONFIG}.method") is None:
        del reading.data["engine"]["speculative_config"]
        for path in [path for path in reading.sources if path.startswith(_CONFIG)]:
            reading.unmodelled.append((reading.sources.pop(path), "drafts by a method that is not modelled"))


def _sglang(reading: Reading) -> None:
    """`--dp-size` with `--enable-dp-attention` splits `--tp-size`, the chunk and the running requests; alone it counts
    independent replicas behind one front end (server_args.py, model_runner_kv_cache_mixin.py)."""
    tp, dp = reading.ranks, reading.take("dp_size", 1)
    if reading.take("dp_attention", False) and dp > 1:
        if tp % dp:
            raise SpecError(
                f"--dp-size {dp} with --enable-dp-attention: got --tp-size {tp}; expected a multiple of it."
            )
        reading.put("engine.tensor_parallel_size", tp // dp, f"--tp-size {tp} --dp-size {dp} --enable-dp-attention")
        reading.put("engine.data_parallel_size", dp, "--enable-dp-attention")
        if (running := reading.get("engine.max_num_seqs")) is not None:
            reading.put("engine.max_num_seqs", running // dp, f"{reading.sources['engine.max_num_seqs']} of {dp} ranks")
        if (chunk := reading.line.get("chunked_prefill_size", -1)) > 0:
            reading.line["chunked_prefill_size"] = chunk // dp
    elif dp > 1:
        reading.put("cluster.replicas", dp, reading.source("dp_size"))
    _complete_experts(reading)
    gigabytes, policy = reading.take("hicache_gigabytes"), reading.take("hicache_policy", "write_through")
    if reading.take("hicache", False):
        if gigabytes:
            source = reading.source("hicache_gigabytes")
            reading.put("engine.kv_offload.capacity_bytes", int(gigabytes * 1e9), source)
            reading.put("engine.kv_offload.write_policy", policy, source)
        else:
            what = "host memory for KV blocks as a multiple of the device's; say how much by --hicache-size"
            reading.unmodelled.append((reading.source("hicache"), what))
    mode = _DEEPEP_MODES.get(reading.take("deepep_mode", "auto"))
    if mode and reading.get("engine.all2all_backend") == "deepep_auto":
        reading.put("engine.all2all_backend", mode, reading.source("deepep_mode"))
    if reading.take("two_batch_overlap", False):  # two_batch_overlap.py, compute_split_seq_index: from two tokens on
        for name, value in {"enable_dbo": True, **_EVERY_STEP}.items():
            reading.put(f"engine.{name}", value, reading.source("two_batch_overlap"))
    chunk = reading.take("chunked_prefill_size")
    if chunk is not None:
        setting = ("max_num_batched_tokens", chunk) if chunk > 0 else ("enable_chunked_prefill", False)
        reading.put(f"engine.{setting[0]}", setting[1], reading.source("chunked_prefill_size"))
    if reading.take("priorities", False):
        reading.put("engine.scheduling_policy", "priority", reading.source("priorities"))
    # Steps of a chain; with --speculative-eagle-topk above 1 a tree, whose shape the drafter's probabilities say
    steps, tokens = reading.take("draft_steps"), reading.take("draft_tokens")
    if reading.take("eagle_topk", 1) > 1:
        reading.unmodelled.append((reading.source("eagle_topk"), "trees that a drafter chooses by its probabilities"))
    if (method := reading.get(f"{_CONFIG}.method")) is None:
        return
    depth = tokens if method == "ngram" or (steps is None and tokens) else steps
    if depth is None:
        depth = _STEPS
        reading.assumed.append(f"{_STEPS} drafted tokens, as SGLang chooses for most models")
    source = reading.source("draft_tokens" if depth == tokens else "draft_steps")
    reading.put(f"{_CONFIG}.num_speculative_tokens", depth, source)


def _trtllm(reading: Reading) -> None:
    """Under attention DP each rank has its own requests (llm_args.py, enable_attention_dp)."""
    ranks = reading.ranks
    if reading.take("attention_dp", False) and ranks > 1:
        reading.put("engine.tensor_parallel_size", 1, "enable_attention_dp: true")
        reading.put("engine.data_parallel_size", ranks, f"{ranks} ranks with enable_attention_dp")
    _complete_experts(reading)
    waits, host_bytes = reading.take("timeout_iters"), reading.take("host_cache_bytes")
    if reading.take("balances", False) and waits:
        reading.put("engine.attention_dp_timeout_iters", waits, reading.source("timeout_iters"))
    if host_bytes:
        reading.put("engine.kv_offload.capacity_bytes", host_bytes, reading.source("host_cache_bytes"))


def _lmdeploy(reading: Reading) -> None:
    _complete_experts(reading)
    reading.unmodelled.append(("lmdeploy", "its own kernels and scheduler, for which vLLM's stand in"))


def _llama_server(reading: Reading) -> None:
    """`-c` is the context of all slots together, unless the server chooses and shares their number."""
    name = reading.take("gguf")
    if name is not None:
        _put_gguf(reading, str(name), reading.source("gguf"))
    context = reading.take("ctx_size")
    if context is not None:
        slots = reading.get("engine.max_num_seqs") or 1
        reading.put("engine.max_model_len", context // slots, reading.source("ctx_size"))
    if reading.take("cache_type_v") != reading.get("engine.kv_cache_dtype"):
        argument = reading.source("cache_type_v") or reading.sources["engine.kv_cache_dtype"]
        reading.unmodelled.append((argument, "keys and values in two formats; taken as that of the keys"))
    layers = str(reading.take("gpu_layers", "all"))
    if layers not in ("all", "auto", "-1") and not (layers.isdecimal() and int(layers) >= _ALL_LAYERS):
        why = "layers with the CPU; give engine.cpu and engine.n_gpu_layers"
        reading.unmodelled.append((reading.source("gpu_layers"), why))


def _ollama(reading: Reading) -> None:
    """`llama3.1:8b-instruct-q8_0`: family, size, type (default Q4_K_M); or `hf.co/owner/name`."""
    tag = str(reading.take("tag", ""))
    host, _, repository = tag.partition("/")
    if host in _HUBS:
        _put_gguf(reading, repository, tag)
    elif tag:
        family, _, rest = tag.partition(":")
        parts = rest.split("-")
        kind = next((part for part in parts[1:] if _GGUF_TYPE.fullmatch(part)), None)
        size = [part for part in parts if part != kind]
        sizes = ["-".join(size[:count]) for count in (1, *range(len(size), 1, -1))]
        families = (family, re.sub(r"([a-z])(\d)", r"\1-\2", family))
        names = [f"{name}-{suffix}".strip("-") for suffix in sizes for name in families]
        model = next((name for name in names if looked_up("models", name) is not None), names[0])
        reading.put("model", model, tag)
        _put_weights(reading, model, kind or "", tag, "which most of Ollama's tags have")
    if reading.get("engine.max_num_seqs") is None:
        reading.put("engine.max_num_seqs", 1)
        reading.assumed.append("one request at a time (OLLAMA_NUM_PARALLEL)")


def _put_gguf(reading: Reading, name: str, argument: str) -> None:
    """Model from a GGUF file or Hugging Face repository; a local file is read."""
    path = expanded(name)
    if is_allowed(path) and path.is_file():
        reading.put("model", str(path.resolve()), argument)
        return
    repository, _, kind = name.partition(":")
    stem = PurePath(repository).name.removesuffix(".gguf")
    stem = re.sub(r"[-_.]gguf$", "", stem, flags=re.IGNORECASE)
    if typed := _TYPE_AT_END.fullmatch(stem):
        stem, kind = typed[1], typed[2]
    reading.put("model", stem, argument)
    why = "as the file's name has no type" if repository.endswith(".gguf") else "the usual type of a repository's files"
    _put_weights(reading, stem, kind, argument, why)


def _put_weights(reading: Reading, model: str, kind: str, argument: str, why: str) -> None:
    """GGUF type as weight format; gpt-oss only in its own."""
    if kind.lower() in _FLOATS:
        reading.put("engine.dtype", _FLOATS[kind.lower()], argument)
    elif kind:
        reading.put("engine.quantization", kind.lower(), argument)
    elif not model.lower().startswith("gpt-oss"):
        reading.put("engine.quantization", "q4_k_m")
        reading.assumed.append(f"weights in Q4_K_M, {why}")


def _complete_experts(reading: Reading) -> None:
    """Expert parallelism: all ranks or none."""
    size = reading.take("expert_ranks")
    if size is None or size < 2:
        return
    ranks = reading.ranks * (reading.get("engine.data_parallel_size") or 1)
    reading.put("engine.enable_expert_parallel", True, reading.source("expert_ranks"))
    if size != ranks:
        what = f"experts over {size} of {ranks} ranks, and split within; taken as over all"
        reading.unmodelled.append((reading.source("expert_ranks"), what))


def _complete_drafts(reading: Reading) -> None:
    """Drafter fields by method."""
    method = reading.get(f"{_CONFIG}.method")
    if method is None:
        return
    if method == "draft_model" and "draft_model" in reading.line:
        reading.move("draft_model", f"{_CONFIG}.model")
        reading.move("draft_quantization", f"{_CONFIG}.quantization")
    elif method in ("eagle", "medusa") and reading.take("draft_model") is not None:
        reading.notes.append(f"{reading.source('draft_model')}: priced by its method, {method}, not by its files")
    if reading.get(f"{_CONFIG}.acceptance") is None:
        source = reading.sources.get(f"{_CONFIG}.method", "")
        rate = RIGHT_OF_MTP if "mtp" in source or "NEXTN" in source else _RIGHT.get(method, 0.7)
        reading.put(f"{_CONFIG}.acceptance.rate", rate)
        reading.assumed.append(f"{rate:.0%} of the tokens that {method} drafts are right ({_CONFIG}.acceptance)")


_BY_COMMAND: dict[str, Callable[[Reading], None]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm": _trtllm,
    "lmdeploy": _lmdeploy,
    "llama-server": _llama_server,
    "ollama": _ollama,
}


Settings = dict[str, Any]


def engine_arguments(engine: EngineSpec, model: ModelSpec, command: str = "vllm") -> list[str]:
    """Arguments of `command` that serve `model`: non-defaults, plus ranks, lengths and step size always."""
    arguments, blocks, can_negate = list[str](), dict[str, Settings](), load_command(command).can_negate
    for name, value in server_settings(engine, model, command).items():
        parent, dot, key = name.partition(".")
        if dot:
            blocks.setdefault(parent, {})[key] = value
        elif isinstance(value, bool):
            arguments += [f"--{'' if value else 'no-'}{name}"] if value or can_negate else []
        else:
            arguments += [f"--{name}", str(value)]
    for parent, block in blocks.items():
        arguments += [f"--{parent}", json.dumps(block)]
    return arguments


def engine_options(engine: EngineSpec, model: ModelSpec, command: str) -> Settings:
    """The same as fields of the YAML file that `command` reads."""
    options: Settings = {}
    for name, value in server_settings(engine, model, command).items():
        parent, dot, key = name.replace("-", "_").partition(".")
        block = options.setdefault(parent, {}) if dot else options
        block[key if dot else parent] = value
    return options


def server_settings(engine: EngineSpec, model: ModelSpec, command: str) -> Settings:
    """Flag -> value; a dotted flag is a key of another's JSON."""
    settings: Settings = {}
    defaults = {name: field.default for name, field in EngineSpec.model_fields.items()}
    defaults |= dict(engine.described.facts.defaults)
    for name, flag in _flags(command).items():
        path = str(flag.field).removeprefix(_ENGINE).split(".")
        value, default = _value(engine, path), None
        if path[0] != "speculative_config":
            default = defaults[path[0]] if len(path) == 1 else _value(EngineSpec(), path)
        if value is None or (value == default and not flag.always):
            continue
        if flag.only == () and str(value).lower() not in flag.write:
            continue  # no value of the flag says it
        settings[name] = value != flag.inverse if flag.kind == "switch" else flag.write.get(str(value).lower(), value)
    drafts, extra = engine.speculative_config, _SETTINGS_OF[command](settings, engine)
    if drafts is not None:
        is_mtp, hub_name = drafts.is_mtp_of(model), drafts.model.hf_id or drafts.model.name if drafts.model else None
        extra |= _DRAFTS_OF[command](
            drafts.depth, is_mtp, settings, hub_name, drafts.quantization if hub_name else None
        )
    return {name: value for name, value in (settings | extra).items() if value is not None}


def _vllm_settings(_: Settings, engine: EngineSpec) -> Settings:
    if engine.kv_offload is None:
        return {}
    ranks = engine.tensor_parallel_size * engine.pipeline_parallel_size  # vllm/config/vllm.py, num_kv_ranks
    gib = engine.kv_offload.capacity_bytes * ranks / _GIB
    return {"kv-offloading-size": f"{gib:.10g}"}


def _sglang_settings(settings: Settings, engine: EngineSpec) -> Settings:
    """The inverse of `_sglang`."""
    shares, tokens = engine.data_parallel_size, engine.max_num_batched_tokens
    ranks, running = engine.tensor_parallel_size * shares, settings.get("max-running-requests")
    chunk = -1 if not engine.enable_chunked_prefill else tokens and tokens * shares
    of_ranks: Settings = {"data-parallel-size": shares, "enable-dp-attention": True} if shares > 1 else {}
    offload = engine.kv_offload
    gigabytes = 0 if offload is None else int(offload.capacity_bytes // 1e9)  # whole ones; 0 is SGLang's for a ratio
    if offload is not None and gigabytes:
        of_ranks |= {"enable-hierarchical-cache": True, "hicache-size": gigabytes}
        of_ranks["hicache-write-policy"] = offload.write_policy
    return {
        **{"tensor-parallel-size": ranks, **of_ranks, "max-running-requests": running and running * shares},
        "chunked-prefill-size": chunk,
        "expert-parallel-size": ranks if engine.enable_expert_parallel else None,
        "enable-priority-scheduling": engine.scheduling_policy == "priority" or None,
        "deepep-mode": next((mode for mode, name in _DEEPEP_MODES.items() if name == engine.all2all_backend), None),
        "enable-two-batch-overlap": engine.enable_dbo or None,
    }


def _trtllm_settings(_: Settings, engine: EngineSpec) -> Settings:
    """The inverse of `_trtllm`; the cache's format has two names."""
    ranks = engine.tensor_parallel_size * engine.data_parallel_size
    return {
        **{"tensor-parallel-size": ranks, "enable-attention-dp": engine.data_parallel_size > 1 or None},
        **{"moe-expert-parallel-size": ranks if engine.enable_expert_parallel else None, "kv-cache-dtype": None},
        "kv-cache-config.host_cache_size": engine.kv_offload and int(engine.kv_offload.capacity_bytes),
    }


def _vllm_drafts(depth: int, is_mtp: bool, settings: Settings, name: str | None, format: str | None) -> Settings:
    block, method = "speculative-config.", {"speculative-config.method": "mtp"} if is_mtp else {}
    return {**method, f"{block}num_speculative_tokens": depth, f"{block}model": name, f"{block}quantization": format}


def _sglang_drafts(depth: int, is_mtp: bool, settings: Settings, name: str | None, format: str | None) -> Settings:
    """A chain's last draft is verified with a token behind it."""
    method = settings.get("speculative-algorithm")
    if method in (None, "NGRAM"):
        return {"speculative-num-draft-tokens": depth if method else None}
    chain = {"speculative-num-steps": depth, "speculative-eagle-topk": 1, "speculative-num-draft-tokens": depth + 1}
    drafter = {"speculative-draft-model-path": name, "speculative-draft-model-quantization": format}
    return {"speculative-algorithm": "NEXTN" if is_mtp else method, **chain, **drafter}


def _trtllm_drafts(depth: int, is_mtp: bool, settings: Settings, name: str | None, _: str | None) -> Settings:
    block, method = "speculative-config.", {"speculative-config.decoding_type": "MTP"} if is_mtp else {}
    counts = {
        f"{block}num_nextn_predict_layers": depth if is_mtp else None,
        f"{block}max_draft_len": None if is_mtp else depth,
    }
    return {**method, **counts, f"{block}speculative_model_dir": name}


_SETTINGS_OF = {"vllm": _vllm_settings, "sglang": _sglang_settings, "trtllm": _trtllm_settings}
_DRAFTS_OF = {"vllm": _vllm_drafts, "sglang": _sglang_drafts, "trtllm": _trtllm_drafts}


def left_out_fields(engine: EngineSpec, model: ModelSpec, command: str = "vllm") -> list[str]:
    """Explicit fields of `engine` without which the settings of `command` would be the same, and those of `kv_offload`
    that its one argument does not stand for."""
    settings, described = server_settings(engine, model, command), engine.described.facts.defaults

    def is_silent(name: str) -> bool:
        default, value = EngineSpec.model_fields[name].default, getattr(engine, name)
        is_default = value in (default, dict(described).get(name))
        return not is_default and server_settings(engine.model_copy(update={name: default}), model, command) == settings

    silent = [*filter(is_silent, engine.model_fields_set - {"version", "profile"})]
    return sorted([*silent, *(() if "kv_offload" in silent else _unsaid_of_offload(engine, command))])


def _unsaid_of_offload(engine: EngineSpec, command: str) -> Iterator[str]:
    if engine.kv_offload is not None:
        stands_for: Settings = {}
        if command == "vllm":
            stands_for = _OFFLOADED if engine.speculative_config is None else _OFFLOADED | {"load": "step"}
        elif command == "sglang":
            stands_for = {"write_policy": engine.kv_offload.write_policy}
        plain = KvOffload(capacity_bytes=engine.kv_offload.capacity_bytes, **stands_for)
        yield from (f"kv_offload.{name}" for name, value in engine.kv_offload if value != getattr(plain, name))


@cache
def _flags(command: str) -> dict[str, ModelledFlag]:
    """Flag per field in table order, for direct translation."""
    return {
        name: flag
        for name, flag in load_command(command).modelled.items()
        if flag.field is not None and flag.field.startswith(_ENGINE) and "acceptance" not in flag.field
        if flag.only is None or flag.only or flag.write
    }


def _value(engine: EngineSpec, path: list[str]) -> Any:
    value: Any = engine
    for part in path:
        value = getattr(value, part, None)
    return value
