"""What an emulator's metrics and KV events cost it: CPU time per step, per request and per page.

    python benchmarks/emulator_telemetry.py [--report FILE]

Llama-3.1-8B on eight H100s that generate some 15,000 tokens per second together, in virtual time, so that only the
work itself is counted. Every call of the observers is timed by the thread's CPU clock, less what the clock takes. A
page is rendered after each simulated second.
"""

import argparse
import asyncio
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from virtual_time import run

from perfmodel.serve import Emulator, Order
from perfmodel.serve.kv_events import KvEvents
from perfmodel.serve.metrics import Metrics
from perfmodel.sim import Workload
from perfmodel.specs import load_scenario

CHANGES = (
    *("cluster.replicas=8", "traffic.num_requests=2500", "traffic.arrivals={process: poisson, rate: 60}"),
    "traffic.prefix={num_groups: 20, shared_tokens: 1024}",
)
TOPICS = ("on_arrived", "on_step", "on_finished")


class Timed:
    """`observer`, with the CPU nanoseconds that its calls take by their names."""

    def __init__(self, observer, spent, calls):
        self.observer, self.spent, self.calls = observer, spent, calls
        for topic in (*TOPICS, "on_lost", "on_aborted"):
            setattr(self, topic, self._timed(topic, getattr(observer, topic)))

    def _timed(self, topic, call):
        def timed(*arguments):
            began = time.thread_time_ns()
            call(*arguments)
            self.spent[topic] += time.thread_time_ns() - began
            self.calls[topic] += 1

        return timed


class Nobody:
    """A client that does not look, and an observer that does nothing."""

    def __getattr__(self, name):
        return lambda *_: None


async def watched(make):
    """(CPU ns and calls of the observer that `make` makes, by topic; ms of each page; tokens, seconds, requests)."""
    scenario, loop = load_scenario("llama-3.1-8b-h100-2048-256", CHANGES), asyncio.get_running_loop()
    emulator, spent, calls, pages = Emulator(scenario), defaultdict(int), defaultdict(int), []
    observer, render, close = make(emulator)
    emulator.observers = [Timed(observer, spent, calls)]
    emulator.start()
    tokens = 0
    for request in Workload(scenario).requests():
        await asyncio.sleep(request.arrival / 1e12 - loop.time())
        emulator.submit(Order(request.num_prompt_tokens, request.max_output_tokens, request.block_hashes), Nobody())
        tokens += request.max_output_tokens
        if render is not None and len(pages) < loop.time():
            began = time.thread_time_ns()
            render()
            pages.append((time.thread_time_ns() - began) / 1e6)
    while emulator.num_under_way:
        await asyncio.sleep(1)
    emulator.stop()
    close()
    return spent, calls, pages, tokens, loop.time(), emulator.num_finished


def nothing(emulator):
    return Nobody(), None, lambda: None


def metrics(emulator):
    made = Metrics(emulator, "meta-llama/Llama-3.1-8B")
    return made, made.render, lambda: None


def kv_events(emulator):
    made = KvEvents(emulator, "@tcp://127.0.0.1:*")
    made.start()
    return made, None, made.close


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", type=Path)
    asked = parser.parse_args()
    base = run(watched(nothing))
    clock_ns = {topic: base[0][topic] / base[1][topic] for topic in TOPICS}
    lines = ["| | us per step | us per request | share of a core at 15,000 tokens/s | ms per page |"]
    lines.append("|---|---:|---:|---:|---:|")
    for name, make in (("metrics", metrics), ("KV events", kv_events)):
        spent, calls, pages, tokens, _, _ = run(watched(make))
        net = {topic: max(spent[topic] - clock_ns[topic] * calls[topic], 0) / 1e3 for topic in TOPICS}
        step = net["on_step"] / calls["on_step"]
        request = (net["on_arrived"] + net["on_finished"]) / calls["on_finished"]
        share = sum(net.values()) / 1e6 / tokens * 15_000
        page = f"{sorted(pages)[len(pages) // 2]:.1f}" if pages else ""
        lines.append(f"| {name} | {step:.1f} | {request:.1f} | {share:.2%} | {page} |")
    _, calls, _, tokens, seconds, number = base
    head = (
        f"{number:,} requests, {tokens:,} tokens in {seconds:.0f} simulated seconds, {calls['on_step']:,} steps of "
        f"8 engines."
    )
    text = "\n".join([head, "", *lines, ""])
    print(text)
    if asked.report is not None:
        title = "# What telling of it costs an emulator\n\n```\npython benchmarks/emulator_telemetry.py\n```\n\n"
        asked.report.write_text(title + text)


if __name__ == "__main__":
    main()
