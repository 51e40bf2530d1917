"""What clients measure against `perfmodel serve`, beside what `perfmodel simulate` says of the same arrivals.

    python benchmarks/emulator_accuracy.py [--rates 2:400,8:1600,20:1600] [--scenario NAME] [--set KEY=VALUE]

The server is a process of its own, beside the lean client of this one. Speed is 1. The same arrivals are those that the
client has sent, when it sent them: it wakes up to a millisecond after it wanted to, and where a request so misses the
beginning of a step, it would on a real server, too. A request then takes some tenths of a millisecond to come in, never
twice the same, and a step that begins with one more or less moves those that follow. How much that is, several draws of
the delay say, simulated beside: their standard deviation is no limit, it tells what a difference is worth. It all
depends on the machine and on what else that does.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from lean_client import Answer, answers_of, served

from perfmodel.sim import Workload, simulate
from perfmodel.specs import load_scenario

LATENCIES = ("ttft", "tpot", "e2e")
MEAN_LIMITS = 0.03, 2.0  # a share, or milliseconds: whichever is more
P99_LIMITS = 0.06, 5.0
NUM_DRAWS = 12
WAY_IN_S = 0.0005  # at most: loopback, and an event loop that may be busy with tokens (0.2 ms on average)


class Latencies(NamedTuple):
    """Of all requests, in seconds."""

    ttft: Any
    tpot: Any
    e2e: Any


def latencies_of(answers: list[Answer]) -> Latencies:
    first = np.array([answer.first - answer.sent for answer in answers])
    whole = np.array([answer.last - answer.sent for answer in answers])
    count = np.array([answer.num_tokens for answer in answers])
    longer = count > 1
    return Latencies(first, ((whole - first)[longer] / (count[longer] - 1)), whole)


def as_sent(scenario: Any, answers: list[Answer], way_in: Any, path: Path) -> Any:
    """`scenario` with the requests of these answers, so many seconds after they were sent; `path`: of a trace of
    them."""
    begun = min(answer.sent for answer in answers)
    rows = [
        {
            "arrival_s": answer.sent - begun + delay,
            "input_tokens": answer.request.num_prompt_tokens,
            "output_tokens": answer.request.max_output_tokens,
        }
        for answer, delay in zip(answers, way_in.tolist(), strict=True)
    ]
    rows.sort(key=lambda row: row["arrival_s"])
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    traffic = {"trace": {"path": str(path), "format": "jsonl"}, "num_requests": len(rows)}
    return scenario.model_copy(update={"traffic": type(scenario.traffic).model_validate(traffic)})


def all_simulated(scenario: Any, answers: list[Answer]) -> list[Latencies]:
    """That of the arrivals as sent, and one for each draw of what requests take to come in."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sent.jsonl"
        delays = [rng.uniform(0, WAY_IN_S, len(answers)) for _ in range(NUM_DRAWS)]
        delays.insert(0, np.zeros(len(answers)))
        return [simulated(as_sent(scenario, answers, way_in, path)) for way_in in delays]


def simulated(scenario: Any) -> Latencies:
    requests = simulate(scenario).requests
    assert requests is not None
    first, whole = requests.first_token_s - requests.arrival_s, requests.finished_s - requests.arrival_s
    longer = requests.num_output_tokens > 1
    return Latencies(first, (whole - first)[longer] / (requests.num_output_tokens[longer] - 1), whole)


def row(name: str, statistic: str, measured_s: float, draws_s: list[float]) -> dict[str, Any]:
    """One line: both in milliseconds, and whether the difference is within the limits.

    draws_s: the simulated ones, that of the arrivals as sent first
    """
    share, milliseconds = MEAN_LIMITS if statistic == "mean" else P99_LIMITS
    simulated_s = draws_s[0]
    apart_ms = (measured_s - simulated_s) * 1e3
    return {
        "latency": f"{statistic} {name}",
        "measured_ms": measured_s * 1e3,
        "simulated_ms": simulated_s * 1e3,
        "deviation_ms": float(np.std(draws_s[1:], ddof=1)) * 1e3,
        "apart_ms": apart_ms,
        "apart": measured_s / simulated_s - 1,
        "is_within": abs(apart_ms) <= max(share * simulated_s * 1e3, milliseconds),
    }


