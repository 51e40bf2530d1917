"""Published results: servers, offline jobs and static batches (`other_devices.csv`), equal requests in one batch
(`static_batches.csv`, recognised by its columns), and MLPerf Inference.

Assumed where a row of the first is silent: ShareGPT has mean prompts of 220 and answers of 200 tokens; "tens of
tokens" is 32; else 512 in, 256 out. Instances share the load evenly.

MLPerf, closed division: Offline sends all samples at the start and runs for at least ten minutes, so the engine is
saturated; Server and Interactive are Poisson at the stated rate, with limits on the 99th percentiles of TTFT and TPOT.
The load generator calls the engine in-process with token ids. Lengths by data set:

    Llama 2 70B     OpenOrca, prompts and answers of up to 1,024 tokens, 294 each on average
    Llama 3.1 405B  9,400 and 680 (mlcommons.org, "LLM inference v5.0")
    Llama 3.1 8B    CNN/DailyMail, 778 (mlcommons.org, "Small LLM inference 5.1"); answers of 128, by the results
    GPT-J           CNN/DailyMail, answers of up to 128, beams of four
    DeepSeek-R1     answers of 3,880 on average (mlcommons.org, "DeepSeek inference 5.1")

Prompt means other than those two are recalled. Answer means are taken from the result if it has one."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from perfmodel.errors import SpecError
from perfmodel.evidence.observation import Entry, Observation, Reasons, described, lenient_rows, named
from perfmodel.evidence.sources.setups import Load, Setup, engine_of, has_card
from perfmodel.files.tables import load_table

_WORDS = load_table("published_words")
_NEEDED = ("id", "device", "engine", "model")
_PROMPT, _ANSWER = 512, 256
_FEW = 16  # tokens of an answer whose first step was timed
_OF_WORDS = {"sharegpt": (220, 200), "short": (32, 128)}
_ROLES = re.compile(r"(\d+)P(\d+)D", re.IGNORECASE)
_RANKS = re.compile(r"dep(\d+)", re.IGNORECASE)
_POWER = re.compile(r"power limit (\d+) ?W")
# Flags of effects outside any device model: such rows are listed apart.
_APART = "does not match lengths"
_MILLISECONDS = ("ttft", "tpot", "itl", "e2e")


def devices_folder(path: str | Path) -> Path:
    """Folder of `devices.csv`: beside a table or folder of tables, or in a folder `local` beside that."""
    own = Path(path) if Path(path).is_dir() else Path(path).parent
    folders = (own, own / "local", own.parent / "local")
    return next((item for item in folders if (item / "devices.csv").is_file()), own)


def number(entry: Entry, name: str) -> float:
    """The number in a cell; 0 if empty."""
    try:
        result = float(entry.get(name) or 0.0)
    except ValueError:
        return 0.0
    return result if 0.0 < result < 1e15 else 0.0


def column(entry: Entry, name: str) -> int:
    """The count in a cell; 0 if empty."""
    return round(number(entry, name))


def read_served_rows(path: str | Path) -> tuple[list[Observation], Reasons]:
    """The results of a table, or of a table of static batches, and (row, reason) of undescribed ones. Raises SpecError
    for a missing or other file."""
    if is_batch_table(path):
        return described(named(lenient_rows(path, _NEEDED, "static batches")), _batch_row)
    return described(named(lenient_rows(path, (*_NEEDED, "kind"), "serving results")), _served_row)


def is_batch_table(path: str | Path) -> bool:
    """Whether a table has static batches, by its columns. Raises SpecError for a missing or other file."""
    return any(entry.keys() >= {*_BATCH} for entry in lenient_rows(path, (), "static batches")[:1])


def read_mlperf_rows(path: str | Path) -> tuple[list[Observation], Reasons]:
    """As `read_served_rows`, for a table of MLPerf results."""
    return described(named(lenient_rows(path, _NEEDED_OF_MLPERF, "MLPerf results")), _mlperf_row)


def _observation(
    name: str, entry: Entry, setup: Setup, measured: Mapping[str, float], scenario: str, also: Mapping[str, str]
) -> Observation:
    """A result as a row. Raises ValueError without figures; in `measured`, 0 is none."""
    metrics = {metric: value for metric, value in measured.items() if value > 0}
    if not metrics:
        raise ValueError("it has no figure to compare with")
    labels = {
        "device": setup.device,
        "device class": setup.device_class,
        "model": setup.model,
        "engine": setup.engine,
        "scenario": scenario,
        "devices": str(setup.num_devices),
        **{name: text or "not said" for name, text in also.items()},
    }
    what = f"{setup.model} {setup.precision} on {setup.num_devices} x {setup.device}"
    flags = entry.get("flags", "")
    setting, apart = (_MLPERF_SETTING, _MLPERF_APART) if "accelerator" in entry else (_SETTING, _APART)
    return Observation(
        name,
        setup,
        metrics,
        label=f"{what}, {setup.engine} {setup.version}, {scenario}",
        labels=labels,
        group=" ".join(entry.get(key, "") for key in setting),
        flags=flags,
        is_reliable=apart not in flags,
        trivial={
            f"{name}_{at}": 1e3 * limit_s
            for name, limit_s in (("tpot", setup.tpot_limit_s), ("ttft", setup.ttft_limit_s))
            for at in ("mean", "p99")
            if limit_s
        },
    )


# ---------------------------------------------------------------- servers, offline jobs, static batches

# Columns that rows of one setting share.
_SETTING = (
    *("device", "num_devices", "engine", "model", "precision", "kv_dtype", "tp", "pp", "dp_or_instances"),
    *("kind", "isl", "osl", "concurrency", "request_rate"),
)


def _served_row(name: str, entry: Entry) -> Observation:
    setup = _served_setup(entry)
    also = {"precision": setup.precision, "source": entry.get("source", "")}
    if setup.gguf_type:
        also["gguf type"] = setup.gguf_type
    # A mean where there is one, else the median; ITL is TPOT where nothing is drafted.
    measured = {"output_tokens_per_s": number(entry, "output_tok_s")}
    for metric in _MILLISECONDS:
        value = number(entry, f"{metric}_mean_ms") or number(entry, f"{metric}_p50_ms")
        key = {"itl": "tpot", "e2e": "e2el"}.get(metric, metric) + "_mean"
        if value and not measured.get(key):
            measured[key] = value
    has_lengths = all(entry.get(key) or entry.get(f"{key}_mean_actual") for key in ("isl", "osl"))
    # Batch decode is one step of a batch, and the prompt of one user. Rates and waiting of requests of unknown lengths
    # say nothing; the time of a token does.
    if "batch decode" in entry["kind"] or (measured.get("tpot_mean") and not has_lengths):
        measured = {"tpot_mean": measured.get("tpot_mean", 0.0)}
    return _observation(name, entry, setup, measured, entry["kind"], also)


def _served_setup(entry: Entry) -> Setup:
    device, kind, note = entry["device"], entry["kind"].lower(), entry.get("note", "").lower()
    device_class = next(
        (name for name, words in _WORDS["device_classes"] if re.search(words, device.lower())), "accelerator"
    )
    engine, _ = engine_of(entry["engine"], device_class)
    lengths = f"{entry.get('isl', '')} {entry.get('osl', '')}".lower()
    prompt, answer = next((pair for word, pair in _OF_WORDS.items() if word in lengths), (_PROMPT, _ANSWER))
    answer = column(entry, "osl_mean_actual") or column(entry, "osl") or answer
    shape = entry.get("dp_or_instances", "")
    roles, ranks = _ROLES.search(shape), _RANKS.search(shape)
    num_devices = max(1, column(entry, "num_devices"))
    tp, pp = max(1, column(entry, "tp")), max(1, column(entry, "pp"))
    instances = column(entry, "dp_or_instances") or max(1, num_devices // (tp * pp))
    power = _POWER.search(entry.get("flags", ""))
    load, rate, concurrency, count = _load(entry)
    return Setup(
        device=re.sub(r"\s*\(.*\)", "", device),
        device_class=device_class,
        num_devices=num_devices,
        engine=engine,
        version=entry.get("engine_version", ""),
        model=entry["model"],
        precision=entry.get("precision", ""),
        kv_dtype=entry.get("kv_dtype", ""),
        load=load,
        prompt=column(entry, "isl_mean_actual") or column(entry, "isl") or prompt,
        answer=_FEW if "batch decode" in entry["kind"] else answer,
        tp=tp if ranks is None else int(ranks[1]),
        pp=pp,
        instances=1 if roles or ranks else instances,
        roles=(int(roles[1]), int(roles[2])) if roles else None,
        is_varied="sharegpt" in lengths,
        rate=rate,
        concurrency=concurrency,
        num_requests=count,
        max_num_seqs=column(entry, "max_num_seqs"),
        max_num_batched_tokens=column(entry, "max_num_batched_tokens"),
        gguf_type=entry.get("precision", "").partition("gguf")[2].strip(" -"),
        is_eager="enforce-eager" in note,
        is_in_process=any(word in entry["kind"] for word in ("offline", "static", "single request")),
        power_cap_w=float(power[1]) if power else 0.0,
        is_static="static" in kind,
    )


def _load(entry: Entry) -> tuple[Load, float, int, int]:
    """(load, requests/s, requests in flight, requests in all)"""
    kind, arrival = entry["kind"].lower(), entry.get("arrival", "").lower()
    concurrency, count, rate = column(entry, "concurrency"), column(entry, "num_prompts"), number(entry, "request_rate")
    if "single request" in kind:
        return "first_token", 0.0, 1, 1
    if "static" in kind or "all at" in arrival or "offline" in kind:
        return "burst", 0.0, concurrency, concurrency or count or 1000
    if "burst" in arrival:
        return "burst", 0.0, max(concurrency, 1), max(concurrency, 1)
    if rate and not concurrency:
        return "open", rate, 0, count or 500
    concurrency = max(concurrency, 1)
    return "closed", 0.0, concurrency, max(count, concurrency)


# ---------------------------------------------------------------- static batches of several makers' devices

# LLM-Inference-Bench (arXiv 2411.00136): equal requests given at once to the engine in the script's own process, 16-bit
# weights unless `setting` says otherwise; as many as the KV cache holds run together, the others follow. DeepSpeed on
# Gaudi is Optimum Habana's `generate`, one batch. llama.cpp is llama-bench -pg, one sequence, whose batch size is the
# tokens of a prompt that a step computes; on several devices the model is split by layers.
_BATCH = ("experiment", "isl", "osl", "batch_size", "latency_s")
# What rows do not say: Polaris has A100 of 40 GB; vLLM 0.6.1 by the READMEs of MI250 and MI300X and the requirements of
# A100 [assumed of others], TensorRT-LLM by the arguments of the C++ session in its script, llama.cpp by the date.
_BATCH_DEVICES = {"a100": "a100-sxm-40gb"}
_BATCH_VERSIONS = {"vllm": "0.6.1", "trtllm": "0.12", "llamacpp": "3500"}
_MAKERS = re.compile(r"nvidia|amd|intel|habana|gpu|instinct| ")
_DEGREES = re.compile(r"\b(tensor|pipeline|tp|pp|ep)\b(?: *[(=] *(\d+))?")
_STATED = re.compile(r"(weight|kv cache) = (\w+)")


def _batch_row(name: str, entry: Entry) -> Observation:
    setup = _batch_setup(entry)
    ttft_s, latency_s = number(entry, "ttft_s"), number(entry, "latency_s")
    is_other = bool(ttft_s) and setup.answer == 1  # the latency beside a TTFT is of a longer answer
    measured = {
        "batch_latency": 0.0 if is_other else 1e3 * latency_s,
        "batch_ttft": 1e3 * ttft_s,  # of the last prompt: batches of one token take as long
        "mean_power_w": number(entry, "power_mean_w"),
    }
    also = {
        "framework": entry["engine"],
        "setting": entry.get("setting", "") or "default",
        "batch": str(setup.max_num_batched_tokens or setup.concurrency),
        "tokens": f"{setup.prompt:,} in, {setup.answer:,} out",
        "parallelism": f"TP {setup.tp}, PP {setup.pp}" + ", experts shared out" * setup.is_expert_parallel,
    }
    return replace(_observation(name, entry, setup, measured, entry["experiment"], also), group=repr(setup))


def _batch_setup(entry: Entry) -> Setup:
    """Raises SpecError for what no scenario describes."""
    setting, framework = entry.get("setting", "").lower(), entry["engine"].lower()
    if "without kv cache" in setting:
        raise SpecError("without KV cache each token computes all before it anew, which no engine described here does.")
    engine, _ = engine_of(framework)
    device = _MAKERS.sub("", entry["device"].lower())
    if not has_card(entry["model"]):
        raise SpecError(f"unknown model {entry['model']}: no file of this name in workloads/models.")
    count, batch = max(1, column(entry, "num_devices")), column(entry, "batch_size")
    for name in ("isl", "osl", "batch_size"):
        if not column(entry, name):
            raise SpecError(f"{name}: got {entry[name]!r}; expected a number from 1 on.")
    is_single = engine == "llamacpp"
    tp, pp, is_spread = (1, count, False) if is_single else _degrees(setting, count)
    stated = dict(_STATED.findall(setting))
    return Setup(
        device=_BATCH_DEVICES.get(device, device),
        device_class="accelerator",
        num_devices=count,
        engine=engine,
        version="" if framework == "deepspeed" else _BATCH_VERSIONS.get(engine, ""),
        model=entry["model"],
        precision=stated.get("weight", "fp16"),
        kv_dtype=stated.get("kv cache", ""),
        load="burst",
        prompt=column(entry, "isl"),
        answer=column(entry, "osl"),
        tp=tp,
        pp=pp,
        concurrency=1 if is_single else batch,
        num_requests=1 if is_single else batch,
        max_num_batched_tokens=batch if is_single else 0,
        gguf_type="f16" if is_single else "",
        is_eager="mii" in framework,  # DeepSpeed-FastGen captures no CUDA graphs
        is_in_process=True,
        is_static=framework == "deepspeed",
        is_expert_parallel=is_spread,
        block_size=int(setting) if setting.isdigit() else 0,
    )


def _degrees(setting: str, count: int) -> tuple[int, int, bool]:
    """(tensor parallel, pipeline parallel, experts spread over all) of `count` devices. Raises SpecError for experts
    that are spread over some and cut over the others."""
    degrees = {name[0]: int(text or count) for name, text in _DEGREES.findall(setting)}
    if 1 < degrees.get("e", count) < count:
        raise SpecError(f"got experts spread over {degrees['e']} of {count} devices; expected all of them, or one.")
    pp = degrees.get("p", 1)
    if not pp or count % pp:
        raise SpecError(f"got {pp} pipeline stages on {count} devices; expected as many devices on each.")
    return count // pp, pp, "e" in degrees and count > 1


# ---------------------------------------------------------------- MLPerf Inference


class _DataSet(NamedTuple):
    """Mean prompt and answer tokens; whether lengths vary; beams of a request."""

    prompt: int
    answer: int
    is_varied: bool = True
    beams: int = 1


_MAX_TOGETHER = 2048  # samples in flight that submitters allow an engine [assumed]; KV blocks limit most
_TOKENS = 8192  # of a step [assumed]
_RUN_S = 600.0  # a run takes ten minutes at least
_NEEDED_OF_MLPERF = ("id", "accelerator", "num_accelerators", "model", "scenario", "framework")
_LATENCIES = {f"{name}_{at}": f"{name}_{at}_ms" for name in ("tpot", "ttft") for at in ("mean", "p99")}
_SERVED = ("Server", "Interactive")
_ONE_AT_A_TIME, _SINGLE_REQUESTS = "SingleStream", 20  # each waits for the one before it

_MLPERF_APART = "same figure as"
_MLPERF_SETTING = ("accelerator", "num_accelerators", "model", "precision", "scenario")


def _mlperf_row(name: str, entry: Entry) -> Observation:
    setup = _mlperf_setup(entry)
    if setup.load == "saturated":
        answer = number(entry, "osl_mean") or setup.answer
        samples = number(entry, "samples_per_s") or number(entry, "performance_raw")
        measured = {"tokens_per_s": number(entry, "tokens_per_s") or answer * samples}
    else:
        measured = {metric: number(entry, cells) for metric, cells in _LATENCIES.items()}
        if setup.beams > 1 or setup.load == "closed":
            measured["e2el_mean"] = number(entry, "latency_mean_ms")
    also = {key: entry.get(key, "") for key in ("precision", "round", "submitter")}
    return _observation(name, entry, setup, measured, entry["scenario"], also)


def _mlperf_setup(entry: Entry) -> Setup:
    device, framework, benchmark = entry["accelerator"], entry["framework"], entry["model"]
    device_class = "cpu" if re.search("xeon|epyc|cpu|grace", device.lower()) else "accelerator"
    engine, version = engine_of(framework, device_class)
    is_compiled = engine == "trtllm"
    if is_compiled or not version:
        version = _WORDS["releases"].get(entry.get("round", ""), "") if is_compiled else version
    data = next(_DataSet(*row) for words, *row in _WORDS["data_sets"] if re.search(words, benchmark.lower()))
    is_served, is_single = entry["scenario"] in _SERVED, entry["scenario"] == _ONE_AT_A_TIME
    rate = (number(entry, "target_qps") or number(entry, "samples_per_s")) if is_served else 0.0
    used = entry.get("used_model") or benchmark
    model = used if has_card(used) or not has_card(benchmark) else benchmark
    precision = entry.get("precision", "")
    return Setup(
        device=device,
        device_class=device_class,
        num_devices=max(1, column(entry, "gpu_chips") or column(entry, "num_accelerators")),
        engine=engine,
        version=version,
        model=model,
        precision=used if precision in ("", "UNSET") else precision,
        kv_dtype="fp8" if device_class != "cpu" and "16" not in precision else "auto",
        load="open" if is_served else "closed" if is_single else "saturated",
        prompt=column(entry, "isl_mean") or data.prompt,
        answer=column(entry, "osl_mean") or data.answer,
        is_varied=data.is_varied,
        rate=rate,
        concurrency=1 if is_single else 0,
        num_requests=_SINGLE_REQUESTS if is_single else round(rate * _RUN_S),
        max_num_seqs=_MAX_TOGETHER,
        max_num_batched_tokens=_TOKENS,
        beams=data.beams,
        is_in_process=True,
        is_compiled=is_compiled,
        tpot_limit_s=number(entry, "tpot_limit_ms") / 1e3 if is_served else 0.0,
        ttft_limit_s=number(entry, "ttft_limit_ms") / 1e3 if is_served else 0.0,
    )
