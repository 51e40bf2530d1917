"""A day of requests against `perfmodel serve`, at sixty times its speed: is anything lost, does its memory grow?

    python benchmarks/emulator_day.py ../shared/traces/AzureLLMInferenceTrace_conv.csv [--hours 24] [--speed 60]

Every twentieth request of an hour's trace (Azure's conversations of 2023), hour after hour. One in a hundred clients
goes away in the middle of its answer. What is sent must be what is finished, failed and aborted, on either side; the
server's resident memory is read every ten seconds.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from lean_client import Answer, answers_of, served

from perfmodel.engine import Request
from perfmodel.sim import Workload
from perfmodel.specs import load_scenario

HOUR_TICKS = 3600 * 10**12
GOES_AWAY = 100  # one in so many


def repeated(hour: list[Request], hours: int) -> Iterator[Request]:
    """The same requests in every hour, with numbers of their own."""
    number = 0
    for turn in range(hours):
        for item in hour:
            yield Request(number, item.arrival + turn * HOUR_TICKS, item.num_prompt_tokens, item.max_output_tokens)
            number += 1


def leaves_after(request: Request) -> int | None:
    is_leaving = request.request_id % GOES_AWAY == 0 and request.max_output_tokens > 1
    return request.max_output_tokens // 2 if is_leaving else None


def fate_of(answer: Answer) -> str:
    """How it ended, as the client sees it."""
    if answer.has_left:
        return "aborted"
    return "finished" if answer.num_tokens == answer.request.max_output_tokens else f"status {answer.status.decode()}"


class Memory:
    """Resident MB of a process, every ten seconds."""

    def __init__(self, process: int) -> None:
        self._path, self._next = Path(f"/proc/{process}/statm"), 0.0
        self.megabytes: list[float] = []

    def look(self, now: float) -> None:
        if now >= self._next:
            self._next = now + 10
            self.megabytes.append(int(self._path.read_text().split()[1]) * 4096 / 1e6)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--scenario", default="llama-3.1-8b-a100")
    parser.add_argument("--hours", type=int, default=24)
    parser.add_argument("--speed", type=float, default=60)
    parser.add_argument("--one-in", type=int, default=20)
    parser.add_argument("--report", type=Path)
    asked = parser.parse_args()
    trace = f"traffic={{arrivals: {{process: trace}}, trace: {{path: {asked.trace.resolve()}, format: azure}}}}"
    scenario = load_scenario(asked.scenario, [trace])
    hour = [request for request in Workload(scenario).requests() if request.num_prompt_tokens < 8000][:: asked.one_in]
    fates: Counter[str] = Counter()
    with served(asked.scenario, "--speed", f"{asked.speed:g}") as (server, port, outcome):
        memory = Memory(server.pid)
        coming = repeated(hour, asked.hours)
        for answer in answers_of(port, coming, scenario.model.name, asked.speed, leaves_after, memory.look):
            fates[fate_of(answer)] += 1
    count = len(memory.megabytes) // 4 or 1
    result = {
        "sent": len(hour) * asked.hours,
        "client": dict(fates),
        "server": " ".join(outcome),
        "memory_mb": {
            "first_quarter": max(memory.megabytes[:count]),
            "last_quarter": max(memory.megabytes[-count:]),
            "every_10_s": [round(megabyte, 1) for megabyte in memory.megabytes],
        },
    }
    print(json.dumps(result, indent=1))
    if asked.report:
        asked.report.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if result["sent"] == sum(fates.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
