"""Tables of published serving results (`other_devices.csv`): rows as setups, cell by cell.

What a row does not say and is assumed: prompts of ShareGPT have 220 tokens on average and its answers 200; prompts of
"tens of tokens" 32; all else unknown 512 in, 256 out. Several instances share a load evenly.
"""

import csv
import gzip
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.evidence.observation import MALFORMED
from perfmodel.evidence.sources.setups import Load, ServedRow, Setup, engine_of, has_card

Entry = Mapping[str, str]
_NEEDED_tables = ("id", "kind", "device", "engine", "model")
_PROMPT, _ANSWER = 512, 256
_FEW = 16  # tokens of an answer whose first step was timed
_OF_WORDS = {"sharegpt": (220, 200), "short": (32, 128)}
_ROLES = re.compile(r"(\d+)P(\d+)D", re.IGNORECASE)
_RANKS = re.compile(r"dep(\d+)", re.IGNORECASE)
_POWER = re.compile(r"power limit (\d+) ?W")
# What flags say that no model of the device can know: rows that are listed apart.
_APART = ("does not match lengths",)
_CLASSES = (("cpu", "xeon|epyc|cpu|grace"), ("apu", "strix|igpu|apple"), ("gpu", "rtx|radeon|rx-|arc|gtx"))
_MILLISECONDS = ("ttft", "tpot", "itl", "e2e")


def read_table(path: str | Path, needed: Sequence[str], what: str) -> list[dict[str, str]]:
    """The rows of a CSV, plain or gzipped, cells without spaces around them.

    needed: columns that it must have; what: it is a table of

    Raises SpecError for a file that is missing, unreadable or without those columns.
    """
    file = Path(path)
    if not file.is_file():
        raise SpecError(f"{file}: no such file.")
    try:
        with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as stream:
            reader = csv.DictReader(stream)
            missing = [name for name in needed if name not in (reader.fieldnames or ())]
            if missing:
                raise SpecError(f"{file}: is no table of {what}: column {missing[0]} is missing.")
            return [
                {name: (value or "").strip() for name, value in row.items() if isinstance(name, str)} for row in reader
            ]
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise SpecError(f"{file}: cannot be read as a table ({error}).") from None


def devices_folder(path: str | Path) -> Path:
    """Where `devices.csv` is: beside a table or folder of them, or in a folder `local` beside that."""
    own = Path(path) if Path(path).is_dir() else Path(path).parent
    beside = (own, own / "local", own.parent / "local")
    return next((each for each in beside if (each / "devices.csv").is_file()), own)


def number(entry: Entry, name: str) -> float:
    """The figure in a cell; 0 where there is none."""
    try:
        found = float(entry.get(name) or 0.0)
    except ValueError:
        return 0.0
    return found if 0.0 < found < 1e15 else 0.0


def column(entry: Entry, name: str) -> int:
    """The count in a cell; 0 where there is none."""
    return round(number(entry, name))


def read_served_rows(path: str | Path) -> tuple[list[ServedRow], list[tuple[str, str]]]:
    """The results of a table, and (row, reason) of those that cannot be described.

    Raises SpecError for a file that is missing or no such table.
    """
    return described_rows(read_table(path, _NEEDED_tables, "serving results"), _row_tables)


def described_rows(
    entries: Iterable[Entry], row_of: Callable[[str, Entry], ServedRow]
) -> tuple[list[ServedRow], list[tuple[str, str]]]:
    """What `row_of` makes of each entry and its name, and (name, reason) where it makes nothing."""
    rows, left_out = [], []
    for place, entry in enumerate(entries, start=2):
        name = entry.get("id") or f"line {place}"
        try:
            rows.append(row_of(name, entry))
        except PerfmodelError as error:
            left_out.append((name, str(error)))
        except MALFORMED as error:
            left_out.append((name, f"its description is incomplete: {error}"))
    return rows, left_out


def _row_tables(name: str, entry: Entry) -> ServedRow:
    setup, measured = _setup_tables(entry), _measured(entry)
    if not measured:
        raise ValueError("it has no figure to compare with")
    labels = {
        "device": setup.device,
        "device class": setup.device_class,
        "model": setup.model,
        "engine": setup.engine,
        "scenario": entry["kind"],
        "precision": setup.precision or "not said",
        "devices": str(setup.num_devices),
        "source": entry.get("source", "") or "not said",
    }
    if setup.gguf_type:
        labels["gguf type"] = setup.gguf_type
    flags = entry.get("flags", "")
    group = " ".join(entry.get(key, "") for key in _SETTING)
    return ServedRow(name, setup, measured, labels, group, flags, any(word in flags for word in _APART))


