"""Arguments of a load test to traffic: arrivals, lengths, shared prefixes, limits."""

import json
from math import ceil, floor, inf
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.specs.commands.server import Reading

_GOODPUT = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2el": "e2el_ms", "request_latency": "e2el_ms"}
_SHAREGPT = "chat-sharegpt"
_OF_IMAGES = ("random-mm", "image")  # names of data sets, of vLLM's and SGLang's


def read_load(reading: Reading, command: str, place: str) -> None:
    """Fill `traffic` and `slo` from the flags left in `reading.line`; command: its name; place: for errors.

    Raises SpecError for traffic whose data would have to be read."""
    traffic = reading.data.setdefault("traffic", {})
    readers = {"vllm-bench": _vllm_bench, "sglang-bench": _sglang_bench, "guidellm": _guidellm, "aiperf": _aiperf}
    readers[command](reading, traffic, place)
    _arrivals(reading, traffic)
    for text in reading.take("goodput") or ():  # `--goodput ttft:200 tpot:50`, in milliseconds
        for pair in str(text).split():
            name, _, value = pair.partition(":")
            if name not in _GOODPUT:
                raise SpecError(f"{place}: --goodput {pair}: got {name!r}; expected {', '.join(_GOODPUT)}.")
            reading.put(f"slo.{_GOODPUT[name]}", _amount(value, f"--goodput {pair}", place), f"--goodput {pair}")
    if reading.take("temperature") == 0:
        reading.put("sampling.method", "greedy", reading.source("temperature"))
    if (source := reading.source("dataset")).endswith(_OF_IMAGES):
        reading.unmodelled.append((source, "images of the prompts; give traffic.images"))
    # Lengths of other data than what is sent.
    reading.irrelevant += [source for name in reading.line if (source := reading.source(name))]


def _arrivals(reading: Reading, traffic: dict[str, Any]) -> None:
    """Poisson or gamma arrivals at a rate; else closed loop or all at once."""
    take = reading.take
    rate, concurrency = take("rate", inf), take("concurrency")
    shape, cv, duration = take("burstiness", 1.0), take("cv"), take("duration_s")
    traffic["num_requests"] = take("num_requests") or take("default_requests", 1000)
    runs_for_duration = duration is not None and not reading.source("num_requests")
    if rate is not None and rate != inf:
        traffic["arrivals"] = {"process": take("process", "poisson"), "rate": rate}
        if shape != 1.0 or cv is not None:  # gaps of a gamma distribution: cv = 1 / sqrt(shape)
            traffic["arrivals"] = {"process": "gamma", "rate": rate, "cv": cv if cv is not None else shape**-0.5}
        if concurrency is not None:
            reading.unmodelled.append((reading.source("concurrency"), "a limit of requests in flight beside a rate"))
        if runs_for_duration:
            traffic["duration_s"] = duration
            del traffic["num_requests"]
    elif concurrency is not None:
        traffic["arrivals"] = {"process": "closed_loop", "concurrency": concurrency}
        if runs_for_duration:
            traffic["num_requests"] = max(10 * concurrency, 100)
            reading.assumed.append(f"{traffic['num_requests']} requests, where the test runs for {duration:g} s")
    else:
        traffic["arrivals"] = {"process": "burst"}
    reading.sources["traffic.arrivals"] = reading.sources.get("line.rate", reading.source("concurrency"))


def _uniform(mean: float, ratio: float = 0) -> dict[str, Any]:
    """vLLM: uniform over mean x (1 - ratio) ... mean x (1 + ratio)."""
    if not ratio:
        return {"distribution": "fixed", "value": int(mean)}
    return {"distribution": "uniform", "low": max(floor(mean * (1 - ratio)), 1), "high": ceil(mean * (1 + ratio))}


def _up_to(most: int, ratio: float) -> dict[str, Any]:
    """SGLang: uniform over ratio x most ... most."""
    low = max(int(most * ratio), 1)
    return _uniform(most) if low >= most else {"distribution": "uniform", "low": low, "high": most}


