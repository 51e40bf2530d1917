"""What a Python server reports of itself, not of its engine: requests over HTTP, the process, the interpreter.

HTTP: names, labels and buckets of prometheus_fastapi_instrumentator 8, as vLLM's server sets it up; its seconds are
those of the wall. The rest are prometheus_client's own collectors.
"""

__all__ = ["HttpCounts", "process_families"]

from collections import Counter
from collections.abc import Iterator

from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR
from prometheus_client.core import CounterMetricFamily, Metric, Sample, SummaryMetricFamily

from perfmodel.serve.metrics.families import family, histogram_family
from perfmodel.serve.metrics.histogram import Histogram
from perfmodel.serve.metrics.page_text import LabelSet

_FINE = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5),
    *(5.0, 7.5, 10.0, 30.0, 60.0),
)
_COARSE = (0.1, 0.5, 1.0)
_UNCOUNTED = {"/metrics", "/health", "/load", "/ping", "/version"}


class HttpCounts:
    """Requests of a server by path, method and status."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str, str]] = Counter()
        self._sizes: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        self._seconds, self._by_path = Histogram(_FINE), dict[tuple[str, str], Histogram]()

    def add(self, handler: str, method: str, status: int, sizes: tuple[int, int], seconds: float) -> None:
        """A request was answered.

        handler: its path, as routes have it; sizes: content-length of it and of its answer
        method, status, seconds: of it; its answer's; from its beginning to the end of its answer
        """
        if handler in _UNCOUNTED:
            return
        self._requests[handler, method, f"{status // 100}xx"] += 1
        for total, size in zip(self._sizes, sizes, strict=True):
            total[handler] += size
        self._seconds.add(seconds)
        self._by_path.setdefault((handler, method), Histogram(_COARSE)).add(seconds)

    def families(self) -> Iterator[Metric]:
        """All of them."""
        requests, numbers = [], Counter[str]()
        for (path, method, status), number in self._requests.items():
            requests.append((LabelSet(handler=path, method=method, status=status), number))
            numbers[path] += number
        yield family(CounterMetricFamily, "http_requests", "Requests by path, method and status.", requests)
        for name, total in zip(("request", "response"), self._sizes, strict=True):
            made = SummaryMetricFamily(f"http_{name}_size_bytes", f"Content-Length of {name}s, 0 where there is none.")
            for path, number in numbers.items():
                made.samples.append(Sample(f"{made.name}_count", LabelSet(handler=path), float(number)))
                made.samples.append(Sample(f"{made.name}_sum", LabelSet(handler=path), float(total[path])))
            yield made
        name, text = "http_request_duration", "From a request to the end of its answer, in seconds of the wall"
        yield histogram_family(f"{name}_highr_seconds", text + ".", [(LabelSet(), self._seconds)])
        samples = [
            (LabelSet(handler=path, method=method), seconds) for (path, method), seconds in self._by_path.items()
        ]
        yield histogram_family(f"{name}_seconds", text + ", by path.", samples)


def process_families() -> Iterator[Metric]:
    """The process and its interpreter, by prometheus_client's collectors."""
    for collector in (GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR):
        for made in collector.collect():
            made.samples = [
                sample._replace(labels=LabelSet(**sample.labels), value=float(sample.value)) for sample in made.samples
            ]
            yield made
