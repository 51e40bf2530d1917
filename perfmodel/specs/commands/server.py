"""What a server's arguments say of a scenario, and an engine as vLLM's arguments again.

Fields, what has no part in time, what has one that is not modelled; then what several arguments say together: drafts,
ranks, the second tier of KV blocks. `line.py` reads back what `engine_arguments` writes.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import PurePath
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.files.base import Spec
from perfmodel.files.catalog import expanded, looked_up
from perfmodel.files.reach import may_touch
from perfmodel.models.spec import ModelSpec
from perfmodel.specs.commands.arguments import Arguments, Given
from perfmodel.specs.commands.description import CommandDescription, ModelledFlag, load_command
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.engine.speculation import RIGHT_OF_MTP, RIGHT_OF_NGRAMS

_LINE = "line."


@dataclass(slots=True)
class Reading:
    """What a command says.

    data:       the blocks of a scenario file that it fills
    sources:    field -> the argument that set it, as it was written
    line:       what its engine's own rules still turn into fields
    irrelevant: what has no part in time, as it was written
    unmodelled: what has one that is not modelled, and why
    notes:      what was taken for what; assumed: what the command leaves open
    """

    data: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    line: dict[str, Any] = field(default_factory=dict)
    irrelevant: list[str] = field(default_factory=list)
    unmodelled: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)

    def put(self, path: str, value: Any, source: str = "") -> None:
        """The field at `path` has `value`."""
        around, keys = self.data, path.split(".")
        for key in keys[:-1]:
            around = around.setdefault(key, {})
        around[keys[-1]] = value
        if source:
            self.sources[path] = source

    def move(self, name: str, path: str) -> None:
        """Make the argument `name` of `line`, if it was given, the field at `path`."""
        if name in self.line:
            self.put(path, self.line.pop(name), self.sources[f"line.{name}"])

    def get(self, path: str) -> Any:
        """The value of a field, or None."""
        value: Any = self.data
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def add_remarks(self, other: "Reading") -> None:
        """What another command of the same scenario says beside fields."""
        for name in ("irrelevant", "unmodelled", "notes", "assumed"):
            getattr(self, name).extend(getattr(other, name))


def read_server(
    arguments: Arguments, environment: Mapping[str, str], description: CommandDescription, place: str
) -> Reading:
    """What arguments and environment say.

    description, place: of the command; where it stands, for errors

    Raises SpecError for values that no field takes.
    """
    reading = Reading(notes=list(arguments.notes))
    for each in arguments.given.values():
        _take(each, reading)
    for name, value in environment.items():
        _take_variable(name, value, reading, description, place)
    return reading


def _take(given: Given, reading: Reading) -> None:
    rule = given.rule
    if rule.modelled is not None:
        _take_modelled(given, rule.modelled, reading)
    elif rule.kind == "irrelevant" or rule.says_nothing(given.value):
        reading.irrelevant.append(given.written)
    else:
        reading.unmodelled.append((given.written, rule.why))


def _take_modelled(given: Given, flag: ModelledFlag, reading: Reading) -> None:
    text, value = str(given.value), given.value
    if text in flag.not_modelled:
        reading.unmodelled.append((given.written, flag.why))
    if isinstance(value, bool):
        text = str(value).lower()
    if text in flag.map:
        value = flag.map[text]
    elif flag.only is not None and text not in flag.only:
        reading.unmodelled.append((given.written, flag.why))
        return
    if value is None or flag.field is None:
        if text not in flag.not_modelled:
            reading.irrelevant.append(given.written)
        return
    for each in flag.approximate:
        pattern, _, what = each.partition(": ")
        if fnmatchcase(text, pattern):
            reading.notes.append(f"{given.written}: {what}")
    if flag.inverse and isinstance(value, bool):
        value = not value
    if flag.field.startswith(_LINE):
        reading.line[flag.field.removeprefix(_LINE)] = value
        reading.sources[flag.field] = given.written
    else:
        reading.put(flag.field, value, given.written)


def _take_variable(name: str, value: str, reading: Reading, description: CommandDescription, place: str) -> None:
    rules = description.environment
    if name in rules.modelled:
        target = rules.modelled[name]
        rule = description.rules[target]
        if rule.modelled is None:
            raise SpecError(f"{place}: {name}: no field of a scenario.")
        if rule.modelled.field not in reading.sources:
            is_count = rule.modelled.kind == "integer" and value.isdecimal()
            read = int(value) if is_count else value
            _take_modelled(Given(rule, target, read, f"{name}={value}"), rule.modelled, reading)
        else:
            reading.irrelevant.append(f"{name}={value}")
    elif (why := description.unmodelled_variable(name)) is None:
        reading.irrelevant.append(name)
    else:
        reading.unmodelled.append((f"{name}={value}", why))


_GIB = 2**30
_ALL_LAYERS = 99  # of -ngl: nobody counts them
_GGUF_TYPE = re.compile(r"(?:[it]?q\d\w*|fp16|b?f16|f32|mxfp4)", re.IGNORECASE)
_TYPE_AT_END = re.compile(rf"(.+?)[-_.]({_GGUF_TYPE.pattern})", re.IGNORECASE)
_HUBS = ("hf.co", "huggingface.co")  # `ollama run` fetches repositories of these
_FLOATS = {"f16": "float16", "fp16": "float16", "bf16": "bfloat16", "f32": "float32"}
_LETTER_DIGIT = re.compile(r"([a-z])(\d)")
_CONFIG = "engine.speculative_config"
# Of drafted tokens, right where a command says nothing: EAGLE's first tokens (Li et al. 2024, table 1: 0.7 to 0.8), a
# small sibling as drafter (Chen et al. 2023: 0.71 to 0.85). What one's own server has is in its metrics.
_RIGHT = {"ngram": RIGHT_OF_NGRAMS, "draft_model": 0.7, "medusa": 0.6, "eagle": 0.75}
_OWN_HEADS = ("eagle", "medusa")
_FOR_SEVERAL = ("role", "further_rank", "is_further_rank")  # what a reader of several servers asks for
_STEPS = 3  # sglang/srt/server_args.py, auto_choose_speculative_params
_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "prefill": "prefill", "decode": "decode"}


def complete(reading: Reading, command: str, engine: str) -> None:
    """Fill in the fields that several arguments of a server say together.

    command, engine: their names; an engine that is not described has another's

    Raises SpecError for what they contradict each other in.
    """
    if engine != "vllm":
        reading.put("engine.profile", engine)
    _BY_COMMAND[command](reading)
    _drafts(reading)
    if "kv_role" in reading.line or "kv_connector" in reading.line:
        _role(reading)
    for name in [name for name in reading.line if name not in _FOR_SEVERAL]:
        del reading.line[name]
        reading.unmodelled.append((reading.sources[f"line.{name}"], "an argument of what the line has not"))


def _vllm(reading: Reading) -> None:
    gib = reading.line.pop("kv_offloading_gib", None)
    if gib:
        ranks = reading.get("engine.tensor_parallel_size") or 1
        source = reading.sources.pop("line.kv_offloading_gib")
        reading.put("engine.kv_offload.capacity_bytes", int(gib * _GIB / ranks), f"{source}, of all ranks")
    method, model = reading.get(f"{_CONFIG}.method"), reading.line.get("draft_model")
    if method is None and model is not None:  # vllm/config/speculative.py: by what its name has in it
        named = next((name for name in ("eagle", "medusa") if name in str(model).lower()), "draft_model")
        reading.put(f"{_CONFIG}.method", named, reading.sources["line.draft_model"])


def _sglang(reading: Reading) -> None:
    """`--dp-size` with `--enable-dp-attention` splits the ranks of `--tp-size`; alone it is so many replicas behind one
    front end, which share nothing (server_args.py, data_parallel_controller.py)."""
    tp, dp = reading.get("engine.tensor_parallel_size") or 1, reading.line.pop("dp_size", 1)
    if reading.line.pop("dp_attention", False) and dp > 1:
        if tp % dp:
            raise SpecError(
                f"--dp-size {dp} with --enable-dp-attention: found --tp-size {tp}, allowed a multiple of it."
            )
        reading.put("engine.tensor_parallel_size", tp // dp, f"--tp-size {tp} --dp-size {dp} --enable-dp-attention")
        reading.put("engine.data_parallel_size", dp, "--enable-dp-attention")
    elif dp > 1:
        reading.put("cluster.replicas", dp, reading.sources["line.dp_size"])
    _experts(reading)
    chunk = reading.line.pop("chunked_prefill_size", None)
    if chunk is not None and chunk > 0:
        reading.put("engine.max_num_batched_tokens", chunk, reading.sources["line.chunked_prefill_size"])
    elif chunk is not None:
        reading.put("engine.enable_chunked_prefill", False, reading.sources["line.chunked_prefill_size"])
    if reading.line.pop("priorities", False):
        reading.put("engine.scheduling_policy", "priority", reading.sources["line.priorities"])
    _sglang_drafts(reading)


def _sglang_drafts(reading: Reading) -> None:
    """Steps of a chain; with `--speculative-eagle-topk` above 1 a tree, whose shape the drafter's probabilities say."""
    steps, tokens = reading.line.pop("draft_steps", None), reading.line.pop("draft_tokens", None)
    if reading.line.pop("eagle_topk", 1) > 1:
        reading.unmodelled.append(
            (reading.sources["line.eagle_topk"], "trees that a drafter chooses by its probabilities")
        )
    method = reading.get(f"{_CONFIG}.method")
    if method is None:
        return
    depth = tokens if method == "ngram" or (steps is None and tokens) else steps
    if depth is None:
        depth = _STEPS
        reading.assumed.append(f"{_STEPS} drafted tokens, as SGLang chooses for most models")
    source = reading.sources.get("line.draft_tokens" if depth == tokens else "line.draft_steps", "")
    reading.put(f"{_CONFIG}.num_speculative_tokens", depth, source)


