"""The emulator under real clients and real infrastructure, all on loopback.

    python benchmarks/emulator_parts --guidellm FOLDER --aiperf FOLDER [--report reports/emulator_202611.md]

FOLDER is an environment of that tool alone (`python -m venv FOLDER; FOLDER/bin/pip install guidellm`), as load tools
pin what they import. prometheus, promtool and haproxy are Debian's packages. Parts: openai, guidellm, aiperf,
prometheus, proxy, failing, overloaded (`--only` for some); each starts emulators of its own, and ends what it started.
Some six minutes; a run sends some hundreds of requests at most. What clients measure is put beside what the emulator
counted of the same requests (/metrics: when they arrived in the engine, and when their tokens were due), which is what
the client, the loopback and the server's HTTP add.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import load_tools
from infrastructure import linted, prometheus, proxied, queried, rules_of
from report import written
from server import ROOT, Server, Span, started

SCENARIO = "llama-3.1-8b-a100"
SLOW = "--set=hardware=l40s"  # fewer tokens a second, as many requests
# A burst of all at once, streamed and whole; fewer; and as many requests on a device of fewer tokens a second.
BURSTS = ((8, False, ()), (50, False, ()), (200, False, ()), (200, True, ()))
LENGTHS, CONCURRENCY, REQUESTS = (400, 100), (1, 8, 32), 96
TOO_FAST = 400  # simulated seconds per second
FAILS_AT_S, DOWN_S, FAILING_REQUESTS = 10, 8, 480
Result = dict[str, Any]


def _span(span: Span) -> Result:
    return {**span._asdict(), "mean_ms": dict(span.mean_ms)}


def _client(url: str, *flags: str) -> Result:
    """What the openai client, in a process of its own, has measured."""
    words = [sys.executable, str(Path(__file__).with_name("clients.py")), url, *flags]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    client: Result = json.loads(done.stdout)
    return client


def _openai(asked: argparse.Namespace, out: Path) -> Result:
    """Bursts of requests, all at once."""
    from openai import VERSION

    rows = []
    for concurrency, whole, flags in BURSTS:
        with started(SCENARIO, "--port", "0", *flags) as server:
            _client(server.urls[0], "--concurrency", "2", "--requests", "2")  # modules are loaded, pages are there
            before = server.sums()
            words = ["--concurrency", str(concurrency), "--requests", str(concurrency), *(["--whole"] if whole else [])]
            client = _client(server.urls[0], *words)
            rows.append(
                {"concurrency": concurrency, "whole": whole, "client": client, "server": _span(server.since(before))}
            )
    return {"version": f"openai {VERSION}", "rows": rows}


def _load_tool(run: Callable[..., load_tools.Tool], programs: Path, out: Path) -> Result:
    """Closed loops of a load tool at several concurrencies, and what `validate bench` says of its files."""
    tokenizer = load_tools.write_tokenizer(out / "tokenizer")
    rows, version = [], ""
    for concurrency in CONCURRENCY:
        folder = out / str(concurrency)
        folder.mkdir()
        with started(SCENARIO, "--port", "0", "--tokenizer", str(tokenizer / "tokenizer.json")) as server:
            before = server.sums()
            tool = run(
                programs, server.urls[0], tokenizer, folder, concurrency, min(REQUESTS, 24 * concurrency), LENGTHS
            )
            span = server.since(before)
        read = load_tools.read_back(tool.result, SCENARIO)
        version = tool.version
        seen = load_tools.scraped(tool.result)
        rows.append({"concurrency": concurrency, "cpu": tool.cpu, "server": _span(span), "scraped": seen, **read})
    shown = [str(word).replace(str(out), "OUT").replace(str(programs), "") for word in tool.words]
    return {"version": version, "command": " ".join(shown), "rows": rows}


def _prometheus(asked: argparse.Namespace, out: Path) -> Result:
    """A scrape a second while requests run; each of the dashboard's queries answered; the page linted."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from deployment_files import dashboard_queries

    with (
        started(SCENARIO, "--port", "0") as server,
        prometheus(server.urls, out, ROOT / "deploy/prometheus/rules.yml") as address,
    ):
        before = server.sums()
        time.sleep(3)  # of scrapes without a request, for rates to begin
        client = _client(server.urls[0], "--concurrency", "20", "--requests", "200")
        time.sleep(3)
        span = server.since(before)
        unwell = [rule["name"] for rule in rules_of(address) if rule["health"] != "ok"]
        answered = {query: queried(address, query) for query in dashboard_queries()}
        empty = [query for query, rows in answered.items() if not rows]
        nan = [query for query, rows in answered.items() if any(row["value"][1] == "NaN" for row in rows)]
        generated = queried(address, "sum(vllm:generation_tokens_total)")[0]["value"][1]
        up = queried(address, "sum_over_time(up[1m])")[0]["value"][1]
        p50 = queried(
            address, "histogram_quantile(0.5, sum by (le) (rate(vllm:time_to_first_token_seconds_bucket[1m])))"
        )
        status, remarks = linted(server.urls[0])
    imposed = [line for line in remarks if line.startswith("vllm:")]
    return {
        "version": _first_line("prometheus", "--version"),
        "scrapes": int(up),
        "rules_unwell": unwell,
        "queries": len(answered),
        "empty": empty,
        "nan": nan,
        "tokens": (int(float(generated)), client["tokens"]),
        "ttft_p50_ms": 1e3 * float(p50[0]["value"][1]),
        "lint_status": status,
        "lint_imposed": len(imposed),
        "lint_own": [line for line in remarks if line and line not in imposed],
        "server": _span(span),
    }


