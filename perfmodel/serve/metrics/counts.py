"""What the steps of one engine and the requests that ended there add up to, and how that becomes a page of metrics.

A step costs what its batch changes, not what its batch holds: gaps between tokens come from the step's record, as many
as it says, and only requests that begin, end or compute a prompt are looked at one by one. With drafts, tokens differ
from request to request; the engine has gone through all of them then, and so does this.

A page is what prometheus_client writes, byte for byte, in a fraction of the time: a page of many engines is thousands
of lines, and nothing else happens in the event loop while it is written. A line but for its number is the same each
time, so sets of labels are made once and remember how they are written."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST, Metric
from prometheus_client.core import Sample
from prometheus_client.utils import floatToGoString

from perfmodel.engine import KVBlockManager, Request, Scheduler, StepPlan, StepRecord
from perfmodel.serve.emulator import RequestParams
from perfmodel.sim.clock import TICKS_PER_S
from perfmodel.sim.fleet.pool import Pool
from perfmodel.sim.replica.replica import EngineRank


class Histogram:
    """Counts of values by `bounds`, ascending: each bucket has the values up to its bound, the last has the rest.

    counts: of each bucket alone; total: the sum of all values"""

    __slots__ = ("_names", "bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._names = (*(str(float(bound)) for bound in self.bounds), "+Inf")
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """`value` has occurred so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def num_values(self) -> int:
        return sum(self.counts)

    def plus(self, other: "Histogram") -> "Histogram":
        """The values of both, whose bounds are the same."""
        both = Histogram(self.bounds)
        both.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        both.total = self.total + other.total
        return both

    @property
    def buckets(self) -> Iterator[tuple[str, float]]:
        """(bound, values up to it), the last for all values: as Prometheus has them."""
        return zip(self._names, accumulate(self.counts), strict=True)


