"""MLPerf Inference results as setups: what the closed division fixes, and what submitters do.

Offline sends all samples at the start and runs for ten minutes at least, so that the engine is saturated; Server and
Interactive send single samples as a Poisson process at the stated rate, on which the 99th percentiles of TTFT and TPOT
keep their limits. The load generator calls the engine in its process with token ids. Lengths are the data sets':

    Llama 2 70B     OpenOrca, prompts and answers of up to 1,024 tokens, 294 each on average
    Llama 3.1 405B  9,400 and 680 (mlcommons.org, "LLM inference v5.0")
    Llama 3.1 8B    CNN/DailyMail, 778 (mlcommons.org, "Small LLM inference 5.1"); answers of 128, by the results
    GPT-J           CNN/DailyMail, answers of up to 128, beams of four
    DeepSeek-R1     answers of 3,880 on average (mlcommons.org, "DeepSeek inference 5.1")

Means of prompts other than those two are recalled. Answers' means are taken from the result where it has one.
"""

__all__ = ["read_mlperf_rows"]

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from perfmodel.calibrate.served.scenarios import has_card
from perfmodel.calibrate.served.setups import ServedRow, Setup, engine_of
from perfmodel.calibrate.served.tables import column, described_rows, number, read_table

Entry = Mapping[str, str]


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
_NEEDED = ("id", "accelerator", "num_accelerators", "model", "scenario", "framework")
_LATENCIES = {f"{name}_{at}": f"{name}_{at}_ms" for name in ("tpot", "ttft") for at in ("mean", "p99")}
_SERVED = ("Server", "Interactive")
# AMD's own builds of vLLM plan ten steps at once in these benchmarks (--num-scheduler-steps 10 in its documents).
_BUILDS = (("rocm", 10), ("+mlperf", 10))


def read_mlperf_rows(path: str | Path) -> tuple[list[ServedRow], list[tuple[str, str]]]:
    """The results of a table, and (row, reason) of those that cannot be described.

    Raises SpecError for a file that is missing or no such table.
    """
    return described_rows(read_table(path, _NEEDED, "MLPerf results"), _row)


def _row(name: str, entry: Entry) -> ServedRow:
    setup = _setup(entry)
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


def _setup(entry: Entry) -> Setup:
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
