"""Whether clients of a closed loop stay in step with each other: a real server's TTFT vs. the simulator's.

    python benchmarks/closed_loop.py measure --url http://127.0.0.1:8000 --model NAME OUT.json
    python benchmarks/closed_loop.py report OUT.json REPORT [--emulator RANDOM.json SAME.json]

`measure` runs closed loops of clients with random prompts against any OpenAI-compatible server and notes when each
request was sent, and when its first and last token came. `report` fits the time of the server's steps to these runs,
simulates the same loops with it, with and without think time, and writes both distributions (.md, .json). RANDOM and
SAME are measured at `perfmodel serve llama-3.1-8b-a100`, the latter with --same-prompt.
"""

__all__ = ["Steps", "fit_steps", "main", "simulated"]

import argparse
import asyncio
import json
import random
import time
from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.calibrations.engine_profile import ServerFit
from perfmodel.engine import KVBlockManager, Outcome, Request, Scheduler, SchedulerConfig, ServeLoop, StepPlan
from perfmodel.sim import simulate
from perfmodel.sim.clock import TICKS_PER_S, TickEnvironment, to_ticks
from perfmodel.sim.replica.lockstep import Lockstep
from perfmodel.sim.replica.replica import EngineRank, FrontEnd
from perfmodel.sim.traffic.clients import ClosedLoopClient
from perfmodel.sim.traffic.workload import think_time_of
from perfmodel.specs.scenario_file import load_scenario
from perfmodel.specs.traffic import Arrivals

CONCURRENCIES = (2, 4, 8, 16)
_EMULATED = "llama-3.1-8b-a100"
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
# Mean and standard deviation, s: the default; what `vllm bench serve` takes; as long as a prompt takes
THINK_TIMES = {
    "no think time": (0.0, 0.0),
    "think time 0.25 +- 0.07 ms": (0.00025, 0.00007),
    "think time 200 +- 200 ms": (0.2, 0.2),
}
Run = list[list[float]]  # a row for each request: user, sent, first token, last token (s of the client's clock)
Array = NDArray[np.float64]


# ---------------------------------------------------------------- the real server


async def _ask(connection: tuple[Any, Any], body: bytes, host: str) -> tuple[float, float, float]:
    """Sends a streamed request; when it was sent, and when its first and last token came."""
    reader, writer = connection
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    sent = time.perf_counter()
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    first = last = 0.0
    while (line := await reader.readline()).strip() != b"0":
        if not line:
            raise ConnectionError("the server closed the connection in the middle of an answer")
        if line.startswith(b"data: {"):
            last = time.perf_counter()
            first = first or last
    await reader.readline()
    return sent, first, last


async def _user(number: int, asked: argparse.Namespace, until: float, rows: Run) -> None:
    host, _, port = asked.url.removeprefix("http://").partition(":")
    connection = await asyncio.open_connection(host, int(port))
    draw = random.Random(f"{time.time_ns()} {number}")  # a prompt that came before would be in the prefix cache
    prompt = [100 + place % (asked.vocabulary - 100) for place in range(asked.prompt)]
    while time.perf_counter() < until:
        if not asked.same_prompt:
            prompt = [draw.randrange(100, asked.vocabulary) for _ in range(asked.prompt)]
        body = {"model": asked.model, "prompt": prompt, "max_tokens": asked.answer, "ignore_eos": True, "stream": True}
        rows.append([number, *await _ask(connection, json.dumps(body).encode(), host)])


async def _closed_loop(asked: argparse.Namespace, concurrency: int) -> Run:
    rows: Run = []
    until = time.perf_counter() + asked.seconds
    await asyncio.gather(*(_user(number, asked, until, rows) for number in range(concurrency)))
    return sorted(rows, key=lambda row: row[1])


def measure(asked: argparse.Namespace) -> None:
    """Closed loops of so many clients, one after another; one client for a tenth of the time."""
    runs: dict[str, Run] = {}
    for concurrency in asked.clients:
        asked.seconds = asked.duration if concurrency > 1 else asked.duration / 10
        run = runs[str(concurrency)] = asyncio.run(_closed_loop(asked, concurrency))
        mean_s = np.mean([first - sent for _, sent, first, _ in run])
        print(f"{concurrency} clients: {len(run)} requests, mean TTFT {1e3 * mean_s:.1f} ms")
    load = {"prompt": asked.prompt, "answer": asked.answer, "duration_s": asked.duration}
    load["same_prompt"] = asked.same_prompt
    start = min(row[1] for run in runs.values() for row in run)
    rounded = {
        name: [[row[0], *(round(when - start, 4) for when in row[1:])] for row in run] for name, run in runs.items()
    }
    asked.file.write_text(json.dumps({**load, "runs": rounded}) + "\n", encoding="utf-8")


# ---------------------------------------------------------------- the simulator


class Steps(NamedTuple):
    """What a step takes: `step_s`, and for each sequence that decodes and each token of a prompt so much more; and what
    a request pays outside."""

    step_s: float
    decode_s: float
    prompt_token_s: float
    outside_s: float = 0.0

    def execute(self, plan: StepPlan) -> Outcome:
        """The step of `plan`, as a backend of the engine."""
        decodes = len(plan.decodes)
        return Outcome(
            to_ticks(self.step_s + self.decode_s * decodes + self.prompt_token_s * (plan.num_tokens - decodes))
        )


