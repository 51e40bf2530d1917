"""What the arguments of a load test say of the traffic: arrivals, lengths, shared prefixes, limits."""

__all__ = ["read_load"]

from collections.abc import Callable
from math import ceil, floor, inf
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.specs.commands.server import Reading

_GOODPUT = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2el": "e2el_ms", "request_latency": "e2el_ms"}
_SHAREGPT = "chat-sharegpt"


def read_load(found: Reading, command: str, place: str) -> None:
    """Fill in `traffic` and `slo` from what the flags of a load test have left in `found.line`.

    command: its name; place: where it stands, for errors

    Raises SpecError for traffic that its data would have to be read for.
    """
    traffic = found.data.setdefault("traffic", {})
    _LENGTHS[command](found, traffic, place)
    if found.data["traffic"] is traffic:
        _arrivals(found, traffic)
    _limits(found, place)
    temperature = found.line.pop("temperature", None)
    if temperature == 0:
        found.put("sampling.method", "greedy", found.said.get("line.temperature", ""))
    for name in list(found.line):
        if name in ("burstiness", "range_ratio") or name in _UNUSED:
            found.line.pop(name)


_UNUSED = (
    *("random_input", "random_output", "input", "output", "prefix", "sonnet_input", "sonnet_output", "sonnet_prefix"),
    *("repeated_prefix", "repeated_suffix", "repeated_groups", "repeated_output", "fixed_output", "dataset"),
)


def _arrivals(found: Reading, traffic: dict[str, Any]) -> None:
    """A rate, as Poisson or gamma arrivals; without one as many at a time as are allowed, or all at once."""
    line = found.line
    rate, concurrency = line.pop("rate", inf), line.pop("concurrency", None)
    shape, cv = line.pop("burstiness", 1.0), line.pop("cv", None)
    traffic["num_requests"] = line.pop("num_requests", None) or line.pop("default_requests", 1000)
    duration = line.pop("duration_s", None)
    said = found.said.get("line.rate", found.said.get("line.concurrency", ""))
    if rate is not None and rate != inf:
        traffic["arrivals"] = {"process": line.pop("process", "poisson"), "rate": rate}
        if shape != 1.0 or cv is not None:  # gaps of a gamma distribution: cv = 1 / sqrt(shape)
            traffic["arrivals"] = {"process": "gamma", "rate": rate, "cv": cv if cv is not None else shape**-0.5}
        if concurrency is not None:
            found.unmodelled.append((found.said["line.concurrency"], "a limit of requests in flight beside a rate"))
        if duration is not None and "line.num_requests" not in found.said:
            traffic["duration_s"] = duration
            del traffic["num_requests"]
    elif concurrency is not None:
        traffic["arrivals"] = {"process": "closed_loop", "concurrency": concurrency}
        if duration is not None and "line.num_requests" not in found.said:
            traffic["num_requests"] = max(10 * concurrency, 100)
            found.assumed.append(f"{traffic['num_requests']} requests, where the test runs for {duration:g} s")
    else:
        traffic["arrivals"] = {"process": "burst"}
    found.said["traffic.arrivals"] = said


def _uniform(mean: float, ratio: float) -> dict[str, Any]:
    """vLLM's: from mean x (1 - ratio) to mean x (1 + ratio)."""
    if not ratio:
        return {"distribution": "fixed", "value": int(mean)}
    return {"distribution": "uniform", "low": max(floor(mean * (1 - ratio)), 1), "high": ceil(mean * (1 + ratio))}


def _up_to(most: int, ratio: float) -> dict[str, Any]:
    """SGLang's: from the ratio of the length up to all of it."""
    low = max(int(most * ratio), 1)
    return (
        {"distribution": "fixed", "value": most}
        if low >= most
        else {"distribution": "uniform", "low": low, "high": most}
    )


