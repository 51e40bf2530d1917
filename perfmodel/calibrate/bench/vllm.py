"""Results of `vllm bench serve --save-result [--save-detailed]` and of SGLang's `bench_serving`, one object a run.

Both descend from one script: latencies are in ms under the same keys, arrays in s. SGLang says `e2e_latency` for
`e2el` and `total_throughput` for `total_token_throughput`, and nothing of the model; neither says anything of the
devices. Details have no starting times in SGLang's files and in older ones of vLLM's; its lists have failed requests,
too, with their error and no tokens.

Fields: vllm/benchmarks/serve.py, sglang/benchmark/serving.py (0.5.23).
"""

__all__ = ["is_vllm_result", "read_vllm_result"]

from collections.abc import Mapping
from math import isinf
from typing import Any

from perfmodel.calibrate.bench.runs import (
    BenchLoad,
    BenchRun,
    RequestTimes,
    Said,
    duration_of,
    figure,
    figures_of,
    request_times,
    text_of,
)
from perfmodel.calibrate.served.setups import engine_of
from perfmodel.errors import SpecError

_STATISTICS = ("mean", "median", "p90", "p95", "p99")
_NAMES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2el", "e2e_latency": "e2el"}
_RATES = ("request_throughput", "output_throughput", "total_token_throughput")
_ARRAYS = ("input_lens", "output_lens", "ttfts", "itls")
_OF_ENGINES = ("sglang", "vllm", "tensorrt-llm", "trt")


def is_vllm_result(data: Mapping[str, Any]) -> bool:
    """Whether it is such an object: what was sent, and what became of it."""
    return {"request_rate", "completed", "total_input_tokens"} <= set(data) and "hw" not in data


def read_vllm_result(name: str, data: Mapping[str, Any]) -> BenchRun:
    """The run that `data` is of, called `name`. Raises SpecError for what cannot be compared."""
    is_sglang = "mean_e2e_latency_ms" in data or "sharegpt_output_len" in data
    completed = int(figure(name, data, "completed") or 0)
    times = _times(name, data) if all(isinstance(data.get(key), list) for key in _ARRAYS) else None
    if not completed:
        raise SpecError(f"{name}: none of its requests was answered; there is nothing to compare.")
    measured = _figures(name, data)
    if times is not None:
        measured |= figures_of(times, duration_of(name, data, times))
    sent = _sent(name, data, times, completed)
    tool = "SGLang bench_serving" if is_sglang else "vllm bench serve"
    return BenchRun(
        name=name,
        tool=tool,
        version="",
        says=_says(name, data),
        load=_load(name, data, sent, completed),
        measured=measured,
        completed=completed,
        failed=max(sent - completed, 0),
        times=times,
        notes=_notes(name, data, times),
        speed=_speed(name, data),
    )


def _figures(name: str, data: Mapping[str, Any]) -> dict[str, float]:
    keys = {f"{s}_{theirs}_ms": f"{s}_{ours}_ms" for theirs, ours in _NAMES.items() for s in _STATISTICS}
    keys |= {key: key for key in _RATES} | {"total_throughput": "total_token_throughput"}
    found = {ours: figure(name, data, theirs) for theirs, ours in keys.items() if theirs in data}
    return {key: value for key, value in found.items() if value}


def _speed(name: str, data: Mapping[str, Any]) -> float:
    """The emulator's speed from `--metadata perfmodel_speed=0.5`; 1 without it. Raises SpecError for 0."""
    speed = figure(name, {"perfmodel_speed": 1, **data}, "perfmodel_speed")
    if not speed:
        raise SpecError(f"{name}: perfmodel_speed: got {data['perfmodel_speed']}; expected more than 0.")
    return speed


def _unusable(data: Mapping[str, Any]) -> list[str]:
    """Figures that are in the file and measure nothing: zero, or not finite."""
    asked = [f"{statistic}_{name}_ms" for name in _NAMES for statistic in _STATISTICS]
    given = {key: data[key] for key in (*asked, *_RATES, "duration") if data.get(key) is not None}
    return [key for key, value in given.items() if isinstance(value, int | float) and not 0 < value < float("inf")]