def _proxy(asked: argparse.Namespace, out: Path) -> Result:
    """Two replicas on ports of their own, and haproxy in front."""
    flags = ("--port", "0", "--ports", "--set", "cluster.replicas=2", "--allowed-host", "*")
    rows = []
    with started(SCENARIO, *flags, num_ports=2) as server, proxied(server.urls, out) as address:
        _client(address, "--concurrency", "2", "--requests", "2")
        for whole in (False, True):
            item = [Server(server.process, [url], []) for url in server.urls]
            before, alone = server.sums(), [one.sums() for one in item]
            client = _client(address, "--concurrency", "100", "--requests", "200", *(["--whole"] if whole else []))
            shares = [one.since(was).num_requests for one, was in zip(item, alone, strict=True)]
            rows.append({"whole": whole, "client": client, "server": _span(server.since(before)), "shares": shares})
    return {"version": _first_line("haproxy", "-v"), "rows": rows}


def _failing(asked: argparse.Namespace, out: Path) -> Result:
    """The same, with a replica that fails for a while under load: haproxy has to notice, and to take it back."""
    event = f"{{at_s: {FAILS_AT_S}, pool: 0, replica: 1, down_s: {DOWN_S}}}"
    flags = ("--port", "0", "--ports", "--set", "cluster.replicas=2", "--set")
    with (
        started(SCENARIO, *flags, f"cluster.failures={{events: [{event}], start_s: 1}}", num_ports=2) as server,
        proxied(server.urls, out) as address,
    ):
        item = [Server(server.process, [url], []) for url in server.urls]
        client = _client(address, "--concurrency", "20", "--requests", str(FAILING_REQUESTS), "--fails")
        done = [one.sums()["vllm:e2e_request_latency_seconds_count"] for one in item]
    return {"client": client, "shares": done, "events": {"at_s": FAILS_AT_S, "down_s": DOWN_S}}


def _overloaded(asked: argparse.Namespace, out: Path) -> Result:
    """More than the machine can do: the clock is slowed, the log says it, and Prometheus raises the alert."""
    rules = ROOT / "deploy/prometheus/rules.yml"
    with (
        started(SCENARIO, "--port", "0", "--speed", str(TOO_FAST)) as server,
        prometheus(server.urls, out, rules) as at,
    ):
        before = server.sums()
        words = ("--concurrency", "150", "--requests", "1500", "--output-tokens", "200", "--whole")
        client = _client(server.urls[0], *words)
        time.sleep(3)  # until the last scrape has been evaluated
        states = {rule["name"]: rule["state"] for rule in rules_of(at)}
        span = _span(server.since(before))
        overloaded = sum("slowed" in line for line in server.lines)
    return {"client": client, "server": span, "states": states, "lines": overloaded, "speed": TOO_FAST}


def _first_line(program: str, flag: str) -> str:
    process = subprocess.run(
        [program, flag],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": os.environ["PATH"] + ":/usr/sbin"},
    )
    return (process.stdout + process.stderr).splitlines()[0]


def _parts(asked: argparse.Namespace) -> Mapping[str, Callable[[Path], Result]]:
    return {
        "openai": lambda out: _openai(asked, out),
        "guidellm": lambda out: _load_tool(load_tools.guidellm, asked.guidellm.resolve() / "bin", out),
        "aiperf": lambda out: _load_tool(load_tools.aiperf, asked.aiperf.resolve() / "bin", out),
        "prometheus": lambda out: _prometheus(asked, out),
        "overloaded": lambda out: _overloaded(asked, out),
        "failing": lambda out: _failing(asked, out),
        "proxy": lambda out: _proxy(asked, out),
    }


def main() -> int:
    """Try the parts, and write the report. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--guidellm", type=Path, metavar="FOLDER")
    parser.add_argument("--aiperf", type=Path, metavar="FOLDER")
    parser.add_argument("--only", action="append", help="a part; may be given several times")
    parser.add_argument("--report", type=Path, help="a .md; the .json beside it keeps parts that are not run again")
    asked = parser.parse_args()
    parts, result = _parts(asked), dict[str, Any]()
    data = None if asked.report is None else asked.report.with_suffix(".json")
    if data is not None and data.exists():
        result = json.loads(data.read_text(encoding="utf-8"))
    for name in asked.only or parts:
        with tempfile.TemporaryDirectory() as folder:
            begun, load = time.monotonic(), os.getloadavg()[0]
            result[name] = parts[name](Path(folder))
            result[name]["machine"] = {
                "cores": os.cpu_count(),
                "load_before": load,
                "python": platform.python_version(),
            }
        print(f"{name}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    text = written(result)
    print(text)
    if asked.report is not None and data is not None:
        asked.report.write_text(text, encoding="utf-8")
        data.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