_SETTING = (
    *("device", "num_devices", "engine", "model", "precision", "kv_dtype", "tp", "pp", "dp_or_instances"),
    *("kind", "isl", "osl", "concurrency", "request_rate"),
)


def _measured(entry: Entry) -> dict[str, float]:
    """Figures by metric: a mean where there is one, else the median; ITL is TPOT where nothing is drafted. Rates and
    waiting of requests of unknown lengths say nothing; the time of a token does."""
    found = {"output_tokens_per_s": number(entry, "output_tok_s")}
    for metric in _MILLISECONDS:
        value = number(entry, f"{metric}_mean_ms") or number(entry, f"{metric}_p50_ms")
        name = {"itl": "tpot", "e2e": "e2el"}.get(metric, metric)
        if value and not found.get(f"{name}_mean"):
            found[f"{name}_mean"] = value
    if "batch decode" in entry["kind"]:  # one step of a batch, and the prompt of one user
        found = {"tpot_mean": found.get("tpot_mean", 0.0)}
    elif found.get("tpot_mean") and not (_has_length(entry, "isl") and _has_length(entry, "osl")):
        found = {"tpot_mean": found["tpot_mean"]}
    return {metric: value for metric, value in found.items() if value}


def _has_length(entry: Entry, name: str) -> bool:
    """Whether a row says how long prompts (isl) or answers (osl) were."""
    return bool(entry.get(name) or entry.get(f"{name}_mean_actual"))


def _lengths(entry: Entry) -> tuple[int, int, bool]:
    """Mean tokens of prompts and answers, and whether they differ from request to request."""
    text = f"{entry.get('isl', '')} {entry.get('osl', '')}".lower()
    prompt, answer = next((pair for word, pair in _OF_WORDS.items() if word in text), (_PROMPT, _ANSWER))
    prompt = column(entry, "isl_mean_actual") or column(entry, "isl") or prompt
    answer = column(entry, "osl_mean_actual") or column(entry, "osl") or answer
    return prompt, _FEW if "batch decode" in entry["kind"] else answer, "sharegpt" in text


def _setup_tables(entry: Entry) -> Setup:
    device = entry["device"]
    device_class = next((name for name, words in _CLASSES if re.search(words, device.lower())), "accelerator")
    engine, _ = engine_of(entry["engine"], device_class)
    prompt, answer, is_varied = _lengths(entry)
    shape = entry.get("dp_or_instances", "")
    roles, num_devices = _ROLES.search(shape), max(1, column(entry, "num_devices"))
    ranks = _RANKS.search(shape)
    tp, pp = max(1, column(entry, "tp")), max(1, column(entry, "pp"))
    instances = column(entry, "dp_or_instances") or max(1, num_devices // (tp * pp))
    if ranks is not None:
        tp = int(ranks[1])
    power = _POWER.search(entry.get("flags", ""))
    gguf = entry.get("precision", "").partition("gguf")[2].strip(" -")
    load, rate, concurrency, count = _load(entry)
    note = entry.get("note", "").lower()
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
        prompt=prompt,
        answer=answer,
        tp=tp,
        pp=pp,
        instances=1 if roles or ranks else instances,
        roles=(int(roles[1]), int(roles[2])) if roles else None,
        is_varied=is_varied,
        rate=rate,
        concurrency=concurrency,
        num_requests=count,
        max_num_seqs=column(entry, "max_num_seqs"),
        max_num_batched_tokens=column(entry, "max_num_batched_tokens"),
        gguf_type=gguf,
        is_eager="enforce-eager" in note,
        is_in_process=any(word in entry["kind"] for word in ("offline", "static", "single request")),
        power_cap_w=float(power[1]) if power else 0.0,
        is_static="static" in entry["kind"].lower(),
    )


def _load(entry: Entry) -> tuple[Load, float, int, int]:
    """(load, requests per second, requests in flight, requests in all)"""
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


@dataclass(frozen=True)
class _DataSet:
    """Mean tokens of prompts and answers; whether lengths differ; sequences that a request decodes."""

    prompt: int
    answer: int
    is_varied: bool = True
    beams: int = 1


