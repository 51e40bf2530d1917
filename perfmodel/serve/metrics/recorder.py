"""`Metrics`: watches an emulator's engines, and writes what it has counted as Prometheus and OpenMetrics read it; and
what a Python server reports of itself: requests over HTTP, the process, the interpreter.

HTTP: names, labels and buckets of prometheus_fastapi_instrumentator 8, as vLLM's server sets it up; its seconds are
those of the wall. Those of the process are prometheus_client's own collectors."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR
from prometheus_client.core import Metric, Sample, SummaryMetricFamily

from perfmodel.engine import Request, RequestStatus, StepPlan, StepRecord
from perfmodel.serve.emulator import Emulator, Fate, Observer, RequestParams
from perfmodel.serve.metrics.counts import EngineCounts, EngineView, Histogram, LabelSet, family, page_text
from perfmodel.serve.metrics.names import LATE_BOUNDS, SglangNames, VllmNames, own_families
from perfmodel.sim.clock import TICKS_PER_S
from perfmodel.sim.replica.replica import EngineRank

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
        method, status, seconds: of it; its answer's; from its beginning to the end of its answer"""
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
        yield family("counter", "http_requests", "Requests by path, method and status.", requests)
        for name, total in zip(("request", "response"), self._sizes, strict=True):
            made = SummaryMetricFamily(f"http_{name}_size_bytes", f"Content-Length of {name}s, 0 where there is none.")
            for path, number in numbers.items():
                made.samples.append(Sample(f"{made.name}_count", LabelSet(handler=path), float(number)))
                made.samples.append(Sample(f"{made.name}_sum", LabelSet(handler=path), float(total[path])))
            yield made
        name, text = "http_request_duration", "From a request to the end of its answer, in seconds of the wall"
        yield family("histogram", f"{name}_highr_seconds", text + ".", [(LabelSet(), self._seconds)])
        by_path = self._by_path.items()
        samples = [(LabelSet(handler=path, method=method), seconds) for (path, method), seconds in by_path]
        yield family("histogram", f"{name}_seconds", text + ", by path.", samples)


@dataclass(slots=True, eq=False)
class _Known:
    """A request that a client waits for: when it arrived, which engine has it, as far as one has, its `params`."""

    arrival: int
    engine: int | None
    params: RequestParams
    has_token: bool = False


class MetricsPage:
    """A page of metrics: those that `collect` yields whenever it is rendered. A collector of prometheus_client, too.

    engines: yields those of the engines; http: requests that its server answers, if they are counted"""

    def __init__(self, engines: Callable[[], Iterator[Metric]], http: HttpCounts | None = None) -> None:
        self._engines, self.http = engines, http

    def collect(self) -> Iterator[Metric]:
        """All metrics as they are now."""
        if self.http is not None:
            for collector in (GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR):  # the process, its interpreter
                for made in collector.collect():
                    labelled = [(sample, LabelSet(**sample.labels)) for sample in made.samples]
                    made.samples = [s._replace(labels=labels, value=float(s.value)) for s, labels in labelled]
                    yield made
            yield from self.http.families()
        yield from self._engines()

    def render(self, openmetrics: bool = False) -> bytes:
        """The page as it is now; `content_type` says what it is."""
        return page_text(self.collect(), openmetrics)