def fit_steps(data: dict[str, Any], outside_s: float) -> Steps:
    """Steps from mean TPOT of all runs and TTFT of a single client: a request's answer of n tokens takes n - 1 steps
    with all c sequences, and c - 1 prompts of the others.

        TPOT(c) = step + decode c + (c - 1) prompt p / (n - 1)       least squares over c
        TTFT(1) = outside + step + prompt p
    """
    tokens, others = data["prompt"], data["answer"] - 1
    rows, values = [], []
    for name, run in data["runs"].items():
        c, times = _clients(name), np.array(run)
        rows.append((1.0, c, (c - 1) * tokens / others))
        values.append(np.mean(times[:, 3] - times[:, 2]) / others)
    single = np.array(data["runs"]["1"])
    rows.append((1.0, 0.0, tokens))
    values.append(float(np.median(single[:, 2] - single[:, 1])) - outside_s)
    weights = 1 / np.array(values)
    fitted = np.linalg.lstsq(np.array(rows) * weights[:, None], np.ones(len(rows)), rcond=None)[0]
    return Steps(*np.maximum(fitted, 0.0).tolist(), outside_s)


def simulated(data: dict[str, Any], steps: Steps, concurrency: int, think: tuple[float, float]) -> tuple[Array, Array]:
    """TTFT and E2E latency, s, of each request in order of arrival, under our engine with steps like the server's.

    think: mean and standard deviation of the pause between an answer and the next request, s
    """
    env, done = TickEnvironment(), []
    config = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=2048)
    loop = ServeLoop(Scheduler(config, KVBlockManager(8192, 32, False, None)), False)

    def on_finished(_: EngineRank, request: Request) -> None:
        done.append(request)
        client.on_finished(request)

    def requests() -> Iterator[Request]:
        for number in count():
            if env.ticks > data["duration_s"] * TICKS_PER_S:
                return
            yield Request(number, 0, data["prompt"], data["answer"])

    front_end = FrontEnd(ServerFit(in_s=steps.outside_s / 2, out_s=steps.outside_s / 2))
    rank = EngineRank(Lockstep(env, steps, None), 0, loop, on_finished, lambda *_: None, front_end)
    mean, stddev = think
    arrivals = Arrivals(process="closed_loop", concurrency=concurrency, think_time_s=mean, think_time_stddev_s=stddev)
    client = ClosedLoopClient(env, requests(), lambda _: rank, concurrency, think_time_of(arrivals, 0))
    env.run_until_idle()
    done.sort(key=lambda request: request.arrival)
    assert all(request.first_token_at is not None for request in done)
    ttft = np.array([(request.first_token_at - request.arrival) / TICKS_PER_S for request in done])
    return ttft, np.array([(request.finished_at - request.arrival) / TICKS_PER_S for request in done])


# ---------------------------------------------------------------- the report


def _clients(run: str) -> int:
    """How many a run had, by its name: "4", "4, vllm bench serve"."""
    return int(run.partition(",")[0])


def distance(first: Array, second: Array) -> float:
    """Of two distributions (Wasserstein's first), relative to the mean of `first`."""
    places = np.linspace(0.005, 0.995, 100)
    return float(np.mean(np.abs(np.quantile(first, places) - np.quantile(second, places))) / np.mean(first))


def turnaround_s(run: Run, concurrency: int) -> Array:
    """Between an answer's last token and the next request of the same user."""
    pauses = []
    for user in range(concurrency):
        rows = [row for row in run if row[0] == user]
        pauses += [later[1] - earlier[3] for earlier, later in pairwise(rows)]
    return np.array(pauses)


def report(asked: argparse.Namespace) -> None:
    """Both distributions at each concurrency."""
    data = json.loads(asked.file.read_text(encoding="utf-8"))
    steps = fit_steps(data, asked.outside)
    rows = []
    for name in [name for name in data["runs"] if name != "1"]:
        concurrency, run = _clients(name), np.array(data["runs"][name])
        real = run[:, 2] - run[:, 1]
        pauses = turnaround_s(run.tolist(), concurrency)
        row: dict[str, Any] = {"clients": name, "requests": len(real), "real": _summary(real)}
        row["turnaround_ms"] = {"mean": 1e3 * pauses.mean(), "stddev": 1e3 * pauses.std()}
        for what, think in THINK_TIMES.items():
            ttft, e2el = simulated(data, steps, concurrency, think)
            ttft *= np.mean(run[:, 3] - run[:, 1]) / e2el.mean()
            row[what] = {**_summary(ttft), "distance": distance(real, ttft)}
        rows.append(row)
    result = {
        "steps": steps._asdict(),
        "think_time_s": THINK_TIMES,
        "lengths": [data["prompt"], data["answer"]],
        "rows": rows,
    }
    result["emulator"] = [_emulated(file) for file in asked.emulator]
    asked.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    asked.out.with_suffix(".md").write_text(_page(result), encoding="utf-8")


