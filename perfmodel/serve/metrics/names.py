"""Metrics under the names, types, labels and buckets of vLLM's and of SGLang's server, and the emulator's own.

vLLM: `PrometheusStatLogger` and `SpecDecodingProm` of vLLM 0.27 to 0.30, and the page "Production Metrics" of its
documentation (0.32); `num_requests_waiting_by_reason` is there since 0.20. Names that were removed are of V0 and of V1
up to 0.10. As there, a prompt counts when its first token comes, with its cached tokens, and a step whose batch samples
no token is no iteration.

SGLang: the collector of SGLang 0.5's runtime (`srt/metrics`; what its server counts before `is_streaming` became a
label). What its schedulers report has labels of the engine; what its tokenizer manager reports, which stands before all
data-parallel ranks, has the model's name only, and counts a request when it is done.

The emulator's own are of its clock, how late it is, and what became of requests. Their seconds are those of the wall,
unless a name says otherwise."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import product

from prometheus_client import Metric

from perfmodel.serve.emulator import Emulator
from perfmodel.serve.metrics.counts import EngineView, Histogram, LabelSet, Row, SizeRow, family, one_two_five
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
_gauge, _counter = partial(Row, "gauge"), partial(Row, "counter")


def _hit_rate(view: EngineView) -> float:
    return view.num_hit / max(view.num_asked, 1)


def _tier_usage(view: EngineView) -> float:
    host = view.blocks.host
    return 0.0 if host is None or not host.capacity else host.num_used / host.capacity


def _accepted_by_position(view: EngineView) -> dict[str, int]:
    speculation, accepted = view.scheduler.config.speculation, view.counts.accepted
    depth = 0 if speculation is None else speculation.depth
    return {str(at): sum(times for right, times in accepted.items() if right > at) for at in range(depth)}


def _prompt_tokens_by_source(view: EngineView) -> dict[str, int]:
    counts = view.counts
    elsewhere = {"local_cache_hit": counts.num_cached, "external_kv_transfer": counts.num_transferred}
    return {"local_compute": counts.prompt_tokens - sum(elsewhere.values()), **elsewhere}


_WAITING = "Requests that wait: for capacity (slots, token budget, KV blocks), or deferred (never)."
_PROMPTS = "Tokens of prompts whose first token has come, cached ones among them."
_TIER = "Tokens looked up in the second tier, as they were not on the device."
_NO_MFU = "0, as without vLLM's --enable-mfu-metrics."
_CACHED, _SOURCES = "Prompt tokens that were not computed here.", "Prompt tokens by where their KV is from."
_QUERIES, _HITS = "Tokens looked up in the prefix cache.", "Tokens found in the prefix cache."
_HIT_RATE, _USAGE = "Found of the tokens looked up in the prefix cache.", "KV cache in use; 1 is all of it."
_RIGHT, _BY_POSITION = "Drafted tokens that were right.", "Drafted tokens that were right, by their position."
_AWAKE = "Whether the engine is awake; it never sleeps."
_SLEEP_STATES = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
_REASONS = ("stop", "length", "abort", "error", "repetition")

_ROWS = (
    _gauge("vllm:num_requests_running", "Requests in execution batches.", lambda v: v.scheduler.num_running),
    _gauge("vllm:num_requests_waiting", "Requests that wait for the engine.", lambda v: v.scheduler.num_waiting),
    _gauge("vllm:kv_cache_usage_perc", _USAGE, lambda v: v.kv_usage),
    _counter("vllm:prefix_cache_queries", _QUERIES, lambda v: v.num_asked),
    _counter("vllm:prefix_cache_hits", _HITS, lambda v: v.num_hit),
    _counter("vllm:num_preemptions", "Preemptions.", lambda v: v.scheduler.num_preemptions),
    _counter("vllm:prompt_tokens", _PROMPTS, lambda v: v.counts.prompt_tokens),
    _counter("vllm:prompt_tokens_cached", _CACHED, lambda v: v.counts.num_cached + v.counts.num_transferred),
    _counter("vllm:external_prefix_cache_queries", _TIER, lambda v: v.num_asked - v.num_hit if v.blocks.host else 0),
    _counter("vllm:external_prefix_cache_hits", "Tokens restored from there.", lambda v: v.num_restored),
    _counter("vllm:mm_cache_queries", "Images looked up in their cache; never any.", lambda _: 0),
    _counter("vllm:mm_cache_hits", "Images found there; never any.", lambda _: 0),
    # To add up what all steps have cost takes tens of milliseconds, for which tokens would have to wait.
    _counter("vllm:estimated_flops_per_gpu", _NO_MFU, lambda _: 0),
    _counter("vllm:estimated_read_bytes_per_gpu", _NO_MFU, lambda _: 0),
    _counter("vllm:estimated_write_bytes_per_gpu", _NO_MFU, lambda _: 0),
    _counter("vllm:generation_tokens", "Generated tokens.", lambda v: v.counts.generation_tokens),
)
_DRAFT_ROWS = (
    _counter("vllm:spec_decode_num_drafts", "Drafts verified.", lambda v: v.counts.num_drafts),
    _counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens.", lambda v: v.counts.num_draft_tokens),
    _counter("vllm:spec_decode_num_accepted_tokens", _RIGHT, lambda v: v.counts.num_accepted_tokens),
    _counter("vllm:spec_decode_num_accepted_tokens_per_pos", _BY_POSITION, _accepted_by_position, "position"),
)
_SPLIT_ROWS = (
    _gauge(
        "vllm:num_requests_waiting_by_reason",
        _WAITING,
        lambda v: {"capacity": v.scheduler.num_waiting, "deferred": 0},
        "reason",
    ),
    _counter("vllm:prompt_tokens_by_source", _SOURCES, _prompt_tokens_by_source, "source"),
    _gauge("vllm:engine_sleep_state", _AWAKE, lambda _: _SLEEP_STATES, "sleep_state"),
    _counter(
        "vllm:request_success",
        "Requests by what ended them.",
        lambda v: {reason: v.counts.ended[reason] for reason in _REASONS},
        "finished_reason",
    ),
)
_LEGACY_ROWS = (
    _gauge("vllm:num_requests_swapped", "Requests whose KV was swapped out; never any.", lambda _: 0),
    _gauge("vllm:gpu_cache_usage_perc", _USAGE, lambda v: v.kv_usage),
    _gauge("vllm:cpu_cache_usage_perc", "Second tier in use; 1 is all of it.", _tier_usage),
    _gauge("vllm:gpu_prefix_cache_hit_rate", _HIT_RATE, _hit_rate),
    _counter("vllm:gpu_prefix_cache_queries", _QUERIES, lambda v: v.num_asked),
    _counter("vllm:gpu_prefix_cache_hits", _HITS, lambda v: v.num_hit),
)
_TPOT_TEXT = "Of an answer per token but the first" + _SECONDS
_SIZES = (
    SizeRow("vllm:time_to_first_token_seconds", "Until the first token" + _SECONDS, "ttft", _TTFT),
    SizeRow("vllm:inter_token_latency_seconds", "Between tokens" + _SECONDS, "itl", _PER_TOKEN),
    SizeRow("vllm:request_time_per_output_token_seconds", _TPOT_TEXT, "tpot", _PER_TOKEN),
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


class VllmNames:
    """The names of today's vLLM, all with the labels `model_name` and `engine`.

    model_name: as served
    legacy:     with those that it had before and that autoscalers still read
    loras:      names of the adapters that are served
    adapters:   those that run now and those that wait, for `vllm:lora_requests_info`"""

    splits_gaps = False  # as of `EngineCounts`

    def __init__(
        self,
        model_name: str,
        legacy: bool,
        loras: Sequence[str],
        adapters: Callable[[], tuple[Sequence[str], Sequence[str]]],
    ) -> None:
        self._server = LabelSet(model_name=model_name)
        self._loras, self._adapters = tuple(loras), adapters
        self._rows = _ROWS + _LEGACY_ROWS if legacy else _ROWS
        self._sizes = _SIZES + _LEGACY_SIZES if legacy else _SIZES

    def bounds(self, max_model_len: int) -> Mapping[str, Sequence[float]]:
        """Buckets of `HISTOGRAMS`, where sequences have at most so many tokens."""
        return {row.key: one_two_five(max_model_len) if row.bounds is None else row.bounds for row in self._sizes}

    def families(self, views: Sequence[EngineView]) -> Iterator[Metric]:
        """All metrics of these engines."""
        labelled = [(self._server.plus("engine", str(view.number)), view) for view in views]
        for row in (*self._rows, *(_DRAFT_ROWS if _has_drafts(views) else ()), *_SPLIT_ROWS):
            yield row.family(labelled)
        # What vLLM's parser of tool calls counts: here no answer is parsed, as calls are known beforehand.
        modes, outcomes = ("streaming", "non_streaming"), ("tool_call", "no_tool_call")
        calls = [
            (self._server.plus("mode", mode).plus("outcome", outcome).plus("request_type", kind), 0)
            for mode, outcome, kind in product(modes, outcomes, ("chat_completions", "responses", "other"))
        ]
        yield family("counter", "vllm:tool_call_parser_invocations", "Answers parsed for calls; never any.", calls)
        configs = [(_cache_config(view), 1) for view in views]
        yield family("gauge", "vllm:cache_config_info", "How the KV cache is configured.", configs)
        if self._loras:
            running, waiting = map(",".join, self._adapters())
            names = {"waiting_lora_adapters": waiting, "running_lora_adapters": running}
            text = "Adapters of requests that run and wait; the value is the Unix time."
            labels = LabelSet(max_lora=str(len(self._loras)), **names)
            yield family("gauge", "vllm:lora_requests_info", text, [(labels, time.time())])
        for size in self._sizes:
            yield size.family(labelled)


def _has_drafts(views: Sequence[EngineView]) -> bool:
    return any(view.scheduler.config.speculation is not None for view in views)


def _cache_config(view: EngineView) -> LabelSet:
    blocks, engine = view.blocks, view.pool.scenario.engine
    return LabelSet(
        block_size=str(blocks.block_size),
        cache_dtype=engine.kv_cache_dtype,
        enable_prefix_caching=str(blocks.enable_prefix_caching),
        engine=str(view.number),
        gpu_memory_utilization=str(engine.gpu_memory_utilization),
        num_cpu_blocks="None" if blocks.host is None else str(blocks.host.capacity),
        num_gpu_blocks=str(blocks.num_blocks),
    )


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

_THROUGHPUT = "Tokens generated per simulated second, over the newest 40 steps that decoded."
_ACCEPT_LENGTH = "Tokens per verified draft, the one that comes in any case among them."

_SGLANG_ROWS = (
    _gauge("sglang:num_running_reqs", "Requests that run.", lambda v: v.scheduler.num_running),
    _gauge("sglang:num_queue_reqs", "Requests that wait.", lambda v: v.scheduler.num_waiting),
    _gauge(
        "sglang:num_used_tokens",
        "Tokens that the KV blocks in use hold.",
        lambda v: v.blocks.num_used * v.blocks.block_size,
    ),
    _gauge("sglang:token_usage", _USAGE, lambda v: v.kv_usage),
    _gauge(
        "sglang:max_total_num_tokens",
        "Tokens that the KV cache holds.",
        lambda v: v.blocks.num_blocks * v.blocks.block_size,
    ),
    _gauge(
        "sglang:decode_sum_seq_lens",
        "Tokens in the KV of all sequences that decode.",
        lambda v: v.counts.decode_context if v.scheduler.num_running else 0,
    ),
    _gauge("sglang:gen_throughput", _THROUGHPUT, lambda v: v.counts.throughput if v.scheduler.num_running else 0),
    _gauge("sglang:cache_hit_rate", _HIT_RATE, _hit_rate),
    _counter("sglang:num_retracted_requests", "Requests that were preempted.", lambda v: v.scheduler.num_preemptions),
)
_SGLANG_DRAFT_ROWS = (
    _gauge(
        "sglang:spec_accept_length",
        _ACCEPT_LENGTH,
        lambda v: 1 + v.counts.num_accepted_tokens / max(v.counts.num_drafts, 1),
    ),
    _gauge(
        "sglang:spec_accept_rate", _RIGHT, lambda v: v.counts.num_accepted_tokens / max(v.counts.num_draft_tokens, 1)
    ),
)
# Of the tokenizer manager: sums over all engines.
_SUMS = (
    _counter("sglang:prompt_tokens", "Prompt tokens of requests that are done.", lambda v: v.counts.done_prompt_tokens),
    _counter("sglang:generation_tokens", "Tokens of answers that are done.", lambda v: v.counts.done_generation_tokens),
    _counter(
        "sglang:cached_tokens", "Cached prompt tokens of requests that are done.", lambda v: v.counts.done_cached_tokens
    ),
    _counter(
        "sglang:num_requests", "Requests that are done.", lambda v: v.counts.ended["stop"] + v.counts.ended["length"]
    ),
    _counter("sglang:num_aborted_requests", "Requests whose client has gone.", lambda v: v.counts.ended["abort"]),
)
_SGLANG_QUEUE = SizeRow("sglang:queue_time_seconds", "From arrival until scheduled" + _SECONDS, "queue", _QUEUE)
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
        """Buckets of `HISTOGRAMS`, whatever is the longest sequence."""
        return {row.key: row.bounds or () for row in (_SGLANG_QUEUE, *_SGLANG_SIZES)}

    def families(self, views: Sequence[EngineView]) -> Iterator[Metric]:
        """All metrics of these engines."""
        labelled = [(self._labels(view, len(views) > 1), view) for view in views]
        for row in (*_SGLANG_ROWS, *(_SGLANG_DRAFT_ROWS if _has_drafts(views) else ()), _SGLANG_QUEUE):
            yield row.family(labelled)
        for total in _SUMS:
            yield family("counter", total.name, total.text, [(self._server, sum(map(total.read, views)))])
        for size in _SGLANG_SIZES:
            both = reduce(Histogram.plus, [view.counts.of[size.key] for view in views])
            yield family("histogram", size.name, size.text, [(self._server, both)])

    def _labels(self, view: EngineView, has_others: bool) -> LabelSet:
        labels = self._server.plus("engine_type", view.pool.spec.role)
        for rank in ("tp_rank", "pp_rank", "moe_ep_rank"):
            labels = labels.plus(rank, "0")
        return labels.plus("dp_rank", str(view.number)) if has_others else labels


_NONE = LabelSet()
LATE_BOUNDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25)
_SLOWED = "Seconds by which the clock was slowed, as the machine could not keep up."
_STALLED = "Connections that were cut off, as their clients read nothing of an answer for long."


def own_families(emulator: Emulator, lateness: Histogram, num_stalled: int) -> Iterator[Metric]:
    """The emulator's own.

    lateness: of events of the clock of `emulator`, in seconds
    num_stalled: clients that were cut off as they did not read"""
    fates = ("finished", "failed", "timed_out", "aborted")
    ended = [(_NONE.plus("fate", fate), getattr(emulator, f"num_{fate}")) for fate in fates]
    version = [(_NONE.plus("version", __version__), 1)]
    clock = emulator.clock
    for kind, name, text, values in (
        ("gauge", "build_info", "The version of perfmodel.", version),
        ("gauge", "speed_ratio", "Simulated seconds per second that were asked for (--speed).", clock.speed),
        ("counter", "simulated_seconds", "Simulated seconds since the start.", clock.elapsed_s),
        ("counter", "clock_slowed_seconds", _SLOWED, clock.slowed_s),
        ("histogram", "step_lateness_seconds", "Seconds by which ends of steps and other events came late.", lateness),
        ("counter", "requests_sent", "Requests that clients sent.", emulator.num_sent),
        ("counter", "requests_ended", "Requests by what became of them.", ended),
        ("gauge", "requests_under_way", "Requests that clients wait for.", emulator.num_under_way),
        ("counter", "connections_stalled", _STALLED, num_stalled),
    ):
        yield family(kind, f"perfmodel_{name}", text, values if isinstance(values, list) else [(_NONE, values)])