class Metrics(MetricsPage, Observer):
    """What a server of `emulator` publishes at /metrics, `engine` being the engine's number in the cluster; an
    `Observer`, which it enters itself.

    model_name: as served
    names:      whose names, types, labels and buckets
    legacy:     with names that vLLM has given up, too
    loras:      names of the adapters that are served"""

    def __init__(
        self,
        emulator: Emulator,
        model_name: str,
        names: Literal["vllm", "sglang"] = "vllm",
        legacy: bool = False,
        loras: Sequence[str] = (),
    ) -> None:
        self._emulator = emulator
        self._naming = (
            SglangNames(model_name) if names == "sglang" else VllmNames(model_name, legacy, loras, self._adapters)
        )
        self._known: dict[int, _Known] = {}
        self._pool_of = {engine.index: pool for pool in emulator.cluster.pools for engine in pool.engines}
        bounds = self._naming.bounds(emulator.max_model_len)
        self._counts = {index: EngineCounts(bounds, self._naming.splits_gaps) for index in self._pool_of}
        self._shadows = {index for index, pool in self._pool_of.items() if pool.spec.shadow}
        self._silent = self._shadows | {i for i, pool in self._pool_of.items() if pool.spec.role == "prefill"}
        self._lateness = Histogram(LATE_BOUNDS)
        self._num_stalled = 0
        super().__init__(partial(self._families, emulator.cluster.engines), HttpCounts() if names == "vllm" else None)
        emulator.observers.append(self)

    def of_replica(self, replica: int) -> MetricsPage:
        """A page for the replica of this number alone, `engine` being the data-parallel rank."""
        families = partial(self._families, self._emulator.replicas[replica].ranks)
        return MetricsPage(families, None if self.http is None else HttpCounts())

    def _families(self, engines: Sequence[EngineRank]) -> Iterator[Metric]:
        views = [
            EngineView(number, engine, self._pool_of[engine.index], self._counts[engine.index])
            for number, engine in enumerate(engines)
        ]
        yield from self._naming.families(views)
        yield from own_families(self._emulator, self._lateness, self._num_stalled)

    def _adapters(self) -> tuple[Sequence[str], Sequence[str]]:
        named = [(one.params.adapter, one.has_token) for one in self._known.values() if one.params.adapter]
        running, waiting = ({name for name, has_token in named if has_token is wanted} for wanted in (True, False))
        return sorted(running), sorted(waiting)

    def add_late(self, seconds: float) -> None:
        """An event of the clock came so late."""
        self._lateness.add(seconds)

    def add_stalled(self) -> None:
        """A client was cut off that did not read its answer."""
        self._num_stalled += 1

    def on_arrived(self, request: Request) -> None:
        number = request.request_id
        server = self._emulator.server_of(number)
        engine = server.index if isinstance(server, EngineRank) else None
        self._known[number] = _Known(request.arrival, engine, self._emulator.params_of(number))

    def on_step(self, engine: EngineRank, record: StepRecord, plan: StepPlan, gaps: Sequence[tuple[int, int]]) -> None:
        """See `Observer`."""
        index, num_prompt = engine.index, 0
        counts = self._counts[index]
        if plan.chunks or plan.singles or plan.resumed:
            for grant in plan.chunks:
                known = self._known.get(grant.request.request_id)
                if known is not None and index not in self._shadows:
                    known.engine = index
            for request in (*plan.samples, *plan.singles, *plan.resumed):
                if request.first_token_at != record.end:
                    continue
                num_prompt += request.num_prompt_tokens
                counts.add_prompt(request)
                known = self._known.get(request.request_id)
                if known is None or known.has_token or index in self._silent:
                    continue
                if request.status is not RequestStatus.ABORTED:  # else a try that was lost with its replica
                    known.has_token, known.engine = True, index
                    came = record.end + self._emulator.cluster.delay_out(engine, plan.num_samples)
                    counts.of["ttft"].add((came - known.arrival) / TICKS_PER_S)
        counts.add_step(record, plan, gaps, num_prompt)

    def on_finished(self, engine: EngineRank, request: Request) -> None:
        known = self._known.pop(request.request_id, None)
        if known is None:
            return
        counts = self._counts[engine.index]
        if not known.has_token:  # a prefill engine's: it had no other
            assert request.first_token_at is not None
            counts.of["ttft"].add((request.first_token_at - known.arrival) / TICKS_PER_S)
        counts.add_finished(request, known.params)

    def on_lost(self, request: Request, fate: Fate) -> None:
        self._end_unanswered(request, "error")

    def on_aborted(self, request: Request) -> None:
        self._end_unanswered(request, "abort")

    def _end_unanswered(self, request: Request, reason: str) -> None:
        known = self._known.pop(request.request_id, None)
        if known is not None:
            index = min(self._counts) if known.engine is None else known.engine
            self._counts[index].ended[reason] += 1