def one_two_five(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 ... up to `most`: the buckets of vLLM's counts of tokens."""
    bounds: list[int] = []
    power = 1
    while power <= most:
        bounds += [digit * power for digit in (1, 2, 5) if digit * power <= most]
        power *= 10
    return tuple(bounds)


_ESCAPED = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class LabelSet(dict[str, str]):
    """Names and values; `text` is how a line has them."""

    __slots__ = ("_more", "text")

    def __init__(self, **labels: str) -> None:
        super().__init__(labels)
        written = ",".join(f'{name}="{value.translate(_ESCAPED)}"' for name, value in sorted(labels.items()))
        self.text = f"{{{written}}}" if written else ""
        self._more: dict[tuple[str, str], LabelSet] = {}

    def plus(self, name: str, value: str) -> "LabelSet":
        """These and another; the same object each time."""
        more = self._more.get((name, value))
        if more is None:
            more = self._more[name, value] = LabelSet(**self, **{name: value})
        return more


def page_text(families: Iterable[Metric], openmetrics: bool) -> bytes:
    """The families, whose labels are `LabelSet`s, in Prometheus's text format or in OpenMetrics'."""
    lines: list[str] = []
    for family in families:
        name = family.name
        if family.type == "counter" and not openmetrics:
            name += "_total"
        lines.append(f"# HELP {name} {family.documentation}\n# TYPE {name} {family.type}\n")
        lines += [
            f"{sample.name}{sample.labels.text} {_number(sample.value)}\n"  # type: ignore[attr-defined]
            for sample in family.samples
        ]
    if openmetrics:
        lines.append("# EOF\n")
    return "".join(lines).encode()


def _number(value: float) -> str:
    if value < 1e6 and value.is_integer():
        return f"{value:.1f}"
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text


_OPEN = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def content_type(openmetrics: bool) -> str:
    """The Content-Type of a page in OpenMetrics' format, or in Prometheus's text."""
    return _OPEN if openmetrics else CONTENT_TYPE_LATEST


def wants_openmetrics(accept: str) -> bool:
    """Whether a request with this Accept header is to be answered in OpenMetrics' format: it names it, and not to say
    that it cannot read it (q=0)."""
    for part in accept.lower().split(","):
        media, *parameters = (item.strip() for item in part.split(";"))
        if media == _OPEN.partition(";")[0]:
            return not any(parameter and not parameter.strip("q=0. ") for parameter in parameters)
    return False


# What is counted by size. Seconds: until the first token, between tokens, per token of an answer but the first, in all,
# until first scheduled, from there to the end, to the first token, from that to the end. Tokens: of prompts, of
# answers, computed of prompts, allowed by `max_tokens`, of steps. Then answers per client's request, and preemptions.
HISTOGRAMS = (
    *("ttft", "itl", "tpot", "e2e", "queue", "inference", "prefill", "decode"),
    *("prompt", "generation", "computed", "max_tokens", "iteration", "n", "preemptions"),
)
_THROUGHPUT_STEPS = 40  # SGLang's `decode_log_interval`


class EngineCounts:
    """Sums over all steps of an engine, and over its requests.

    bounds:       buckets of each of `HISTOGRAMS`; none for those that nobody reads
    splits_gaps:  tokens that come together share the gap before them (SGLang); else they end one gap together (vLLM)

    prompt_tokens:     of prompts whose first token has come, cached ones among them
    num_cached, num_transferred: of those, found in the prefix cache, or its second tier; computed by another engine
    generation_tokens: sampled, and drafted ones that were right
    accepted:          how many drafts had so many right tokens
    ended:             requests by what became of them: stop, length, abort, error
    throughput:        tokens generated per second, over some tens of steps"""

    def __init__(self, bounds: Mapping[str, Sequence[float]], splits_gaps: bool = False) -> None:
        self.of = {name: Histogram(bounds.get(name, ())) for name in HISTOGRAMS}
        self.prompt_tokens = self.num_cached = self.num_transferred = self.generation_tokens = 0
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self.done_prompt_tokens = self.done_generation_tokens = self.done_cached_tokens = 0
        self.accepted: Counter[int] = Counter()
        self.ended: Counter[str] = Counter()
        self.throughput = 0.0
        self.decode_context = 0
        self._splits_gaps = splits_gaps
        self._itl, self._iteration = self.of["itl"], self.of["iteration"]
        self._window = (0, 0, 0)  # steps, tokens, tick when it began

    def add_step(self, record: StepRecord, plan: StepPlan, gaps: Sequence[tuple[int, int]], num_prompt: int) -> None:
        """A step has ended, of which an `Observer` is told `record`, `plan` and `gaps`.

        num_prompt: tokens of prompts that have their first token with it"""
        tokens = len(plan.decodes) + len(plan.samples) + record.num_accepted_tokens
        if record.num_gaps:
            duration = (record.end - record.start) / TICKS_PER_S
            if self._splits_gaps and record.num_accepted_tokens:
                others = {*plan.resumed, *plan.singles}  # whose gaps are told one by one
                paired = zip(plan.decodes, _right(plan), strict=True)
                for right, times in Counter([right for request, right in paired if request not in others]).items():
                    self._itl.add(duration / (1 + right), (1 + right) * times)
            else:
                self._itl.add(duration, record.num_gaps)
        for ticks, times in gaps:
            self._itl.add(ticks / TICKS_PER_S, times)
        if record.num_draft_tokens:
            self.num_drafts += record.num_drafts
            self.num_draft_tokens += record.num_draft_tokens
            self.num_accepted_tokens += record.num_accepted_tokens
            self.accepted.update(_right(plan))
        if tokens:
            self.generation_tokens += tokens
            self._iteration.add(num_prompt + tokens)
        if record.num_decodes:
            self.decode_context = record.decode_context
            steps, total, began = self._window
            steps, total = steps + 1, total + tokens
            self._window = steps, total, began
            if steps >= _THROUGHPUT_STEPS:
                self.throughput = total * TICKS_PER_S / max(record.end - began, 1)
                self._window = 0, 0, record.end

    def add_prompt(self, request: Request) -> None:
        """The first token of `request` has been sampled, so its prompt is computed."""
        self.prompt_tokens += request.num_prompt_tokens
        if request.num_transferred_tokens:
            self.num_transferred += request.num_prompt_tokens
        else:
            self.num_cached += request.num_cached_tokens

    def add_finished(self, request: Request, params: RequestParams) -> None:
        """`request` is done; its times are its client's."""
        first, last, scheduled = request.first_token_at, request.finished_at, request.first_scheduled_at
        assert first is not None
        assert last is not None
        assert scheduled is not None
        self.ended[params.finish_reason] += 1
        self.done_prompt_tokens += request.num_prompt_tokens
        self.done_generation_tokens += request.max_output_tokens
        self.done_cached_tokens += request.num_cached_tokens
        spans = {
            "e2e": last - request.arrival,
            "queue": scheduled - request.arrival,
            "inference": last - scheduled,
            "prefill": first - scheduled,
            "decode": last - first,
            "tpot": (last - first) / max(request.max_output_tokens - 1, 1),
        }
        for name, ticks in spans.items():
            self.of[name].add(ticks / TICKS_PER_S)
        self.of["prompt"].add(request.num_prompt_tokens)
        self.of["generation"].add(request.max_output_tokens)
        self.of["computed"].add(request.num_prompt_tokens - request.num_cached_tokens)
        self.of["max_tokens"].add(params.max_tokens or request.max_output_tokens)
        self.of["preemptions"].add(request.num_preemptions)
        if params.n is not None:
            self.of["n"].add(params.n)


def _right(plan: StepPlan) -> list[int]:
    """Right tokens of each of the plan's drafts, in the order of `decodes`."""
    return [min(right, depth) for right, depth in zip(plan.num_accepted, plan.draft_depths, strict=True)]


class EngineView(NamedTuple):
    """One engine as a page of metrics shows it: `number` there, its `pool`, how it stands now and its `counts`."""

    number: int
    engine: EngineRank
    pool: Pool
    counts: EngineCounts

    @property
    def scheduler(self) -> Scheduler:
        return self.engine.loop.scheduler

    @property
    def blocks(self) -> KVBlockManager:
        return self.engine.loop.scheduler.blocks

    @property
    def kv_usage(self) -> float:
        """Fraction of the KV blocks that is in use."""
        return self.blocks.num_used / self.blocks.num_blocks if self.blocks.num_blocks else 0.0

    @property
    def num_restored(self) -> int:
        """Tokens whose KV has come back from a second tier."""
        return 0 if self.blocks.host is None else self.blocks.host.num_restored_tokens

    @property
    def num_asked(self) -> int:
        """Tokens looked up in the prefix cache, in all admissions."""
        return self.scheduler.num_prefix_tokens_asked if self.blocks.enable_prefix_caching else 0

    @property
    def num_hit(self) -> int:
        """Those that were on the device."""
        return self.scheduler.num_prefix_tokens_hit - self.num_restored if self.blocks.enable_prefix_caching else 0


def family(kind: str, name: str, text: str, samples: Iterable[tuple[LabelSet, Any]]) -> Metric:
    """A counter, a gauge or a histogram with a value, or a `Histogram`, for each set of labels.

    kind: its type; name: without a counter's `_total`
    text: of its HELP line; samples: (labels, value), labels of the same names"""
    made, suffix = Metric(name, text, kind), "_total" if kind == "counter" else ""
    for labels, value in samples:
        if isinstance(value, Histogram):
            bucket = f"{name}_bucket"
            made.samples += [Sample(bucket, labels.plus("le", bound), float(number)) for bound, number in value.buckets]
            made.samples.append(Sample(f"{name}_count", labels, float(value.num_values)))
            made.samples.append(Sample(f"{name}_sum", labels, value.total))
        else:
            made.samples.append(Sample(name + suffix, labels, float(value)))
    return made


class Row(NamedTuple):
    """A counter or a gauge: `name`, what it is, its value for an engine. Counters' names lack their `_total`.

    label: by whose values it is split; then `read` gives a value for each of them"""

    kind: str
    name: str
    text: str
    read: Callable[[EngineView], Any]
    label: str = ""

    def family(self, labelled: Sequence[tuple[LabelSet, EngineView]]) -> Metric:
        """The metric of these engines."""
        samples = [(labels, self.read(view)) for labels, view in labelled]
        if self.label:
            samples = [(labels.plus(self.label, name), n) for labels, split in samples for name, n in split.items()]
        return family(self.kind, self.name, self.text, samples)


class SizeRow(NamedTuple):
    """A histogram: `name`, what it is, which of `HISTOGRAMS` it shows, buckets (None: 1, 2, 5 up to the longest)."""

    name: str
    text: str
    key: str
    bounds: tuple[float, ...] | None

    def family(self, labelled: Sequence[tuple[LabelSet, EngineView]]) -> Metric:
        """The metric of these engines."""
        return family("histogram", self.name, self.text, [(labels, v.counts.of[self.key]) for labels, v in labelled])