def one_rate(name: str, sets: list[str], rate: float, num_requests: int) -> dict[str, Any]:
    """Serve and simulate the traffic at one rate."""
    changes = [*sets, f"traffic.arrivals.rate={rate}", f"traffic.num_requests={num_requests}"]
    scenario = load_scenario(name, changes)
    requests = list(Workload(scenario).requests())
    words = [word for item in sets for word in ("--set", item)]
    with served(name, *words) as (_, port, result):
        answers = list(answers_of(port, iter(requests), scenario.model.name))
    for answer in answers:
        assert answer.num_tokens == answer.request.max_output_tokens, (answer.status, answer.num_tokens, answer.request)
    seen, expected = latencies_of(answers), all_simulated(scenario, answers)
    late = np.array([item.sent for item in answers]) - np.array([item.request.arrival / 1e12 for item in answers])
    rows = []
    for latency in LATENCIES:
        ours, theirs = getattr(seen, latency), [getattr(draw, latency) for draw in expected]
        rows.append(row(latency, "mean", float(ours.mean()), [float(their.mean()) for their in theirs]))
        tails = [float(np.percentile(their, 99)) for their in theirs]
        rows.append(row(latency, "p99", float(np.percentile(ours, 99)), tails))
    tokens = sum(item.num_tokens for item in answers)
    span = max(item.last for item in answers) - min(item.sent for item in answers)
    return {
        "rate": rate,
        "requests": len(answers),
        "tokens_per_s": tokens / span,
        "sent_late_ms": float((late - late.min()).mean() * 1e3),
        "load": os.getloadavg()[0],
        "rows": rows,
        "said": " ".join(result),
    }


def text_of(what: str, found: list[dict[str, Any]]) -> str:
    """The report as Markdown."""
    lines = [
        "# What clients of the emulator measure, beside the simulation of the same arrivals",
        "",
        f"`python benchmarks/emulator_accuracy.py`: {what} at speed 1, a lean client in another process. A difference "
        "is within its limits where a mean is off by 3 % or 2 ms, whichever is more, a p99 by 6 % or 5 ms. After "
        f"±: the standard deviation of the same simulation over {NUM_DRAWS} draws of what requests take to come in, 0 "
        f"to {WAY_IN_S * 1e3:g} ms.",
    ]
    for item in found:
        lines += [
            "",
            f"## {item['rate']:g} requests/s, {item['tokens_per_s']:,.0f} output tokens/s, {item['requests']} requests",
            "",
            "| latency | measured | simulated | apart | | within |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {r['latency']} | {r['measured_ms']:.2f} ms | {r['simulated_ms']:.2f} ± {r['deviation_ms']:.2f} ms | "
            f"{r['apart_ms']:+.2f} ms | {r['apart']:+.2%} | {'yes' if r['is_within'] else '**no**'} |"
            for r in item["rows"]
        ]
        about = f"Sent {item['sent_late_ms']:.2f} ms late on average. The machine's load, these two included: "
        lines += ["", f"{item['said']} {about}{item['load']:.1f}."]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scenario", default="llama-3.1-8b-h100-2048-256")
    parser.add_argument("--rates", default="2:400,8:1600,20:1600", help="RATE:REQUESTS; of 400, a p99 is that of four")
    parser.add_argument("--set", dest="sets", action="append", default=[])
    parser.add_argument("--report", type=Path)
    asked = parser.parse_args()
    result, what = [], " ".join([asked.scenario, *asked.sets])
    for part in asked.rates.split(","):
        rate, _, requests = part.partition(":")
        result.append(one_rate(asked.scenario, asked.sets, float(rate), int(requests or 1600)))
        print(text_of(what, result[-1:]), flush=True)
    if asked.report:
        asked.report.write_text(text_of(what, result), encoding="utf-8")
        asked.report.with_suffix(".json").write_text(json.dumps({"runs": result}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
