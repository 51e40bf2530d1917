"""Metrics as vLLM's server has them: names, types, labels and buckets.

Source: `PrometheusStatLogger` and `SpecDecodingProm` of vLLM 0.27 to 0.30, and the page "Production Metrics" of its
documentation (0.32); `num_requests_waiting_by_reason` is there since 0.20. Names that were removed are
of V0 and of V1 up to 0.10. As there, a prompt counts when its first token comes, with its cached tokens, and a step
whose batch samples no token is no iteration.
"""

__all__ = ["VllmNames"]

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from perfmodel.serve.metrics.counts import EngineView
from perfmodel.serve.metrics.families import Row, SizeRow, family, histogram_family
from perfmodel.serve.metrics.histogram import one_two_five
from perfmodel.serve.metrics.page_text import LabelSet

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
_REASONS = ("stop", "length", "abort", "error", "repetition")


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
        rows = [*self._rows]
        has_drafts = [view.engine.loop.scheduler.config.speculation is not None for view in views]
        if any(has_drafts):
            rows += _DRAFT_ROWS
        for row in rows:
            yield family(row.kind, row.name, row.text, [(labels, row.read(view)) for labels, view in labelled])
        if any(has_drafts):
            yield _accepted_by_position(labelled)
        yield _by_reason(labelled)
        yield _by_source(labelled)
        yield _sleep_state(labelled)
        yield _ended(labelled)
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


def _accepted_by_position(labelled: _Labelled) -> Metric:
    samples = []
    for labels, view in labelled:
        speculation = view.engine.loop.scheduler.config.speculation
        for position in range(0 if speculation is None else speculation.depth):
            number = sum(times for right, times in view.counts.accepted.items() if right > position)
            samples.append((labels.plus("position", str(position)), number))
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    return family(_COUNTER, name, "Drafted tokens that were right, by their position.", samples)


def _by_reason(labelled: _Labelled) -> Metric:
    samples = [
        (labels.plus("reason", reason), view.num_waiting if reason == "capacity" else 0)
        for labels, view in labelled
        for reason in ("capacity", "deferred")
    ]
    text = "Requests that wait: for capacity (slots, token budget, KV blocks), or deferred (never)."
    return family(_GAUGE, "vllm:num_requests_waiting_by_reason", text, samples)


def _by_source(labelled: _Labelled) -> Metric:
    samples = []
    for labels, view in labelled:
        counts = view.counts
        by_source = {
            "local_compute": counts.prompt_tokens - counts.num_cached - counts.num_transferred,
            "local_cache_hit": counts.num_cached,
            "external_kv_transfer": counts.num_transferred,
        }
        samples += [(labels.plus("source", source), number) for source, number in by_source.items()]
    return family(_COUNTER, "vllm:prompt_tokens_by_source", "Prompt tokens by where their KV is from.", samples)


def _sleep_state(labelled: _Labelled) -> Metric:
    samples = [
        (labels.plus("sleep_state", state), state == "awake")
        for labels, _ in labelled
        for state in ("awake", "weights_offloaded", "discard_all")
    ]
    return family(_GAUGE, "vllm:engine_sleep_state", "Whether the engine is awake; it never sleeps.", samples)


def _ended(labelled: _Labelled) -> Metric:
    samples = [
        (labels.plus("finished_reason", reason), view.counts.ended[reason])
        for labels, view in labelled
        for reason in _REASONS
    ]
    return family(_COUNTER, "vllm:request_success", "Requests by what ended them.", samples)


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
