"""What several arguments of an engine's server say together: drafts, ranks, the second tier of KV blocks."""

__all__ = ["complete"]

import re
from collections.abc import Callable
from pathlib import PurePath

from perfmodel.errors import SpecError
from perfmodel.files.catalog import expanded, looked_up
from perfmodel.files.reach import may_touch
from perfmodel.specs.commands.server import Reading
from perfmodel.specs.engine.speculation import RIGHT_OF_MTP, RIGHT_OF_NGRAMS

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
