"""Measured rates and latencies of llama-server beside predictions: as shipped, and fitted to other types."""

__all__ = ["write_report"]

import csv
import heapq
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from settings import SLOT_TOKENS, SLOTS, Served

from perfmodel.cost.calibrations.backends import BackendFits, backend_calibration
from perfmodel.cost.steps.step_costs import step_costs
from perfmodel.engine import Request
from perfmodel.evidence.fit.backends import fit_backends
from perfmodel.evidence.observation import Observation, Prediction
from perfmodel.evidence.predict.results import predict_rows
from perfmodel.evidence.sources.local import DeviceTable, local_model, read_local_rows
from perfmodel.sim.clock import TICKS_PER_S, to_ticks
from perfmodel.sim.replica.backend import SimulatedBackend
from perfmodel.sim.replica.serving import build_serve_loop
from perfmodel.specs.engine.devices import with_defaults
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.traffic import Arrivals, Lengths, Traffic

DEVICE, CLOCK_HZ, BANDWIDTH = "epyc-milan-core", 2.48e9, 204.8e9
PARAMETERS = 134_515_008
FILE_BYTES = {"F16": 270.9e6, "Q8_0": 144.8e6, "Q5_1": 111.6e6, "Q5_0": 105.0e6, "Q4_1": 98.4e6, "Q4_0": 91.7e6}
_APART_S = 1e-3  # between requests of different clients [assumed]
_FLOPS = 32 * CLOCK_HZ  # two units of eight that multiply and add
_COMMAND = "perfmodel calibrate --from <rates of llama-server> --engine llamacpp"
_TESTS = {"tg": "decode", "pp": "prompt"}
Samples = Sequence[Mapping[str, Any]]


def write_report(samples_file: Path, folder: Path) -> None:
    """Write rates as a table for `validate local`, the report and its figures to `folder` and beside it."""
    samples = [json.loads(line) for line in samples_file.read_text(encoding="utf-8").splitlines()]
    folder.mkdir(parents=True, exist_ok=True)
    _write_device(folder / "devices.csv")
    _write_rows(samples, folder / "llama_bench.csv")
    rows, _ = read_local_rows(folder / "llama_bench.csv")
    result = {"device": DEVICE, "build": 11549, "servers": len(samples)}
    result |= {"lone": _lone(rows, folder), "served": _served(samples, rows, folder)}
    text = json.dumps(result, indent=1) + "\n"
    folder.with_suffix(".json").write_text(text, encoding="utf-8")
    folder.with_suffix(".md").write_text(_markdown(result, folder), encoding="utf-8")


# ------------------------------------------------------------------ tables


def _write_device(file: Path) -> None:
    columns = ["device", "class", "memory_gb", "memory_bandwidth_gb_s", "fp32_tflops", "boost_mhz", "cores", "simd"]
    about = "EPYC 7003, one core of a virtual machine; clock measured (dependent additions), bandwidth of the socket"
    cells = [DEVICE, "cpu", 12, BANDWIDTH / 1e9, _FLOPS / 1e12, CLOCK_HZ / 1e6, 1, "avx2", about]
    _write_csv(file, [*columns, "source"], [cells])


def _write_rows(samples: Samples, file: Path) -> None:
    columns = ["id", "source", "device", "device_class", "num_devices", "tool", "backend", "build", "model"]
    columns += ["model_params", "gguf_type", "file_size_bytes", "flash_attn", "test", "n_prompt", "n_gen", "batch"]
    lines: list[list[Any]] = []
    for sample in samples:
        for lone in sample["lone"]:
            for test, rate in _rates(lone):
                name = sample["type"]
                known = [DEVICE, "cpu", 1, "llama-server", "cpu", "b11549", "smollm2-135m", PARAMETERS, name]
                size = [int(FILE_BYTES[name]), 1, test, lone["prompt"], lone["output"] - 1, 1, round(rate, 3)]
                group = f"{name} {test} {lone['prompt']}"
                lines.append([f"own-{len(lines):04d}", "benchmarks/llama_rates", *known, *size, group])
    _write_csv(file, [*columns, "tokens_per_s", "group"], lines)