def _times(name: str, data: Mapping[str, Any]) -> RequestTimes:
    prompts, outputs, ttfts, itls = (data[key] for key in _ARRAYS)
    count = len(prompts)
    errors = data.get("errors")
    errors = errors if isinstance(errors, list) else [""] * count
    lists = dict(zip((*_ARRAYS, "errors"), (prompts, outputs, ttfts, itls, errors), strict=True))
    unequal = next((key for key, values in lists.items() if len(values) != count), None)
    if unequal is not None:
        raise SpecError(
            f"{name}: found {len(lists[unequal]):,} {unequal} for {count:,} input_lens, allowed as many of each; the "
            f"file was cut off, or put together from several runs."
        )
    # The script has 0 tokens of a failed request, and sometimes no error.
    answered = [not error and output != 0 for error, output in zip(errors, outputs, strict=True)]
    e2els = [_whole(name, number, ttft, gaps) for number, (ttft, gaps) in enumerate(zip(ttfts, itls, strict=True))]
    starts = data.get("start_times")
    columns = {"prompt": prompts, "output": outputs, "ttft": ttfts, "e2el": e2els}
    return request_times(name, columns, answered, starts if isinstance(starts, list) else None)


def _whole(name: str, number: int, ttft: Any, gaps: Any) -> Any:
    """Seconds from a request to its last token: what came first, and the gaps behind."""
    if not isinstance(gaps, list):
        raise SpecError(f"{name}: request {number} has {str(gaps)[:20]!r} as its itls, expected a list of seconds.")
    try:
        return ttft + sum(gaps)
    except TypeError:
        raise SpecError(f"{name}: request {number} has an entry in its itls that is no number.") from None


def _sent(name: str, data: Mapping[str, Any], times: RequestTimes | None, completed: int) -> int:
    listed = len(data["input_lens"]) if times is not None else 0
    stated = int(figure(name, data, "num_prompts") or 0)
    return max(listed, stated, completed + int(figure(name, data, "failed") or 0))


def _load(name: str, data: Mapping[str, Any], sent: int, completed: int) -> BenchLoad:
    """An infinite rate sends all at once, or as places come free."""
    rate, concurrency = data["request_rate"], data.get("max_concurrency")
    is_unlimited = rate in ("inf", "trace", None) or (isinstance(rate, float) and isinf(rate))
    prompt, answer = (
        (figure(name, data, key) or 0) / completed or None for key in ("total_input_tokens", "total_output_tokens")
    )
    slots = int(figure(name, data, "max_concurrency") or 0) if concurrency is not None else 0
    burstiness = figure(name, data, "burstiness") or 1.0
    return BenchLoad(
        process="open" if not is_unlimited else "closed" if 0 < slots < sent else "burst",
        num_requests=sent,
        concurrency=slots or None,
        rate=None if is_unlimited else figure(name, data, "request_rate"),
        cv=burstiness**-0.5,  # of gamma-distributed gaps whose shape the script calls so
        prompt=prompt,
        answer=answer,
    )


def _says(name: str, data: Mapping[str, Any]) -> dict[str, Said]:
    """Setups are not in these files, but for what `--metadata` has added."""
    found: dict[str, Said] = {}
    model = text_of(name, data, "model_id") or text_of(name, data, "server_info", "model_path")
    if model:
        found["model"] = model
    backend = text_of(name, data, "backend") or text_of(name, data, "endpoint_type")
    if backend.startswith(_OF_ENGINES) and not backend.startswith("vllm"):  # any server of OpenAI's API may be "vllm"
        found["engine.profile"] = engine_of(backend)[0]
    for key in ("tensor_parallel_size", "tp", "tp_size"):
        value = figure(name, data, key) or figure(name, data.get("server_info"), key)
        if value:
            found["engine.tensor_parallel_size"] = int(value)
            break
    version = text_of(name, data, "server_info", "version")
    if version:
        found["engine.version"] = version
    return found


def _notes(name: str, data: Mapping[str, Any], times: RequestTimes | None) -> tuple[str, ...]:
    notes = []
    if unusable := _unusable(data):
        notes.append(f"left out, since zero or not finite: {', '.join(unusable)}")
    if times is not None and times.start_s is None:
        notes.append("the file has no starting times: arrivals are drawn at its rate, lengths are its own, in order")
    if data.get("request_rate") == "trace":
        notes.append("requests were sent by a trace's times, which are not in the file: taken as sent at once")
    if figure(name, data, "spec_decode_acceptance_length") or figure(name, data, "accept_length"):
        notes.append("the server speculated: without --set engine.speculative_config=... tokens come one by one here")
    return tuple(notes)
