"""`perfmodel watch`: reads a running server's counters, and says once in a while whether it still does as predicted."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import urlopen

from perfmodel.errors import SpecError
from perfmodel.evidence.drift import DriftGuard, Judgement, observed_between

_LIMIT_S = 10.0  # of one reading
_MAX_BYTES = 16_000_000


def fetched(url: str) -> str:
    """What the server has at `url`. Raises SpecError for an address that is not HTTP's, or does not answer."""
    if not url.startswith(("http://", "https://")):
        raise SpecError(f"URL: got {url[:80]!r}; expected a server's metrics, as http://127.0.0.1:8000/metrics.")
    try:
        with urlopen(url, timeout=_LIMIT_S) as answer:
            return str(answer.read(_MAX_BYTES).decode("utf-8", "replace"))
    except (OSError, HTTPException, ValueError) as error:
        raise SpecError(f"{url}: does not answer: {getattr(error, 'reason', None) or error}.") from None


@dataclass
class Watch:
    """Reads `url` every `every_s` seconds. longest_s: how long drift may last; drifted_s: how long it lasts now, of any
    mean; fetch, sleep, clock: of the machine"""

    url: str
    guard: DriftGuard
    every_s: float
    longest_s: float
    fetch: Callable[[str], str] = fetched
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    drifted_s: float = 0.0
    last: Judgement | None = None

    def run(self, say: Callable[[str], None], lasts_s: float | None = None) -> bool:
        """Until `lasts_s` are over, or for ever; whether some drift lasted longer than it may. `say`: a line a reading.
        Raises SpecError where the first reading fails; later ones are said and tried again."""
        before, read_at = self.guard.counts(self.fetch(self.url)), self.clock()
        begin, has_drifted = read_at, False
        while lasts_s is None or self.clock() - begin < lasts_s:
            self.sleep(self.every_s)
            try:
                after, now = self.guard.counts(self.fetch(self.url)), self.clock()
            except SpecError as error:
                say(str(error))
                continue
            observed, seconds = observed_between(before, after, now - read_at), now - read_at
            before, read_at = after, now
            if observed is None:
                say("no request has finished, or the server has begun anew")
                continue
            self.last = self.guard.judge(observed)
            self.drifted_s = self.drifted_s + seconds if self.last.drifted else 0.0
            lasting = self.drifted_s > self.longest_s
            say(f"{'DRIFT ' if lasting else ''}{self.last}")
            has_drifted |= lasting
        return has_drifted

    def metrics(self) -> str:
        """The last judgement in Prometheus' text format."""
        lines = [f"perfmodel_drifted_seconds {self.drifted_s:g}"]
        if self.last is not None:
            for metric, value in self.last.observed.means.items():
                low, high = self.last.intervals[metric]
                ends = {"observed": value, "predicted": self.last.predicted[metric], "low": low, "high": high}
                lines += [f'perfmodel_{metric}{{of="{of}"}} {number:g}' for of, number in ends.items()]
        return "\n".join(lines) + "\n"


def serve_metrics(watch: Watch, host: str, port: int) -> ThreadingHTTPServer:
    """Serves `watch.metrics()` until `shutdown`. Raises SpecError for a port that is taken."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = watch.metrics().encode()
            self.send_response(200)
            self.send_header("content-type", "text/plain; version=0.0.4")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise SpecError(f"--port {port}: {error.strerror}; take another one.") from None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
