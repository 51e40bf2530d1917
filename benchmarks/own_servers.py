"""How near a profile fitted to load tests of one server comes to that server at rates that were not measured.

    python benchmarks/own_servers.py [--servers 24] [--requests 30,100] [--report MD]

Servers are simulated: hosts with numbers drawn about vLLM's shipped ones, front ends that take eight to twenty times as
long (tests/unit/evidence/test_own_server.py). TTFT and TPOT of each load test are off by a draw of 2 %. One server
takes some 3 s at 30 requests a load test and 7 s at 100.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit" / "evidence")]

from test_own_server import METRICS, NOISE, OTHERS, RATES, SCENARIO, hidden_profile, load_test, served  # noqa: E402

from perfmodel.cost import EngineProfile, load_engine_profile  # noqa: E402
from perfmodel.evidence.fit.server_fit import fit_server  # noqa: E402
from perfmodel.evidence.predict.bench import GivenSetup  # noqa: E402
from perfmodel.evidence.sources.bench import read_bench_files  # noqa: E402

_ERRORS = ("shipped, median", "shipped, worst", "fitted, median", "fitted, worst")
_COLUMNS = ("requests a load test", *_ERRORS, "servers within 3 %", "within 4 %")


def _errors(seed: int, num_requests: int) -> tuple[list[float], list[float]]:
    """Relative errors of all metrics at the other rates, in per cent: as shipped, and fitted."""
    hidden, rng = hidden_profile(seed), np.random.default_rng(100 + seed)
    with TemporaryDirectory() as folder:
        files = [load_test(Path(folder) / f"{rate}.json", rate, hidden, rng, num_requests) for rate in RATES]
        fitted = fit_server("mine", read_bench_files(files)[0], GivenSetup(SCENARIO), "vllm").profile

    def off(profile: EngineProfile) -> list[float]:
        result = []
        for rate in OTHERS:
            ours, theirs = (served(rate, item, num_requests).summary for item in (profile, hidden))
            result += [100 * (ours[metric] / theirs[metric] - 1) for metric in METRICS]
        return result

    return off(load_engine_profile("vllm")), off(fitted)


def _row(num_requests: int, shipped: Sequence[Sequence[float]], fitted: Sequence[Sequence[float]]) -> str:
    worst = np.abs(np.array(fitted)).max(axis=1)
    cells = [
        f"{num_requests}",
        f"{np.median(np.abs(shipped)):.1f} %",
        f"{np.abs(shipped).max():.1f} %",
        f"{np.median(np.abs(fitted)):.1f} %",
        f"{worst.max():.1f} %",
        f"{(worst <= 3).sum()} of {len(worst)}",
        f"{(worst <= 4).sum()} of {len(worst)}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Fit all servers, and report how far predictions at other rates are off."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=24)
    parser.add_argument("--requests", default="30,100", help="of each load test")
    parser.add_argument("--report", type=Path)
    asked = parser.parse_args()
    lines = [
        "# Profiles fitted to load tests of one server",
        "",
        f"`python benchmarks/own_servers.py --servers {asked.servers} --requests {asked.requests}`: each server is "
        f"fitted to load tests at {', '.join(map(str, RATES))} requests/s, whose TTFT and TPOT are off by a draw of "
        f"{100 * NOISE:g} %, and asked for TTFT, TPOT and E2E at {' and '.join(map(str, OTHERS))} requests/s.",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        "|" + len(_COLUMNS) * "---|",
    ]
    for num_requests in map(int, asked.requests.split(",")):
        shipped, fitted = [], []
        for seed in range(asked.servers):
            before, after = _errors(seed, num_requests)
            shipped.append(before)
            fitted.append(after)
            print(f"{num_requests} requests, server {seed}: {max(map(abs, after)):.1f} %", file=sys.stderr, flush=True)
        lines.append(_row(num_requests, shipped, fitted))
    text = "\n".join(lines) + "\n"
    print(text)
    if asked.report is not None:
        asked.report.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
