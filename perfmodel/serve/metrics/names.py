"""Metrics under the names, types, labels and buckets of vLLM's and of SGLang's server, and the emulator's own.

vLLM: `PrometheusStatLogger` and `SpecDecodingProm` of vLLM 0.27 to 0.30, and the page "Production Metrics" of its
documentation (0.32); `num_requests_waiting_by_reason` is there since 0.20. Names that were removed are of V0 and of V1
up to 0.10. As there, a prompt counts when its first token comes, with its cached tokens, and a step whose batch samples
no token is no iteration.

SGLang: the collector of SGLang 0.5's runtime (`srt/metrics`; what its server counts before `is_streaming` became a
label). What its schedulers report has labels of the engine; what its tokenizer manager reports, which stands before all
data-parallel ranks, has the model's name only, and counts a request when it is done.

The emulator's own are of its clock, how late it is, and what became of requests. Their seconds are those of the wall,
unless a name says otherwise.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import product
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from perfmodel.serve.emulator import Emulator
from perfmodel.serve.metrics.counts import (
    EngineCounts,
    EngineView,
    Histogram,
    LabelSet,
    Row,
    SizeRow,
    family,
    histogram_family,
    one_two_five,
)
from perfmodel.version import __version__

_LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_PER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SECONDS = ", in simulated seconds."
_GAUGE, _COUNTER = GaugeMetricFamily, CounterMetricFamily

_ROWS = (
    Row(_GAUGE, "vllm:num_requests_running", "Requests in execution batches.", lambda v: v.num_running),
    Row(_GAUGE, "vllm:num_requests_waiting", "Requests that wait for the engine.", lambda v: v.num_waiting),
    Row(_GAUGE, "vllm:kv_cache_usage_perc", "KV cache in use; 1 is all of it.", lambda v: v.kv_usage),
    Row(_COUNTER, "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", lambda v: v.num_asked),
    Row(_COUNTER, "vllm:prefix_cache_hits", "Tokens found in the prefix cache.", lambda v: v.num_hit),
    Row(_COUNTER, "vllm:num_preemptions", "Preemptions.", lambda v: v.num_preemptions),
    Row(
        _COUNTER,
        "vllm:prompt_tokens",
        "Tokens of prompts whose first token has come, cached ones among them.",
        lambda v: v.counts.prompt_tokens,
    ),
    Row(
        _COUNTER,
        "vllm:prompt_tokens_cached",
        "Prompt tokens that were not computed here.",
        lambda v: v.counts.num_cached + v.counts.num_transferred,
    ),
    Row(
        _COUNTER,
        "vllm:external_prefix_cache_queries",
        "Tokens looked up in the second tier, as they were not on the device.",
        lambda v: 0 if v.engine.loop.scheduler.blocks.host is None else v.num_asked - v.num_hit,
    ),
    Row(_COUNTER, "vllm:external_prefix_cache_hits", "Tokens restored from there.", lambda v: v.num_restored),
    Row(_COUNTER, "vllm:mm_cache_queries", "Images looked up in their cache; never any.", lambda _: 0),
    Row(_COUNTER, "vllm:mm_cache_hits", "Images found there; never any.", lambda _: 0),
    # To add up what all steps have cost takes tens of milliseconds, for which tokens would have to wait.
    Row(_COUNTER, "vllm:estimated_flops_per_gpu", "0, as without vLLM's --enable-mfu-metrics.", lambda _: 0),
    Row(_COUNTER, "vllm:estimated_read_bytes_per_gpu", "0, as without vLLM's --enable-mfu-metrics.", lambda _: 0),
    Row(_COUNTER, "vllm:estimated_write_bytes_per_gpu", "0, as without vLLM's --enable-mfu-metrics.", lambda _: 0),
    Row(_COUNTER, "vllm:generation_tokens", "Generated tokens.", lambda v: v.counts.generation_tokens),
)
_DRAFT_ROWS = (
    Row(_COUNTER, "vllm:spec_decode_num_drafts", "Drafts verified.", lambda v: v.counts.num_drafts),
    Row(_COUNTER, "vllm:spec_decode_num_draft_tokens", "Drafted tokens.", lambda v: v.counts.num_draft_tokens),
    Row(
        _COUNTER,
        "vllm:spec_decode_num_accepted_tokens",
        "Drafted tokens that were right.",
        lambda v: v.counts.num_accepted_tokens,
    ),
    Row(
        _COUNTER,
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Drafted tokens that were right, by their position.",
        lambda v: _accepted_by_position(v),
        "position",
    ),
)
_REASONS = ("stop", "length", "abort", "error", "repetition")
_SPLIT_ROWS = (
    Row(
        _GAUGE,
        "vllm:num_requests_waiting_by_reason",
        "Requests that wait: for capacity (slots, token budget, KV blocks), or deferred (never).",
        lambda v: {"capacity": v.num_waiting, "deferred": 0},
        "reason",
    ),
    Row(
        _COUNTER,
        "vllm:prompt_tokens_by_source",
        "Prompt tokens by where their KV is from.",
        lambda v: {
            "local_compute": v.counts.prompt_tokens - v.counts.num_cached - v.counts.num_transferred,
            "local_cache_hit": v.counts.num_cached,
            "external_kv_transfer": v.counts.num_transferred,
        },
        "source",
    ),
    Row(
        _GAUGE,
        "vllm:engine_sleep_state",
        "Whether the engine is awake; it never sleeps.",
        lambda _: {"awake": 1, "weights_offloaded": 0, "discard_all": 0},
        "sleep_state",
    ),
    Row(
        _COUNTER,
        "vllm:request_success",
        "Requests by what ended them.",
        lambda v: {reason: v.counts.ended[reason] for reason in _REASONS},
        "finished_reason",
    ),
)
_LEGACY_ROWS = (
    Row(_GAUGE, "vllm:num_requests_swapped", "Requests whose KV was swapped out; never any.", lambda _: 0),
    Row(_GAUGE, "vllm:gpu_cache_usage_perc", "KV cache in use; 1 is all of it.", lambda v: v.kv_usage),
    Row(_GAUGE, "vllm:cpu_cache_usage_perc", "Second tier in use; 1 is all of it.", lambda v: _tier_usage(v)),
    Row(
        _GAUGE,
        "vllm:gpu_prefix_cache_hit_rate",
        "Found of the tokens looked up in the prefix cache.",
        lambda v: v.num_hit / max(v.num_asked, 1),
    ),
    Row(_COUNTER, "vllm:gpu_prefix_cache_queries", "Tokens looked up in the prefix cache.", lambda v: v.num_asked),
    Row(_COUNTER, "vllm:gpu_prefix_cache_hits", "Tokens found in the prefix cache.", lambda v: v.num_hit),
)

_SIZES = (
    SizeRow("vllm:time_to_first_token_seconds", "Until the first token" + _SECONDS, "ttft", _TTFT),
    SizeRow("vllm:inter_token_latency_seconds", "Between tokens" + _SECONDS, "itl", _PER_TOKEN),
    SizeRow(
        "vllm:request_time_per_output_token_seconds",
        "Of an answer per token but the first" + _SECONDS,
        "tpot",
        _PER_TOKEN,
    ),
    SizeRow("vllm:e2e_request_latency_seconds", "From arrival to the last token" + _SECONDS, "e2e", _LATENCY),
    SizeRow("vllm:request_queue_time_seconds", "From arrival until scheduled" + _SECONDS, "queue", _LATENCY),
    SizeRow("vllm:request_inference_time_seconds", "From scheduled to the end" + _SECONDS, "inference", _LATENCY),
    SizeRow("vllm:request_prefill_time_seconds", "From scheduled to the first token" + _SECONDS, "prefill", _LATENCY),
    SizeRow("vllm:request_decode_time_seconds", "From the first token to the last" + _SECONDS, "decode", _LATENCY),
    SizeRow("vllm:request_prompt_tokens", "Tokens of prompts.", "prompt", None),
    SizeRow("vllm:request_generation_tokens", "Tokens of answers.", "generation", None),
    SizeRow("vllm:request_max_num_generation_tokens", "Tokens of answers, the longest of n.", "generation", None),
    SizeRow("vllm:request_prefill_kv_computed_tokens", "Tokens of prompts without cached ones.", "computed", None),
    SizeRow("vllm:request_params_max_tokens", "Parameter max_tokens.", "max_tokens", None),
    SizeRow("vllm:request_params_n", "Parameter n.", "n", (1, 2, 5, 10, 20)),
    SizeRow("vllm:request_num_preemptions", "Preemptions of requests.", "preemptions", (1, 2, 3, 4, 5, 10, 20)),
    SizeRow("vllm:iteration_tokens_total", "Tokens of a step.", "iteration", _ITERATION),
)
_LEGACY_SIZES = (SizeRow("vllm:time_per_output_token_seconds", "Between tokens" + _SECONDS, "itl", _PER_TOKEN),)

_REQUEST_TYPES = ("chat_completions", "responses", "other")


class VllmNames:
    """The names of today's vLLM, all with the labels `model_name` and `engine`.

    model_name: as served
    legacy:     with those that it had before and that autoscalers still read
    loras:      names of the adapters that are served
    adapters:   those that run now and those that wait, for `vllm:lora_requests_info`
    now:        the Unix time in seconds
    """

    splits_gaps = False

    def __init__(
        self,
        model_name: str,
        legacy: bool = False,
        loras: Sequence[str] = (),
        adapters: Callable[[], tuple[Sequence[str], Sequence[str]]] = lambda: ((), ()),
        now: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._server = LabelSet(model_name=model_name)
        self._loras, self._adapters, self._now = tuple(loras), adapters, now
        self._rows = _ROWS + _LEGACY_ROWS if legacy else _ROWS
        self._sizes = _SIZES + _LEGACY_SIZES if legacy else _SIZES

    def bounds(self, max_model_len: int) -> Mapping[str, Sequence[float]]:
        """As of `Naming`."""
        return {row.key: one_two_five(max_model_len) if row.bounds is None else row.bounds for row in self._sizes}

    def families(self, views: Sequence[EngineView]) -> Iterator[Metric]:
        """As of `Naming`."""
        labelled = [(self._labels(view), view) for view in views]
        for row in (*self._rows, *(_DRAFT_ROWS if _has_drafts(views) else ()), *_SPLIT_ROWS):
            yield row.family(labelled)
        yield self._tool_calls()
        yield _cache_config(labelled)
        if self._loras:
            yield self._lora_info()
        for size in self._sizes:
            samples = [(labels, view.counts.of[size.key]) for labels, view in labelled]
            yield histogram_family(size.name, size.text, samples)

    def _labels(self, view: EngineView) -> LabelSet:
        return self._server.plus("engine", str(view.number))

    def _tool_calls(self) -> Metric:
        """What vLLM's parser of tool calls counts: here no answer is parsed, as calls are known beforehand."""
        kinds = product(("streaming", "non_streaming"), ("tool_call", "no_tool_call"), _REQUEST_TYPES)
        samples = [
            (self._server.plus("mode", mode).plus("outcome", outcome).plus("request_type", kind), 0)
            for mode, outcome, kind in kinds
        ]
        return family(_COUNTER, "vllm:tool_call_parser_invocations", "Answers parsed for calls; never any.", samples)

    def _lora_info(self) -> Metric:
        running, waiting = self._adapters()
        labels = LabelSet(
            max_lora=str(len(self._loras)),
            waiting_lora_adapters=",".join(waiting),
            running_lora_adapters=",".join(running),
        )
        text = "Adapters of requests that run and wait; the value is the Unix time."
        return family(_GAUGE, "vllm:lora_requests_info", text, [(labels, self._now())])