def _normal(mean: float, std: float, reading: Reading) -> dict[str, Any]:
    """Normal lengths, approximated by a lognormal of equal mean and deviation."""
    if not std:
        return _uniform(mean)
    what = "a normal distribution is taken for a lognormal"
    reading.notes.append(f"lengths of mean {mean:g} and deviation {std:g}: {what}")
    return {"distribution": "lognormal", "mean": mean, "std": std}


def _synthetic(
    traffic: dict[str, Any], prompt: dict[str, Any], answer: dict[str, Any], prefix: int = 0, groups: int = 1
) -> None:
    """Synthetic lengths; a shared prefix precedes each prompt's own tokens."""
    if prefix:
        prompt |= {key: prompt[key] + prefix for key in ("value", "low", "high", "mean") if key in prompt}
    traffic |= {"input_tokens": prompt, "output_tokens": answer}
    if prefix:
        traffic["prefix"] = {"num_groups": groups, "shared_tokens": prefix}


def _vllm_bench(reading: Reading, traffic: dict[str, Any], place: str) -> None:
    take = reading.take
    name, ratio = take("dataset", "random"), take("range_ratio", 0.0)
    ratios = (ratio.get("input", 0.0), ratio.get("output", 0.0)) if isinstance(ratio, dict) else (ratio, ratio)
    if not all(isinstance(share, int | float) and 0 <= share < 1 for share in ratios):
        raise SpecError(f"{place}: --random-range-ratio: got {ratio}; expected from 0 to below 1.")
    if any(ratios) and name.startswith("random"):
        source = reading.source("range_ratio")
        reading.notes.append(
            f"{source}: around the mean, as vLLM since 0.8.3 draws it; earlier: from the ratio up to the length"
        )
    if name in ("random", "random-mm", "random-rerank"):
        prompt = _uniform(take("input", take("random_input", 1024)), ratios[0])
        answer = _uniform(take("output", take("random_output", 128)), ratios[1])
        _synthetic(traffic, prompt, answer, take("prefix", 0))
    elif name == "sonnet":  # its input length has the prefix in it
        prefix, length = take("sonnet_prefix", 200), take("input", take("sonnet_input", 550))
        answer = _uniform(take("output", take("sonnet_output", 150)))
        _synthetic(traffic, _uniform(length - prefix), answer, prefix)
    elif name == "prefix_repetition":
        prefix, groups = take("repeated_prefix", 256), take("repeated_groups", 10)
        answer = _uniform(take("repeated_output", 128))
        _synthetic(traffic, _uniform(take("repeated_suffix", 256)), answer, prefix, groups)
    else:
        _data(name, reading, traffic, place)


def _sglang_bench(reading: Reading, traffic: dict[str, Any], place: str) -> None:
    take = reading.take
    name, ratio = take("dataset", "sharegpt"), take("range_ratio", 0.0)
    if name in ("random", "random-ids", "image"):
        prompt, answer = _up_to(take("random_input", 1024), ratio), _up_to(take("random_output", 1024), ratio)
        _synthetic(traffic, prompt, answer)
    elif name == "generated-shared-prefix":
        groups, prefix = take("repeated_groups", 64), take("repeated_prefix", 2048)
        prompt, answer = _uniform(take("repeated_suffix", 128)), _uniform(take("repeated_output", 256))
        _synthetic(traffic, prompt, answer, prefix, groups)
        reading.line["num_requests"] = groups * take("prompts_per_group", 16)
    else:
        _data(name, reading, traffic, place)


def _data(name: str, reading: Reading, traffic: dict[str, Any], place: str) -> None:
    """Lengths of a known data set; others need a traffic file."""
    from perfmodel.specs.scenario_file import load_traffic

    if name != "sharegpt":
        raise SpecError(
            f"{place}: --dataset-name {name}: the lengths are in its data, which is not read here; give --traffic, a "
            f"name or a traffic file."
        )
    data = load_traffic(_SHAREGPT).model_dump(mode="json", exclude_defaults=True)
    traffic |= {key: data[key] for key in ("input_tokens", "output_tokens")}
    fixed = reading.take("fixed_output") or reading.take("output")
    if fixed:
        traffic["output_tokens"] = _uniform(fixed)
    reading.assumed.append(f"lengths of ShareGPT as traffic {_SHAREGPT} has them")