# By words of the benchmark's name; the first that fits counts.
_DATA_SETS = (
    ("llama2|llama-2", _DataSet(294, 294)),
    ("405b", _DataSet(9400, 680)),
    ("llama3|llama-3", _DataSet(778, 128, is_varied=False)),
    ("gptj|gpt-j", _DataSet(920, 69, beams=4)),
    ("mixtral", _DataSet(390, 145)),
    ("deepseek", _DataSet(800, 3880)),
    ("", _DataSet(512, 512)),
)
# TensorRT-LLM and vLLM as they were when the rounds' results were due; frameworks name TensorRT's own version, if any.
_RELEASES = {"v3.1": "0.5", "v4.0": "0.8", "v4.1": "0.12", "v5.0": "0.18", "v5.1": "1.0", "v6.0": "1.3"}
_MOST_TOGETHER = 2048  # samples in flight that submitters allow an engine [assumed]; KV blocks limit most
_TOKENS = 8192  # of a step [assumed]
_NEEDED_mlperf = ("id", "accelerator", "num_accelerators", "model", "scenario", "framework")
_LATENCIES = {f"{name}_{at}": f"{name}_{at}_ms" for name in ("tpot", "ttft") for at in ("mean", "p99")}
_SERVED = ("Server", "Interactive")
# AMD's own builds of vLLM plan ten steps at once in these benchmarks (--num-scheduler-steps 10 in its documents).
_BUILDS = (("rocm", 10), ("+mlperf", 10))


def read_mlperf_rows(path: str | Path) -> tuple[list[ServedRow], list[tuple[str, str]]]:
    """The results of a table, and (row, reason) of those that cannot be described.

    Raises SpecError for a file that is missing or no such table.
    """
    return described_rows(read_table(path, _NEEDED_mlperf, "MLPerf results"), _row_mlperf)


def _row_mlperf(name: str, entry: Entry) -> ServedRow:
    setup = _setup_mlperf(entry)
    answer = number(entry, "osl_mean") or setup.answer
    measured = {}
    rate = number(entry, "tokens_per_s") or answer * (
        number(entry, "samples_per_s") or number(entry, "performance_raw")
    )
    if setup.load == "saturated":
        measured["tokens_per_s"] = rate
    else:
        measured |= {metric: number(entry, cells) for metric, cells in _LATENCIES.items()}
        if setup.beams > 1:
            measured["e2el_mean"] = number(entry, "latency_mean_ms")
    measured = {metric: value for metric, value in measured.items() if value > 0}
    if not measured:
        raise ValueError("it has no figure to compare with")
    return ServedRow(
        name,
        setup,
        measured,
        _labels(entry, setup),
        " ".join(entry.get(key, "") for key in ("accelerator", "num_accelerators", "model", "precision", "scenario")),
        entry.get("flags", ""),
        "same figure as" in entry.get("flags", ""),
    )


def _labels(entry: Entry, setup: Setup) -> dict[str, str]:
    return {
        "device": setup.device,
        "device class": setup.device_class,
        "model": setup.model,
        "engine": setup.engine,
        "scenario": entry["scenario"],
        "precision": entry.get("precision", "") or "not said",
        "devices": f"{setup.num_devices}",
        "round": entry.get("round", "") or "not said",
        "submitter": entry.get("submitter", "") or "not said",
    }


def _setup_mlperf(entry: Entry) -> Setup:
    device, framework, benchmark = entry["accelerator"], entry["framework"], entry["model"]
    device_class = "cpu" if re.search("xeon|epyc|cpu|grace", device.lower()) else "accelerator"
    engine, version = engine_of(framework, device_class)
    is_compiled = engine == "trtllm"
    if is_compiled or not version:
        version = _RELEASES.get(entry.get("round", ""), "") if is_compiled else version
    data = next(each for words, each in _DATA_SETS if re.search(words, benchmark.lower()))
    is_served = entry["scenario"] in _SERVED
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
        load="open" if is_served else "saturated",
        prompt=column(entry, "isl_mean") or data.prompt,
        answer=column(entry, "osl_mean") or data.answer,
        is_varied=data.is_varied,
        rate=(number(entry, "target_qps") or number(entry, "samples_per_s")) if is_served else 0.0,
        max_num_seqs=_MOST_TOGETHER,
        max_num_batched_tokens=_TOKENS,
        beams=data.beams,
        is_in_process=True,
        is_compiled=is_compiled,
        steps_at_once=next((steps for word, steps in _BUILDS if word in framework.lower()), 1),
        tpot_limit_s=number(entry, "tpot_limit_ms") / 1e3 if is_served else 0.0,
        ttft_limit_s=number(entry, "ttft_limit_ms") / 1e3 if is_served else 0.0,
    )
