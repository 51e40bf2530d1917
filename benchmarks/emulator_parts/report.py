"""The report of what was tried, from its data."""

__all__ = ["written"]

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]
_COMMAND = "python benchmarks/emulator_parts --guidellm FOLDER --aiperf FOLDER --report reports/emulator_202611.md"
_HEAD = f"""# The emulator under real clients and real infrastructure

`{_COMMAND}`

`perfmodel serve llama-3.1-8b-a100` at speed 1, and in other processes of the same machine what is named below; all \
on loopback. *Client* is what the tool itself measured, *emulator* what `/metrics` counted of the same requests: from \
when they reached the engine to when their tokens were due. The difference is what the client, the loopback and the \
server's HTTP add. *Late*: how long after their time steps ended, in the mean; *slowed*: seconds that the clock lost \
because the machine did not keep up.
"""


def _table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows] + [""]


def _pair(client: float | None, server: float) -> str:
    """`client - server` beside both, in ms."""
    return "" if client is None else f"{server:,.1f} / {client:,.1f} (+{client - server:,.1f})".replace("+-", "-")


def _clock(server: Result) -> tuple[str, str]:
    return f"{server['late_ms']:.2f}", f"{server['slowed_s']:.2f}"


def _per_token(server: Result) -> float:
    """CPU time of the server, in microseconds."""
    return float(1e6 * server["cpu"] * server["seconds"] / server["num_tokens"])


_CLIENTS = ("tokens/s", "TTFT, ms: emulator / client", "TPOT", "E2E", "late, ms", "slowed, s")
_CPU = "CPU a token, us: server / client"


def _measured(server: Result, client: Result) -> list[str]:
    means = server["mean_ms"]
    pairs = [_pair(client[name], means[name]) for name in ("ttft", "tpot", "e2el")]
    cpu = f"{_per_token(server):.0f} / {1e6 * client['cpu'] * client['seconds'] / client['tokens']:.0f}"
    return [f"{client['tokens'] / client['seconds']:,.0f}", *pairs, *_clock(server), cpu]


def _openai(found: Result) -> Iterator[str]:
    yield f"## The openai Python client ({found['version']})"
    yield ""
    yield "Chats of some 200 tokens and 64 to answer, all at once, each on a connection of its own, in one process."
    yield ""
    rows = [
        [item["concurrency"], "whole" if item["whole"] else "streamed", *_measured(item["server"], item["client"])]
        for item in found["rows"]
    ]
    yield from _table(["at once", "", *_CLIENTS, _CPU], rows)


def _tool(found: Result, name: str) -> Iterator[str]:
    yield f"## {found['version']}"
    yield ""
    yield f"`{found['command']}`"
    yield ""
    rows = []
    for item in found["rows"]:
        figures, means = item["figures"], item["server"]["mean_ms"]
        pairs = [_pair(figures[f"mean_{key}_ms"][1], means[key]) for key in ("ttft", "tpot", "e2el")]
        rate = item["server"]["num_tokens"] / item["server"]["seconds"]
        rows.append(
            [
                item["concurrency"],
                item["completed"],
                f"{rate:,.0f}",
                *pairs,
                *_clock(item["server"]),
                f"{_per_token(item['server']):.0f} us",
                f"{item['cpu']:.2f}",
            ]
        )
    yield from _table(["concurrency", "requests", *_CLIENTS, "server's CPU a token", "tool's CPU, cores"], rows)
    found_metrics = max(entry.get("scraped", 0) for entry in found["rows"])
    more = f" It has found /metrics by itself and written {found_metrics} metrics down." if found_metrics else ""
    yield f"The rate and the CPU are of the tool's whole run, its start among it.{more}"
    yield ""
    yield "Its file, read by `perfmodel validate bench FILE --scenario llama-3.1-8b-a100`, predicted / measured in ms:"
    yield ""
    names = ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms", "mean_e2el_ms", "p99_e2el_ms")
    rows = [[entry["concurrency"], *(_compared(*entry["figures"][name]) for name in names)] for entry in found["rows"]]
    yield from _table(["concurrency", *(name.removesuffix("_ms").replace("_", " ") for name in names)], rows)


def _compared(predicted: float, measured: float) -> str:
    return f"{predicted:,.1f} / {measured:,.1f} ({100 * (predicted / measured - 1):+.1f} %)"