def _trtllm(reading: Reading) -> None:
    """Under attention DP each rank has its own requests (llm_args.py, enable_attention_dp)."""
    ranks = reading.get("engine.tensor_parallel_size") or 1
    if reading.line.pop("attention_dp", False) and ranks > 1:
        reading.put("engine.tensor_parallel_size", 1, "enable_attention_dp: true")
        reading.put("engine.data_parallel_size", ranks, f"{ranks} ranks with enable_attention_dp")
    _experts(reading)
    waits, host_bytes = reading.line.pop("timeout_iters", None), reading.line.pop("host_cache_bytes", None)
    if reading.line.pop("balances", False) and waits:
        reading.put("engine.attention_dp_timeout_iters", waits, reading.sources["line.timeout_iters"])
    if host_bytes:
        reading.put("engine.kv_offload.capacity_bytes", host_bytes, reading.sources["line.host_cache_bytes"])


def _lmdeploy(reading: Reading) -> None:
    _experts(reading)
    reading.unmodelled.append(("lmdeploy", "its own kernels and scheduler, for which vLLM's stand in"))


def _llama_server(reading: Reading) -> None:
    """`-c` is the context of all slots together, unless their number is chosen by the server, which then share it."""
    name = reading.line.pop("gguf", None)
    if name is not None:
        _gguf(reading, str(name), reading.sources["line.gguf"])
    context, slots = reading.line.pop("ctx_size", None), reading.get("engine.max_num_seqs")
    if context is not None:
        reading.put("engine.max_model_len", context // (slots or 1), reading.sources["line.ctx_size"])
    values = reading.line.pop("cache_type_v", None)
    if values != reading.get("engine.kv_cache_dtype"):
        argument = reading.sources.get("line.cache_type_v") or reading.sources["engine.kv_cache_dtype"]
        reading.unmodelled.append((argument, "keys and values in two formats; taken as that of the keys"))
    layers = str(reading.line.pop("gpu_layers", "all"))
    if layers not in ("all", "auto", "-1") and not (layers.isdecimal() and int(layers) >= _ALL_LAYERS):
        why = "layers with the CPU; give engine.cpu and engine.n_gpu_layers"
        reading.unmodelled.append((reading.sources["line.gpu_layers"], why))


def _ollama(reading: Reading) -> None:
    """`llama3.1:8b-instruct-q8_0`: a family, a size, and a type, Q4_K_M where none is given; or `hf.co/owner/name`."""
    tag = str(reading.line.pop("tag", ""))
    host, _, repository = tag.partition("/")
    if host in _HUBS:
        _gguf(reading, repository, tag)
    elif tag:
        family, _, rest = tag.partition(":")
        parts = rest.split("-")
        kind = next((part for part in parts[1:] if _GGUF_TYPE.fullmatch(part)), None)
        size = [part for part in parts if part != kind]
        sizes = ["-".join(size[:count]) for count in (1, *range(len(size), 1, -1))]
        families = (family, _LETTER_DIGIT.sub(r"\1-\2", family))
        names = [f"{name}-{suffix}".strip("-") for suffix in sizes for name in families]
        known = next((name for name in names if looked_up("models", name) is not None), names[0])
        reading.put("model", known, tag)
        _weights(reading, known, kind or "", tag, "which most of Ollama's tags have")
    if reading.get("engine.max_num_seqs") is None:
        reading.put("engine.max_num_seqs", 1)
        reading.assumed.append("one request at a time (OLLAMA_NUM_PARALLEL)")


def _gguf(reading: Reading, name: str, argument: str) -> None:
    """The model of a file or of a Hugging Face repository of GGUF files. A file that is here says it all itself."""
    path = expanded(name)
    if may_touch(path) and path.is_file():
        reading.put("model", str(path.resolve()), argument)
        return
    repository, _, kind = name.partition(":")
    stem = PurePath(repository).name.removesuffix(".gguf")
    stem = re.sub(r"[-_.]gguf$", "", stem, flags=re.IGNORECASE)
    named = _TYPE_AT_END.fullmatch(stem)
    stem, kind = (named[1], named[2]) if named else (stem, kind)
    reading.put("model", stem, argument)
    why = "as the file's name has no type" if repository.endswith(".gguf") else "the usual type of a repository's files"
    _weights(reading, stem, kind, argument, why)


def _weights(reading: Reading, model: str, kind: str, argument: str, why: str) -> None:
    """The type of a GGUF file as the format of the weights; gpt-oss comes in its own alone."""
    if kind.lower() in _FLOATS:
        reading.put("engine.dtype", _FLOATS[kind.lower()], argument)
    elif kind:
        reading.put("engine.quantization", kind.lower(), argument)
    elif not model.lower().startswith("gpt-oss"):
        reading.put("engine.quantization", "q4_k_m")
        reading.assumed.append(f"weights in Q4_K_M, {why}")


def _experts(reading: Reading) -> None:
    """Ranks that share out whole experts: all of them, or none."""
    size = reading.line.pop("expert_ranks", None)
    if size is None or size < 2:
        return
    source = reading.sources["line.expert_ranks"]
    ranks = (reading.get("engine.tensor_parallel_size") or 1) * (reading.get("engine.data_parallel_size") or 1)
    reading.put("engine.enable_expert_parallel", True, source)
    if size != ranks:
        reading.unmodelled.append(
            (source, f"experts over {size} of {ranks} ranks, and split within; taken as over all")
        )


def _drafts(reading: Reading) -> None:
    """The drafter's fields, as its method has them."""
    method = reading.get(f"{_CONFIG}.method")
    if method is None:
        return
    if method == "draft_model" and "draft_model" in reading.line:
        reading.move("draft_model", f"{_CONFIG}.model")
        reading.move("draft_quantization", f"{_CONFIG}.quantization")
    elif method in _OWN_HEADS and reading.line.pop("draft_model", None) is not None:
        reading.notes.append(f"{reading.sources['line.draft_model']}: priced by its method, {method}, not by its files")
    if reading.get(f"{_CONFIG}.acceptance") is None:
        source = reading.sources.get(f"{_CONFIG}.method", "")
        rate = RIGHT_OF_MTP if "mtp" in source or "NEXTN" in source else _RIGHT.get(method, 0.7)
        reading.put(f"{_CONFIG}.acceptance.rate", rate)
        reading.assumed.append(f"{rate:.0%} of the tokens that {method} drafts are right ({_CONFIG}.acceptance)")


def _role(reading: Reading) -> None:
    role, connector = reading.line.pop("kv_role", "kv_both"), reading.line.pop("kv_connector", None)
    source = reading.sources.get("line.kv_role") or reading.sources["line.kv_connector"]
    if role in _ROLES:
        reading.line["role"] = _ROLES[role]
        reading.sources["line.role"] = source
    elif role not in ("null", None):
        what = f"where {connector or 'a connector'} takes KV blocks to and from; see engine.kv_offload"
        reading.unmodelled.append((source, what))


_BY_COMMAND: dict[str, Callable[[Reading], None]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm": _trtllm,
    "lmdeploy": _lmdeploy,
    "llama-server": _llama_server,
    "ollama": _ollama,
}


_ENGINE = "engine."


def engine_arguments(engine: EngineSpec, model: ModelSpec) -> list[str]:
    """vLLM's arguments to serve `model`: what differs from its defaults; ranks, lengths and the step's size always."""
    arguments: list[str] = []
    nested: dict[str, dict[str, Any]] = {}
    defaults = dict(engine.described.facts.defaults)
    for name, flag in _flags().items():
        path = str(flag.field).removeprefix(_ENGINE).split(".")
        value = _value(engine, path)
        default = defaults.get(path[0], EngineSpec.model_fields[path[0]].default) if len(path) == 1 else None
        if len(path) > 1 and path[0] != "speculative_config":
            default = _value(EngineSpec(), path)
        if value is None or (value == default and not flag.always):
            continue
        parent, dot, key = name.partition(".")
        if dot:
            nested.setdefault(parent, {})[key] = value
        elif flag.kind == "switch":
            arguments.append(f"--{'' if value != flag.inverse else 'no-'}{name}")
        else:
            arguments += [f"--{name}", str(value)]
    _drafter(engine, model, nested)
    for parent, data in nested.items():
        arguments += [f"--{parent}", json.dumps(data)]
    return arguments + _offload(engine)


def left_out_fields(engine: EngineSpec) -> list[str]:
    """The fields of `engine` that were given and that no argument of vLLM's says."""
    said = {str(flag.field).removeprefix(_ENGINE).partition(".")[0] for flag in _flags().values()}
    others = engine.model_fields_set - said - {"kv_offload", "version"}
    return sorted(name for name in others if getattr(engine, name) != EngineSpec.model_fields[name].default)


@cache
def _flags() -> dict[str, ModelledFlag]:
    """The flag that says each field as it is, in the order of the table."""
    found = {}
    for name, flag in load_command("vllm").modelled.items():
        says_it = flag.only is None or bool(flag.only)
        if flag.field is not None and flag.field.startswith(_ENGINE) and says_it and "acceptance" not in flag.field:
            found[name] = flag
    return found


def _value(engine: EngineSpec, path: list[str]) -> Any:
    found: Any = engine
    for part in path:
        found = getattr(found, part, None) if isinstance(found, Spec) else None
    return found


def _drafter(engine: EngineSpec, model: ModelSpec, nested: dict[str, dict[str, Any]]) -> None:
    """What the drafter is, by the name that the Hub has for it."""
    drafts = engine.speculative_config
    if drafts is None:
        return
    nested["speculative-config"]["num_speculative_tokens"] = drafts.depth
    if drafts.is_mtp_of(model):
        nested["speculative-config"]["method"] = "mtp"
    if drafts.model is not None:
        nested["speculative-config"]["model"] = drafts.model.hf_id or drafts.model.name
        if drafts.quantization is not None:
            nested["speculative-config"]["quantization"] = drafts.quantization


def _offload(engine: EngineSpec) -> list[str]:
    """The second tier, in GiB of all ranks (vllm/config/cache.py, kv_offloading_size)."""
    if engine.kv_offload is None:
        return []
    return ["--kv-offloading-size", f"{engine.kv_offload.capacity_bytes * engine.tensor_parallel_size / 2**30:.10g}"]
