"""Metrics as SGLang's server has them: names, types, labels and buckets.

Source: the collector of SGLang 0.5's runtime (`srt/metrics`; what its server counts before `is_streaming` became a
label). What its schedulers say has labels of the engine; what its tokenizer manager says, which stands before all
data-parallel ranks, has the model's name only, and counts a request when it is done.
"""

__all__ = ["SglangNames"]

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from perfmodel.serve.metrics.counts import EngineCounts, EngineView
from perfmodel.serve.metrics.families import Row, SizeRow, family, histogram_family
from perfmodel.serve.metrics.histogram import Histogram
from perfmodel.serve.metrics.page_text import LabelSet

_SECONDS = ", in simulated seconds."
_GAUGE, _COUNTER = GaugeMetricFamily, CounterMetricFamily
_TTFT = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_E2E = (*_TTFT, 600, 1200, 1800, 2400)
_ITL = (
    *(0.002, 0.004, 0.006, 0.008, 0.010, 0.015, 0.020, 0.025, 0.030, 0.035, 0.040, 0.060, 0.080, 0.100),
    *(0.200, 0.400, 0.600, 0.800, 1.0, 2.0, 4.0, 6.0, 8.0),
)
_QUEUE = (
    *(0.0, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 10, 15, 20, 30, 40, 50, 60, 70, 80, 90, 100, 200, 300, 400, 500, 600, 700),
    *(800, 900, 1000, 1200, 1400, 1600, 1800, 2000, 2500, 3000),
)
_TOKENS = (
    *(100, 300, 500, 700, 1000, 1500, 2000, 3000, 4000, 5000, 6000, 7000, 8000, 9000, 10000, 12000, 15000, 20000),
    *(22000, 25000, 30000, 35000, 40000, 66000, 99000, 132000, 300000, 600000, 900000, 1100000),
)
_RETRACTIONS = (*range(11), 15, 20, 25, 30, 40, 50, 75, 100)

_ROWS = (
    Row(_GAUGE, "sglang:num_running_reqs", "Requests that run.", lambda v: v.num_running),
    Row(_GAUGE, "sglang:num_queue_reqs", "Requests that wait.", lambda v: v.num_waiting),
    Row(
        _GAUGE,
        "sglang:num_used_tokens",
        "Tokens that the KV blocks in use hold.",
        lambda v: v.num_used_blocks * v.block_size,
    ),
    Row(_GAUGE, "sglang:token_usage", "KV cache in use; 1 is all of it.", lambda v: v.kv_usage),
    Row(
        _GAUGE,
        "sglang:max_total_num_tokens",
        "Tokens that the KV cache holds.",
        lambda v: v.num_blocks * v.block_size,
    ),
    Row(
        _GAUGE,
        "sglang:decode_sum_seq_lens",
        "Tokens in the KV of all sequences that decode.",
        lambda v: v.counts.decode_context if v.num_running else 0,
    ),
    Row(
        _GAUGE,
        "sglang:gen_throughput",
        "Tokens generated per simulated second, over the newest 40 steps that decoded.",
        lambda v: v.counts.throughput if v.num_running else 0,
    ),
    Row(
        _GAUGE,
        "sglang:cache_hit_rate",
        "Found of the tokens looked up in the prefix cache.",
        lambda v: v.num_hit / max(v.num_asked, 1),
    ),
    Row(_COUNTER, "sglang:num_retracted_requests", "Requests that were preempted.", lambda v: v.num_preemptions),
)
_DRAFT_ROWS = (
    Row(
        _GAUGE,
        "sglang:spec_accept_length",
        "Tokens per verified draft, the one that comes in any case among them.",
        lambda v: 1 + v.counts.num_accepted_tokens / max(v.counts.num_drafts, 1),
    ),
    Row(
        _GAUGE,
        "sglang:spec_accept_rate",
        "Drafted tokens that were right.",
        lambda v: v.counts.num_accepted_tokens / max(v.counts.num_draft_tokens, 1),
    ),
)


class _Sum(NamedTuple):
    """A counter of the tokenizer manager: the sum of `read` over all engines."""

    name: str
    text: str
    read: Callable[[EngineCounts], int]


_SUMS = (
    _Sum("sglang:prompt_tokens", "Prompt tokens of requests that are done.", lambda c: c.done_prompt_tokens),
    _Sum("sglang:generation_tokens", "Tokens of answers that are done.", lambda c: c.done_generation_tokens),
    _Sum("sglang:cached_tokens", "Cached prompt tokens of requests that are done.", lambda c: c.done_cached_tokens),
    _Sum("sglang:num_requests", "Requests that are done.", lambda c: c.ended["stop"] + c.ended["length"]),
    _Sum("sglang:num_aborted_requests", "Requests whose client has gone.", lambda c: c.ended["abort"]),
)
_SCHEDULER_SIZES = (SizeRow("sglang:queue_time_seconds", "From arrival until scheduled" + _SECONDS, "queue", _QUEUE),)
_SIZES = (
    SizeRow("sglang:time_to_first_token_seconds", "Until the first token" + _SECONDS, "ttft", _TTFT),
    SizeRow("sglang:inter_token_latency_seconds", "Between tokens" + _SECONDS, "itl", _ITL),
    SizeRow("sglang:e2e_request_latency_seconds", "From arrival to the last token" + _SECONDS, "e2e", _E2E),
    SizeRow("sglang:prompt_tokens_histogram", "Tokens of prompts.", "prompt", _TOKENS),
    SizeRow("sglang:generation_tokens_histogram", "Tokens of answers.", "generation", _TOKENS),
    SizeRow("sglang:num_retractions", "Preemptions per request.", "preemptions", _RETRACTIONS),
)


class SglangNames:
    """SGLang's names; model_name: as served."""

    splits_gaps = True

    def __init__(self, model_name: str) -> None:
        self._server = LabelSet(model_name=model_name)

    def bounds(self, max_model_len: int) -> Mapping[str, Sequence[float]]:
        """As of `Naming`; whatever is the longest sequence."""
        return {row.key: row.bounds or () for row in (*_SCHEDULER_SIZES, *_SIZES)}

    def families(self, views: Sequence[EngineView]) -> Iterator[Metric]:
        """As of `Naming`."""
        labelled = [(self._labels(view, len(views) > 1), view) for view in views]
        rows = [*_ROWS]
        if any(view.engine.loop.scheduler.config.speculation is not None for view in views):
            rows += _DRAFT_ROWS
        for row in rows:
            yield family(row.kind, row.name, row.text, [(labels, row.read(view)) for labels, view in labelled])
        for size in _SCHEDULER_SIZES:
            samples = [(labels, view.counts.of[size.key]) for labels, view in labelled]
            yield histogram_family(size.name, size.text, samples)
        for total in _SUMS:
            number = sum(total.read(view.counts) for view in views)
            yield family(_COUNTER, total.name, total.text, [(self._server, number)])
        for size in _SIZES:
            both = reduce(Histogram.plus, [view.counts.of[size.key] for view in views])
            yield histogram_family(size.name, size.text, [(self._server, both)])

    def _labels(self, view: EngineView, has_others: bool) -> LabelSet:
        labels = self._server.plus("engine_type", view.pool.spec.role)
        for rank in ("tp_rank", "pp_rank", "moe_ep_rank"):
            labels = labels.plus(rank, "0")
        return labels.plus("dp_rank", str(view.number)) if has_others else labels
