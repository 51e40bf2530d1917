"""Metric families as Prometheus has them: rows of tables, and how an engine's numbers become one."""

__all__ = ["Naming", "Row", "SizeRow", "family", "histogram_family"]

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric, Sample

from perfmodel.serve.metrics.counts import EngineView
from perfmodel.serve.metrics.histogram import Histogram
from perfmodel.serve.metrics.page_text import LabelSet


class Row(NamedTuple):
    """A counter or a gauge: `name`, what it is, its value for an engine. Counters' names lack their `_total`."""

    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    text: str
    read: Callable[[EngineView], float]


class SizeRow(NamedTuple):
    """A histogram: `name`, what it is, which of `HISTOGRAMS` it shows, its buckets (None: 1, 2, 5 up to the longest
    sequence)."""

    name: str
    text: str
    key: str
    bounds: tuple[float, ...] | None


class Naming(Protocol):
    """The names that an engine's own server gives its metrics."""

    splits_gaps: bool

    def bounds(self, max_model_len: int) -> Mapping[str, Sequence[float]]:
        """Buckets of `HISTOGRAMS`, where sequences have at most so many tokens."""
        ...

    def families(self, views: Sequence[EngineView]) -> Iterator[Metric]:
        """All metrics of these engines."""
        ...


def family(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    text: str,
    samples: Iterable[tuple[LabelSet, float]],
) -> Metric:
    """A counter or gauge with a value for each set of labels.

    kind: the class; name: without a counter's `_total`
    text: of its HELP line; samples: (labels, value), labels of the same names
    """
    made, its = kind(name, text), name + "_total" if kind is CounterMetricFamily else name
    made.samples = [Sample(its, labels, float(value)) for labels, value in samples]
    return made


def histogram_family(name: str, text: str, samples: Iterable[tuple[LabelSet, Histogram]]) -> Metric:
    """A histogram for each set of labels."""
    made, its = HistogramMetricFamily(name, text), f"{name}_bucket"
    for labels, values in samples:
        made.samples += [Sample(its, labels.plus("le", bound), float(number)) for bound, number in values.buckets]
        made.samples.append(Sample(f"{name}_count", labels, float(values.num_values)))
        made.samples.append(Sample(f"{name}_sum", labels, values.total))
    return made