def _emulated(file: Path) -> dict[str, Any]:
    """Clients' TTFT at the emulator, and the simulator's of the same load."""
    data = json.loads(file.read_text(encoding="utf-8"))
    ((clients, run),) = data["runs"].items()
    traffic: dict[str, Any] = {
        "arrivals": {"process": "closed_loop", "concurrency": int(clients)},
        "num_requests": len(run),
        "input_tokens": {"distribution": "fixed", "value": data["prompt"]},
        "output_tokens": {"distribution": "fixed", "value": data["answer"]},
    }
    if data["same_prompt"]:
        traffic["prefix"] = {"shared_tokens": data["prompt"], "num_prompts_per_group": 1}
    result = simulate(load_scenario(_EMULATED, [f"traffic={json.dumps(traffic)}"]))
    assert result.requests is not None
    times = np.array(run)
    real, simulated = times[:, 2] - times[:, 1], result.requests.ttft_s
    names = {"clients": int(clients), "prompt": data["prompt"], "answer": data["answer"]}
    return {**names, "same_prompt": data["same_prompt"], "real": _summary(real), "simulated": _summary(simulated)}


def _summary(ttft_s: Array) -> dict[str, Any]:
    quantiles = [round(1e3 * float(value), 2) for value in np.quantile(ttft_s, QUANTILES)]
    return {"mean_ms": 1e3 * float(ttft_s.mean()), "quantiles_ms": quantiles}


def _page(found: dict[str, Any]) -> str:
    steps, (prompt, answer) = found["steps"], found["lengths"]
    lines = [
        "# Closed loops: a real server's TTFT vs. the simulator's",
        "",
        "Clients (our own, and those of `vllm bench serve` where it says so) send random prompts of "
        f"{prompt} tokens for answers of {answer}, each as soon as it has its answer. "
        "The server is vLLM 0.30.0 on a CPU with a small Llama of random weights; the simulator runs our engine with "
        f"steps fitted to these runs: {1e3 * steps['step_s']:.2f} ms, {1e3 * steps['decode_s']:.3f} ms for each "
        f"sequence that decodes, {1e3 * steps['prompt_token_s']:.4f} ms for each token of a prompt. The machine is "
        "shared and its speed differs between runs, so simulated times are scaled to the real mean E2E latency of each "
        "run: the shape is compared. Distance: mean difference of the quantiles, relative to the real mean.",
        "",
        "| clients | requests | TTFT of | mean, ms | p10 | p25 | p50 | p75 | p90 | distance |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        for name in ("real", *THINK_TIMES):
            cells = [f"{value:.0f}" for value in (row[name]["mean_ms"], *row[name]["quantiles_ms"])]
            far = f"{row[name]['distance']:.0%}" if "distance" in row[name] else ""
            lines.append(f"| {row['clients']} | {row['requests']} | {name} | {' | '.join(cells)} | {far} |")
    pauses = ", ".join(
        f"{row['turnaround_ms']['mean']:.2f} +- {row['turnaround_ms']['stddev']:.2f}" for row in found["rows"]
    )
    lines += ["", *_emulator_lines(found["emulator"])]
    lines += ["", f"Clients' turnaround, ms (mean and standard deviation, in order of clients): {pauses}."]
    return "\n".join(lines) + "\n"


def _emulator_lines(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"The same clients at our own emulator (`perfmodel serve {_EMULATED}`), and the simulator:",
        "",
        "| clients | prompts | TTFT of | mean, ms | p10 | p25 | p50 | p75 | p90 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        prompts = f"{row['prompt']} tokens, {'all the same' if row['same_prompt'] else 'random'}"
        for name, what in (("real", "clients"), ("simulated", "simulator")):
            cells = [f"{value:.0f}" for value in (row[name]["mean_ms"], *row[name]["quantiles_ms"])]
            lines.append(f"| {row['clients']} | {prompts} | {what} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    asks = commands.add_parser("measure")
    asks.add_argument("file", type=Path)
    asks.add_argument("--url", required=True)
    asks.add_argument("--model", required=True)
    asks.add_argument("--prompt", type=int, default=130)
    asks.add_argument("--answer", type=int, default=96)
    asks.add_argument("--vocabulary", type=int, default=4000)
    asks.add_argument("--duration", type=float, default=120.0, help="s of a closed loop")
    asks.add_argument("--clients", type=int, nargs="+", default=[1, *CONCURRENCIES])
    asks.add_argument("--same-prompt", action="store_true", help="all requests have one prompt, which stays cached")
    asks.set_defaults(run=measure)
    tells = commands.add_parser("report")
    tells.add_argument("file", type=Path)
    tells.add_argument("out", type=Path)
    tells.add_argument("--emulator", type=Path, nargs="*", default=[], help="runs at the emulator")
    tells.add_argument("--outside", type=float, default=0.005, help="s that a request pays outside of steps")
    tells.set_defaults(run=report)
    asked = parser.parse_args()
    asked.run(asked)


if __name__ == "__main__":
    main()