_Labelled = Sequence[tuple[LabelSet, EngineView]]


def _tier_usage(view: EngineView) -> float:
    host = view.engine.loop.scheduler.blocks.host
    return 0.0 if host is None or not host.capacity else host.num_used / host.capacity


def _accepted_by_position(view: EngineView) -> dict[str, int]:
    speculation, accepted = view.engine.loop.scheduler.config.speculation, view.counts.accepted
    depth = 0 if speculation is None else speculation.depth
    return {str(at): sum(times for right, times in accepted.items() if right > at) for at in range(depth)}


def _has_drafts(views: Sequence[EngineView]) -> bool:
    return any(view.engine.loop.scheduler.config.speculation is not None for view in views)


def _cache_config(labelled: _Labelled) -> Metric:
    samples = []
    for labels, view in labelled:
        blocks, engine = view.engine.loop.scheduler.blocks, view.pool.scenario.engine
        info = LabelSet(
            block_size=str(blocks.block_size),
            cache_dtype=engine.kv_cache_dtype,
            enable_prefix_caching=str(blocks.enable_prefix_caching),
            engine=labels["engine"],
            gpu_memory_utilization=str(engine.gpu_memory_utilization),
            num_cpu_blocks="None" if blocks.host is None else str(blocks.host.capacity),
            num_gpu_blocks=str(blocks.num_blocks),
        )
        samples.append((info, 1))
    return family(_GAUGE, "vllm:cache_config_info", "How the KV cache is configured.", samples)