def _prometheus(found: Result) -> Iterator[str]:
    yield "## Prometheus"
    yield ""
    yield (
        f"{found['version']}; a scrape a second, {found['scrapes']} of them good, while {found['tokens'][1]:,} tokens "
        f"were sent to 20 clients."
    )
    yield ""
    yield f"- Tokens that it has counted: {found['tokens'][0]:,}."
    empty = f"{len(found['empty'])} without an answer: {found['empty']}" if found["empty"] else "each has an answer"
    yield f"- Queries of the dashboard: {found['queries']}; {empty}; {len(found['nan'])} are NaN."
    mean = found["server"]["mean_ms"]["ttft"]
    yield f"- Median TTFT by its histogram: {found['ttft_p50_ms']:,.0f} ms (mean {mean:,.0f})."
    unwell = f"fail: {found['rules_unwell']}" if found["rules_unwell"] else "are evaluated"
    yield f"- The alerts of deploy/prometheus/rules.yml {unwell}."
    own = "none of our own" if not found["lint_own"] else f"of our own: {found['lint_own']}"
    yield (
        f"- `promtool check metrics` reads the page; {found['lint_imposed']} remarks on the names that vLLM's server "
        f"has (colons, one histogram that ends in _total), {own}."
    )
    yield ""


def _proxy(found: Result) -> Iterator[str]:
    yield "## Two replicas behind haproxy"
    yield ""
    yield (
        f"{found['version']}; `--ports --set cluster.replicas=2`, `balance leastconn`, checks of /health; 200 chats "
        f"through it, 100 at once."
    )
    yield ""
    rows = [
        [
            "whole" if item["whole"] else "streamed",
            " + ".join(map(str, item["shares"])),
            *_measured(item["server"], item["client"]),
        ]
        for item in found["rows"]
    ]
    yield from _table(["", "requests by replica", *_CLIENTS, _CPU], rows)


def _failing(found: Result) -> Iterator[str]:
    events, client, shares = found["events"], found["client"], found["shares"]
    yield "## A replica fails behind haproxy"
    yield ""
    failed = sum(client["failed"].values())
    yield (
        f"The same, 20 chats at a time; `cluster.failures` takes the second replica away {events['at_s']} s after the "
        f"start, for {events['down_s']} s. Its requests are lost and its /health answers 503; haproxy asks the other "
        f"one (`retry-on 503`, `option redispatch 1`) until it is back. Of {client['requests'] + failed} requests "
        f"{client['requests']} were answered, {shares[0]:.0f} and {shares[1]:.0f} of them by each, and {failed} failed:"
    )
    yield ""
    yield from (f"- {count} x {text}" for text, count in client["failed"].items())
    yield ""


def _overloaded(found: Result) -> Iterator[str]:
    client, server = found["client"], found["server"]
    yield "## More than the machine can do"
    yield ""
    yield (
        f"`--speed {found['speed']}`, {client['requests']} chats that are not streamed, 150 at a time: "
        f"{client['tokens'] / client['seconds']:,.0f} tokens a second of the wall; the clock was slowed "
        f"by {server['slowed_s']:.1f} s, which {found['lines']} lines of the log said, and in Prometheus the alert "
        f"EmulatorClockSlowed was {found['states']['EmulatorClockSlowed']}."
    )
    yield ""


def written(found: Result) -> str:
    """The report's text; parts that were not run are left out."""
    lines = [_HEAD]
    machine = next(iter(found.values()))["machine"]
    loads = ", ".join(f"{name} {item['machine']['load_before']:.1f}" for name, item in found.items())
    lines += [
        f"{machine['cores']} cores, Python {machine['python']}. The machine's load in the minute before each part, the "
        f"part before among it: {loads}. Where others compute on the same cores, tokens come late to everybody.",
        "",
    ]
    writers = {
        "openai": _openai,
        "prometheus": _prometheus,
        "proxy": _proxy,
        "failing": _failing,
        "overloaded": _overloaded,
    }
    for name in ("openai", "guidellm", "aiperf", "prometheus", "proxy", "failing", "overloaded"):
        if name in found:
            lines += writers[name](found[name]) if name in writers else _tool(found[name], name)
    return "\n".join(lines)