def _rates(lone: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    """Test and tokens per second: the first token comes with the prompt."""
    if lone["prompt"] >= 100:
        yield "pp", 1e3 * lone["prompt_n"] / lone["prompt_ms"]
    yield "tg", 1e3 * (lone["predicted_n"] - 1) / lone["predicted_ms"]


def _write_csv(file: Path, columns: Sequence[str], lines: Iterable[Sequence[Any]]) -> None:
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(lines)


# ------------------------------------------------------------------ one client


def _rate(pair: Prediction) -> float:
    return pair.metrics[pair.row.setup.metric]


def _lone(rows: Sequence[Observation], folder: Path) -> list[dict[str, Any]]:
    """A row for each type, test and length: the median measured, and what was predicted for it."""
    groups: dict[str, list[Observation]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    firsts = [group[0] for group in groups.values()]
    shipped = {pair.row.group: _rate(pair) for pair in predict_rows(firsts, folder)}
    fitted: dict[str, float] = {}
    for name in FILE_BYTES:
        result = [row for row in firsts if row.setup.gguf_type == name]
        fits = _fits([row for row in rows if row.setup.gguf_type != name], folder)
        fitted |= {pair.row.group: _rate(pair) for pair in predict_rows(result, folder, fits=fits)}
    lengths: dict[str, float] = {}
    for length in {row.setup.num_prompt for row in firsts}:
        result = [row for row in firsts if row.setup.num_prompt == length]
        fits = _fits([row for row in rows if row.setup.num_prompt != length], folder)
        lengths |= {pair.row.group: _rate(pair) for pair in predict_rows(result, folder, fits=fits)}
    measured = {key: median(row.metrics[row.setup.metric] for row in group) for key, group in groups.items()}
    return [
        {
            "type": row.setup.gguf_type,
            "test": row.setup.test,
            "prompt": row.setup.num_prompt,
            "runs": len(groups[row.group]),
            "spread": _spread([group.metrics[group.setup.metric] for group in groups[row.group]]),
            "measured": measured[row.group],
            "shipped": shipped[row.group],
            "fitted": fitted[row.group],
            "lengths": lengths[row.group],
            "median": _median_of_others(row, firsts, measured),
            "roofline": _roofline(row),
        }
        for row in firsts
    ]


def _fits(rows: Sequence[Observation], folder: Path) -> BackendFits:
    return fit_backends(rows, folder, "llamacpp", _COMMAND)


def _spread(values: Sequence[float]) -> float:
    """Half of the range over the median."""
    return (max(values) - min(values)) / 2 / median(values)


def _median_of_others(row: Observation, rows: Sequence[Observation], measured: Mapping[str, float]) -> float:
    alike = [
        item for item in rows if (item.setup.test, item.setup.num_prompt) == (row.setup.test, row.setup.num_prompt)
    ]
    return median(measured[item.group] for item in alike if item.setup.gguf_type != row.setup.gguf_type)


def _roofline(row: Observation) -> float:
    """Tokens per second at the socket's bandwidth, or at the core's FLOPs."""
    tokens = min(row.setup.num_prompt, 512) if row.setup.test == "pp" else 1
    seconds = max(FILE_BYTES[row.setup.gguf_type] / BANDWIDTH, 2 * PARAMETERS * tokens / _FLOPS)
    return tokens / seconds


# ------------------------------------------------------------------ several clients


def _served(samples: Samples, rows: Sequence[Observation], folder: Path) -> list[dict[str, Any]]:
    """A row for each type and number of clients: mean latencies measured, and simulated."""
    groups: dict[tuple[str, int], list[Mapping[str, float]]] = defaultdict(list)
    for sample in samples:
        for item in sample["served"]:
            groups[sample["type"], item["clients"]].append(item)
    fits = _fits(rows, folder)
    served = []
    for (name, clients), measured in sorted(groups.items()):
        row: dict[str, Any] = {"type": name, "clients": clients, "runs": len(measured)}
        row["measured"] = {key: median(entry[key] for entry in measured) for key in ("ttft_s", "tpot_s", "e2e_s")}
        row["shipped"] = _simulated(name, clients, folder, None)
        row["at once"] = _simulated(name, clients, folder, None, 0.0)
        row["fitted"] = _simulated(name, clients, folder, fits)
        served.append(row)
    lone = {row["type"]: row["measured"] for row in served if row["clients"] == 1}
    for row in served:
        row["one client's"] = lone[row["type"]]
    return served


def _simulated(
    name: str, clients: int, folder: Path, fits: BackendFits | None, apart_s: float = _APART_S
) -> dict[str, float]:
    """Mean latencies of `clients` whose requests reach the server `apart_s` after one another."""
    served, hardware = Served(), DeviceTable(folder).device(DEVICE, "cpu")
    scenario = _scenario(name, clients, served, hardware)
    costs = step_costs(scenario, backend_calibration(hardware, scenario.engine, fits))
    loop, backend = build_serve_loop(scenario, SLOTS * SLOT_TOKENS), SimulatedBackend(costs.cost_model())
    gap, now, number = to_ticks(apart_s), 0, 0
    arrivals, done = [place * gap for place in range(clients)], list[Request]()
    while arrivals or loop.has_requests:
        while arrivals and arrivals[0] <= now:
            loop.add(Request(number, heapq.heappop(arrivals), served.prompt, served.output))
            number += 1
        plan = loop.start_step(now)
        if plan is None:
            now = arrivals[0]
            continue
        started, now = now, now + backend.execute(plan).duration
        finished, _ = loop.finish_step(plan, started, now)
        done += finished
        more = min(len(finished), clients * served.rounds - number - len(arrivals))
        for place in range(more):
            heapq.heappush(arrivals, now + (place + 1) * gap)
    return _means(done, served)


def _scenario(name: str, clients: int, served: Served, hardware: HardwareSpec) -> Scenario:
    traffic = Traffic(
        arrivals=Arrivals(process="closed_loop", concurrency=clients),
        num_requests=clients * served.rounds,
        input_tokens=Lengths(distribution="fixed", value=served.prompt),
        output_tokens=Lengths(distribution="fixed", value=served.output),
    )
    given = {"profile": "llamacpp", "version": "11549", "max_num_seqs": SLOTS, "max_model_len": SLOT_TOKENS}
    engine = with_defaults(EngineSpec.model_validate({**given, "enable_prefix_caching": False}), hardware)
    model = local_model("smollm2-135m", PARAMETERS, 0, name, FILE_BYTES[name]).spec
    return Scenario(name="llama-server", model=model, hardware=hardware, engine=engine, traffic=traffic)


def _means(requests: Sequence[Request], served: Served) -> dict[str, float]:
    ttft = mean((request.first_token_at or 0) - request.arrival for request in requests) / TICKS_PER_S
    e2e = mean((request.finished_at or 0) - request.arrival for request in requests) / TICKS_PER_S
    return {"ttft_s": ttft, "tpot_s": (e2e - ttft) / (served.output - 1), "e2e_s": e2e}


# ------------------------------------------------------------------ the report


def _markdown(found: Mapping[str, Any], folder: Path) -> str:
    lone, served = found["lone"], found["served"]
    lines = [
        "# llama-server on one core of a CPU, measured and predicted",
        "",
        f"Written by `python benchmarks/llama_rates report {folder}/samples.jsonl --to {folder}`; the figures are in "
        f"the JSON beside it, and as a table for `perfmodel validate local {folder}/llama_bench.csv`.",
        "",
        _ABOUT.format(servers=found["servers"]),
        "",
        "## One client: tokens per second",
        "",
        _LONE,
        "",
        *_medians(lone),
        "",
        f"| type | test | measured | half-range | {_HEADS} |",
        "|" + "---|" * 9,
    ]
    for row in sorted(lone, key=lambda row: (row["test"], row["prompt"], row["type"])):
        errors = [f"{row[key]:.1f} ({row[key] / row['measured'] - 1:+.0%})" for key in _PREDICTORS]
        test = f"{_TESTS[row['test']]}, {row['prompt']} tokens"
        lines.append(f"| {row['type']} | {test} | {row['measured']:.1f} | {row['spread']:.0%} | {' | '.join(errors)} |")
    lines += ["", "## Several clients: mean latencies", "", _SERVED, ""]
    lines += [f"| type | clients | metric | measured | {_SERVED_HEADS} |", "|" + "---|" * 8]
    for row in served:
        for key, name in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("e2e_s", "E2E")):
            measured = row["measured"][key]
            cells = [f"{_ms(row[of][key])} ({row[of][key] / measured - 1:+.0%})" for of in _OF_SERVED]
            lines.append(f"| {row['type']} | {row['clients']} | {name} | {_ms(measured)} | {' | '.join(cells)} |")
    lines += ["", *_served_medians(served), "", "## What misses", "", _MISSES, ""]
    return "\n".join(lines)


_HEADS = "as shipped | fitted to other types | fitted to other lengths | median of other types | roofline"
_PREDICTORS = ("shipped", "fitted", "lengths", "median", "roofline")
_SERVED_HEADS = "as shipped | as shipped, all at once | fitted | one client's"
_OF_SERVED = ("shipped", "at once", "fitted", "one client's")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"


def _error(row: Mapping[str, Any], key: str) -> float:
    return abs(float(row[key]) / float(row["measured"]) - 1)


def _medians(lone: Sequence[Mapping[str, Any]]) -> list[str]:
    """Median errors of each predictor, by test."""
    lines = [f"| median error | {_HEADS} |", "|" + "---|" * 6]
    for test, name in _TESTS.items():
        rows = [row for row in lone if row["test"] == test]
        cells = [f"{median(_error(row, key) for row in rows):.1%}" for key in _PREDICTORS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _served_medians(served: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [f"| median error, 2 to 8 clients | {_SERVED_HEADS} |", "|" + "---|" * 5]
    of: Callable[[Mapping[str, Any], str, str], float] = lambda row, key, metric: abs(  # noqa: E731
        row[key][metric] / row["measured"][metric] - 1
    )
    for metric, name in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("e2e_s", "E2E")):
        rows = [row for row in served if row["clients"] > 1]
        cells = [f"{median(of(row, key, metric) for row in rows):.1%}" for key in _OF_SERVED]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


_ABOUT = """\
SmolLM2-135M (width 576) by llama.cpp b11549 (xllamacpp 2026.10.11549: AVX2, FMA, F16C) on one core of an EPYC 7003
in a virtual machine, one thread, {servers} servers started in random order, four of each type, eight slots of 768
tokens, `-b 2048 -ub 512 --cache-ram 0`. The server had the core to itself (SCHED_RR), the clients the other one;
the machine was busy beside it, so the shared cache and memory were not idle. The clock is measured, 2.48 GHz
(dependent additions); peak and bandwidth are 32 FLOPs a clock and the socket's 204.8 GB/s. Types are made of the
wheel's Q4_1 file; types of 4 and 5 bits leave the table of words in Q8_0. K-types are not among them: their blocks
are 256 wide, and 576 is no multiple of it. Times of one client are the server's own (`timings`); a decode's rate is
that behind its prompt."""
_LONE = """\
Medians over the servers, with half of their range; errors in brackets. As shipped: `backend@llamacpp.yaml`. Fitted:
the same form fitted by `perfmodel calibrate --from` to these rates alone, without the row's own type, or without
rows of its own prompt length. Trivial: the median of the other types, and the roofline of the socket's bandwidth
and the core's peak."""
_SERVED = """\
Clients in a closed loop, prompts of 128 tokens, answers of 48, two rounds, each client's own times. Simulated by
the engine with its slots and the steps' prices, requests of different clients 1 ms apart [assumed]; or all at once,
as a closed loop of `perfmodel simulate` starts. Fitted: to the rates of one client above, of all types; what
several clients do is not among them. Trivial: the latencies that one client has."""
_MISSES = """\
- **Prompts by type.** Measured are 86 (Q5_1) to 265 tokens/s (Q4_0); the form has one rate for products of many
  rows, whatever the blocks, so it says 192 of all. llama.cpp's CPU backend multiplies F16, Q8_0, Q5_0, Q4_0 and
  IQ4_NL in tiles (`ggml-cpu/llamafile/sgemm.cpp`; Q4_0 and Q8_0 repacked, too), and Q4_1 and Q5_1 a row at a time:
  their prompts are only 1.5 to 1.7 times as quick as their decodes. It takes a fact by backend and format, and a
  fit anew to all recorded CPUs; not done here. No fit of the present form mends it (fitted to other lengths,
  prompts are 24 % off).
- **Decodes of narrow types.** Predicted 30 to 43 % too slow as shipped: what a weight takes is fitted over CPUs of
  all kinds (Q4_1: 0.93 clocks, 0.34 of Q4_0). Left out of the fit, a type has the prior's number, no better. With
  other lengths of the same type in the fit decodes are 7 % off.
- **The median of other types** is nearer for decodes than either prediction of a type that was left out: six types
  of one model on one core are more alike than the CPUs that the form was fitted to.
- **The roofline** is no bound of one core: a core draws a fraction of its socket's bandwidth and decodes by dot
  products.
- **TPOT of several clients** counts the prompts of others that run in between. A burst in which all requests are
  there before the first step has none of these: at once, TPOT is predicted 36 % off as shipped, and 22 % one by
  one."""