def _aiperf(reading: Reading, traffic: dict[str, Any], place: str) -> None:
    """AIPerf defaults: one request at a time, ten in all (aiperf/config/flags)."""
    line, take = reading.line, reading.take
    if "dataset" in line:
        _data(line["dataset"], reading, traffic, place)
    else:
        prefix, groups = take("repeated_prefix", 0) or take("prefix", 0), take("repeated_groups", 1)
        prompt = _normal(take("input", 550), take("input_std", 0), reading)
        answers = take("output")
        if answers is None:
            answers = 128
            reading.assumed.append(f"answers of {answers} tokens, as the line has no --osl")
        _synthetic(traffic, prompt, _normal(answers, take("output_std", 0), reading), prefix, max(groups, 1))
    if take("pattern", "poisson") == "constant":
        line["process"] = "constant"
    if "rate" not in line:
        line.setdefault("concurrency", 1)
    line["default_requests"] = max(10, 2 * (line.get("concurrency") or 1))


def _guidellm(reading: Reading, traffic: dict[str, Any], place: str) -> None:
    """`--profile constant --rate 5` or `--profile kind=constant,rate=5`; lengths as `prompt_tokens=256,...`."""
    line, profile, rates = reading.line, _pairs(reading.take("profile", "sweep"), "kind"), reading.take("rates")
    kind = profile.get("kind", "sweep")
    given = profile.get("rate") or profile.get("streams") or rates
    values = [part for part in str(given if given is not None else "").strip("[]").split(",") if part.strip()]
    if len(values) > 1:
        reading.notes.append(f"--rate {given}: {len(values)} runs, of which the first counts")
    value = _amount(values[0], f"--rate {given}", place) if values else None
    for text in reading.take("constraint") or ():
        limit = _pairs(text, "kind")
        names = {"max_requests": ("num_requests", "count"), "max_duration": ("duration_s", "seconds")}
        if limit.get("kind") in names:
            name, key = names[limit["kind"]]
            amount = _amount(limit.get(key), f"--constraint {text}", place)
            line[name] = amount if name == "duration_s" else int(amount)
            reading.sources[f"line.{name}"] = f"--constraint {text}"
        else:
            reading.unmodelled.append((f"--constraint {text}", "when a run is given up"))
    if kind in ("constant", "poisson", "async", "concurrent") and value is None:
        raise SpecError(f"{place}: --profile {kind} needs --rate; give it.")
    if kind in ("constant", "poisson", "async"):
        line["rate"], line["process"] = value, "poisson" if kind == "poisson" else "constant"
    elif kind in ("concurrent", "synchronous"):
        line["concurrency"] = int(value or 1) if kind == "concurrent" else 1
    elif kind != "throughput":
        raise SpecError(
            f"{place}: --profile {kind}: many runs at rates that it finds itself, and a scenario has one; give "
            f"--traffic and --rate, or a profile as in constant."
        )
    for name in ("rate", "concurrency"):
        reading.sources.setdefault(f"line.{name}", reading.source("profile"))
    data = _pairs(reading.take("data", ""), "kind")
    if "prompt_tokens" not in data:
        raise SpecError(
            f"{place}: --data: its lengths are in its data, which is not read here; give prompt_tokens=...,"
            f"output_tokens=..., or --traffic."
        )
    for name in ("prompt_tokens", "output_tokens"):
        amounts = data.get(name, data["prompt_tokens"]), data.get(f"{name}_stdev", 0)
        mean, deviation = (_amount(text, f"--data {name}", place) for text in amounts)
        traffic[name.replace("prompt", "input")] = _normal(mean, deviation, reading)


def _amount(value: Any, flag: str, place: str) -> float:
    """Number in a flag's value; raises SpecError if negative, infinite or none."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = inf
    if not 0 <= number < inf:
        raise SpecError(f"{place}: {flag[:80]}: got {str(value)[:40]!r}; expected a number of at least 0.")
    return number


def _pairs(text: str, first: str) -> dict[str, Any]:
    """`a=1,b=2` or JSON; a single word is the value of `first`."""
    if text.lstrip().startswith("{"):
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            return {first: text}
        return data if isinstance(data, dict) else {first: text}
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    return {(name if equals else first).strip(): (value if equals else name).strip() for name, equals, value in pairs}