_SGLANG_TTFT = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_E2E = (*_SGLANG_TTFT, 600, 1200, 1800, 2400)
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

_SGLANG_ROWS = (
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
        _GAUGE, "sglang:max_total_num_tokens", "Tokens that the KV cache holds.", lambda v: v.num_blocks * v.block_size
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
_SGLANG_DRAFT_ROWS = (
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
_SGLANG_SIZES = (
    SizeRow("sglang:time_to_first_token_seconds", "Until the first token" + _SECONDS, "ttft", _SGLANG_TTFT),
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
        return {row.key: row.bounds or () for row in (*_SCHEDULER_SIZES, *_SGLANG_SIZES)}

    def families(self, views: Sequence[EngineView]) -> Iterator[Metric]:
        """As of `Naming`."""
        labelled = [(self._labels(view, len(views) > 1), view) for view in views]
        for row in (*_SGLANG_ROWS, *(_SGLANG_DRAFT_ROWS if _has_drafts(views) else ())):
            yield row.family(labelled)
        for size in _SCHEDULER_SIZES:
            samples = [(labels, view.counts.of[size.key]) for labels, view in labelled]
            yield histogram_family(size.name, size.text, samples)
        for total in _SUMS:
            number = sum(total.read(view.counts) for view in views)
            yield family(_COUNTER, total.name, total.text, [(self._server, number)])
        for size in _SGLANG_SIZES:
            both = reduce(Histogram.plus, [view.counts.of[size.key] for view in views])
            yield histogram_family(size.name, size.text, [(self._server, both)])

    def _labels(self, view: EngineView, has_others: bool) -> LabelSet:
        labels = self._server.plus("engine_type", view.pool.spec.role)
        for rank in ("tp_rank", "pp_rank", "moe_ep_rank"):
            labels = labels.plus(rank, "0")
        return labels.plus("dp_rank", str(view.number)) if has_others else labels


_NONE = LabelSet()
LATE_BOUNDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25)


def own_families(emulator: Emulator, lateness: Histogram, slowed_s: float, num_stalled: int) -> Iterator[Metric]:
    """All of them.

    emulator: whose they are
    lateness: of events of the clock, in seconds; slowed_s: seconds by which it was slowed
    num_stalled: clients that were cut off as they did not read
    """
    gauge, counter = GaugeMetricFamily, CounterMetricFamily
    yield family(gauge, "perfmodel_build_info", "The version of perfmodel.", [(_NONE.plus("version", __version__), 1)])
    text = "Simulated seconds per second that were asked for (--speed)."
    yield family(gauge, "perfmodel_speed_ratio", text, [(_NONE, emulator.clock.speed)])
    text = "Simulated seconds since the start."
    yield family(counter, "perfmodel_simulated_seconds", text, [(_NONE, emulator.clock.elapsed_s)])
    text = "Seconds by which the clock was slowed, as the machine could not keep up."
    yield family(counter, "perfmodel_clock_slowed_seconds", text, [(_NONE, slowed_s)])
    text = "Seconds by which ends of steps and other events came late."
    yield histogram_family("perfmodel_step_lateness_seconds", text, [(_NONE, lateness)])
    yield family(counter, "perfmodel_requests_sent", "Requests that clients sent.", [(_NONE, emulator.num_sent)])
    ended = {
        "finished": emulator.num_finished,
        "failed": emulator.num_failed,
        "timed_out": emulator.num_timed_out,
        "aborted": emulator.num_aborted,
    }
    samples = [(_NONE.plus("fate", fate), number) for fate, number in ended.items()]
    yield family(counter, "perfmodel_requests_ended", "Requests by what became of them.", samples)
    text = "Requests that clients wait for."
    yield family(gauge, "perfmodel_requests_under_way", text, [(_NONE, emulator.num_under_way)])
    text = "Connections that were cut off, as their clients read nothing of an answer for long."
    yield family(counter, "perfmodel_connections_stalled", text, [(_NONE, num_stalled)])