def _vllm_bench(found: Reading, traffic: dict[str, Any], place: str) -> None:
    line = found.line
    name = line.get("dataset", "random")
    ratio = line.get("range_ratio", 0.0)
    ratios = (ratio.get("input", 0.0), ratio.get("output", 0.0)) if isinstance(ratio, dict) else (ratio, ratio)
    if not all(isinstance(each, int | float) and 0 <= each < 1 for each in ratios):
        raise SpecError(f"{place}: --random-range-ratio: found {ratio}, allowed from 0 to below 1.")
    if name in ("random", "random-mm", "random-rerank"):
        prompt = line.get("input", line.get("random_input", 1024))
        answer = line.get("output", line.get("random_output", 128))
        prefix = line.get("prefix", 0)
        lengths = _uniform(prompt, ratios[0])
        for key in ("value", "low", "high"):
            if key in lengths:
                lengths[key] += prefix
        traffic |= {"input_tokens": lengths, "output_tokens": _uniform(answer, ratios[1])}
        if prefix:
            traffic["prefix"] = {"num_groups": 1, "shared_tokens": prefix}
    elif name == "sonnet":
        prefix, prompt = line.get("sonnet_prefix", 200), line.get("input", line.get("sonnet_input", 550))
        traffic |= {
            "input_tokens": _uniform(prompt, 0),
            "output_tokens": _uniform(line.get("output", line.get("sonnet_output", 150)), 0),
        }
        if prefix:
            traffic["prefix"] = {"num_groups": 1, "shared_tokens": prefix}
    elif name == "prefix_repetition":
        prefix, suffix = line.get("repeated_prefix", 256), line.get("repeated_suffix", 256)
        traffic |= {
            "input_tokens": _uniform(prefix + suffix, 0),
            "output_tokens": _uniform(line.get("repeated_output", 128), 0),
            "prefix": {"num_groups": line.get("repeated_groups", 10), "shared_tokens": prefix},
        }
    else:
        _data(name, found, traffic, place)


def _sglang_bench(found: Reading, traffic: dict[str, Any], place: str) -> None:
    line = found.line
    name, ratio = line.get("dataset", "sharegpt"), line.get("range_ratio", 0.0)
    if name in ("random", "random-ids", "image"):
        traffic |= {
            "input_tokens": _up_to(line.get("random_input", 1024), ratio),
            "output_tokens": _up_to(line.get("random_output", 1024), ratio),
        }
    elif name == "generated-shared-prefix":
        groups, each = line.get("repeated_groups", 64), line.get("prompts_per_group", 16)
        prefix, question = line.get("repeated_prefix", 2048), line.get("repeated_suffix", 128)
        traffic |= {
            "input_tokens": _uniform(prefix + question, 0),
            "output_tokens": _uniform(line.get("repeated_output", 256), 0),
            "prefix": {"num_groups": groups, "shared_tokens": prefix},
        }
        line["num_requests"] = groups * each
    else:
        _data(name, found, traffic, place)


def _data(name: str, found: Reading, traffic: dict[str, Any], place: str) -> None:
    """Lengths of data that has some here; of other data a traffic file must say them."""
    from perfmodel.specs.scenario_file import load_traffic

    if name != "sharegpt":
        raise SpecError(
            f"{place}: --dataset-name {name}: the lengths are in its data, which is not read here; give --traffic, a "
            f"name or a traffic file."
        )
    data = load_traffic(_SHAREGPT).model_dump(mode="json", exclude_defaults=True)
    traffic |= {key: data[key] for key in ("input_tokens", "output_tokens")}
    fixed = found.line.get("fixed_output") or found.line.get("output")
    if fixed:
        traffic["output_tokens"] = _uniform(fixed, 0)
    found.assumed.append(f"lengths of ShareGPT as traffic {_SHAREGPT} has them")


def _limits(found: Reading, place: str) -> None:
    """`--goodput ttft:200 tpot:50`, in milliseconds."""
    for text in found.line.pop("goodput", None) or ():
        for pair in str(text).split():
            name, _, value = pair.partition(":")
            if name not in _GOODPUT:
                raise SpecError(f"{place}: --goodput {pair}: found {name!r}, allowed {', '.join(_GOODPUT)}.")
            try:
                found.put(f"slo.{_GOODPUT[name]}", float(value), f"--goodput {pair}")
            except ValueError:
                raise SpecError(f"{place}: --goodput {pair}: found {value!r}, allowed milliseconds.") from None


_LENGTHS: dict[str, Callable[[Reading, dict[str, Any], str], None]] = {
    "vllm-bench": _vllm_bench,
    "sglang-bench": _sglang_bench,
}
