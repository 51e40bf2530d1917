"""A scenario in short labelled facts, and in a line; how near an answer is to what was measured."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from perfmodel.cost.kernel_models.device import tdp_w
from perfmodel.report.document import Block, Details, Fact, Facts, Line, Notes, Paragraph, Span, Table, Tone
from perfmodel.report.numbers import format_si
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.traffic import Arrivals, Lengths, Traffic
from perfmodel.trust import Level, MeasuredCell, Trust, nearest_rows

Pairs = list[tuple[str, str]]


def headline(scenario: Scenario) -> str:
    """`llama-3.1-8b on 1 x a100-sxm-80gb`."""
    devices = scenario.num_devices
    return f"{scenario.model.name} on {devices} x {scenario.hardware.name}"


def headline_with_slo(scenario: Scenario) -> str:
    """`llama-3.1-8b on 1 x a100-sxm-80gb; SLO: 90% of requests with TTFT <= 500 ms`."""
    slo = scenario.slo.in_words(scenario.attainment)
    return f"{headline(scenario)}; SLO: {slo}" if slo else headline(scenario)


def hardware_source(scenario: Scenario) -> str:
    """Where the facts of the device come from, and which of them no vendor's document confirms."""
    declared = scenario.hardware.declared
    text = f"Hardware facts of {scenario.hardware.name}: {declared.source}."
    if declared.unconfirmed:
        text += f" Not confirmed in a vendor's document: {', '.join(declared.unconfirmed)}."
    return text


def scenario_facts(scenario: Scenario, title: str = "Scenario") -> Facts:
    """What is served, on what, by which engine, under which load."""
    groups = {
        "Model": _model_facts(scenario),
        "Hardware": _hardware_facts(scenario),
        "Engine": _engine_facts(scenario),
        "Traffic": _traffic_facts(scenario),
    }
    return Facts(title, [(name, [Fact(*pair) for pair in pairs]) for name, pairs in groups.items()])


def _model_facts(scenario: Scenario) -> Pairs:
    model = scenario.model
    layers = f"{model.num_layers} x {model.hidden_size:,} wide"
    dtype = model.dtype if scenario.engine.dtype == "auto" else scenario.engine.dtype
    facts = [("name", model.name), ("layers", layers), ("vocabulary", f"{model.vocab_size:,}"), ("dtype", dtype)]
    if model.published_params:
        facts.insert(1, ("parameters", format_si(model.published_params, "").replace("G", "B")))
    if model.quantization.weights:
        facts.append(("quantization", f"{model.quantization.method} {model.quantization.weights}"))
    return facts


def _hardware_facts(scenario: Scenario) -> Pairs:
    hardware = scenario.hardware
    peaks = hardware.declared.peak_flops_per_s
    rate = next((name for name in ("bf16", "fp16", "fp32", "int8") if name in peaks), next(iter(peaks), None))
    engine = scenario.engine
    sizes = {"TP": engine.tensor_parallel_size, "PP": engine.pipeline_parallel_size, "DP": engine.data_parallel_size}
    sizes["PCP"] = engine.prefill_context_parallel_size
    sizes["FFN"] = engine.afd_config.num_ffn_devices if engine.afd_config is not None else 0
    sizes["replicas"] = scenario.cluster.replicas
    parallelism = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one device"
    memory = f"{format_si(hardware.memory_bytes, 'B')} at {format_si(hardware.memory_bandwidth, 'B/s')}"
    devices = f"{scenario.num_devices} ({parallelism})"
    facts = [("device", hardware.name), ("devices", devices), ("memory", memory)]
    if rate:
        facts.append(("peak", f"{format_si(peaks[rate], 'FLOP/s')} {rate}"))
    if scenario.num_nodes > 1:
        link, most = hardware.network_link, hardware.devices_per_node
        rate = format_si(link.bandwidth_bytes_per_s, "B/s")
        facts.append(("network", f"{link.name}, {rate} a device, between nodes of {most}"))
    if hardware.power_cap_w is not None:
        facts.append(("power cap", f"{hardware.power_cap_w:g} W of {tdp_w(hardware):g} W a device"))
    return facts


def _engine_facts(scenario: Scenario) -> Pairs:
    engine = scenario.engine
    options = {
        "chunked prefill": engine.enable_chunked_prefill,
        "prefix caching": engine.enable_prefix_caching,
        "async scheduling": engine.async_scheduling,
        "expert parallel": engine.enable_expert_parallel,
        "eager": engine.enforce_eager,
    }
    return [
        ("batching", f"{engine.batching}, {engine.scheduling_policy}"),
        ("batch", f"up to {engine.max_num_seqs:,} sequences, {engine.max_num_batched_tokens:,} tokens a step"),
        ("with", ", ".join([label for label, is_on in options.items() if is_on]) or "nothing optional"),
        ("profile", engine.profile),
    ]


def _traffic_facts(scenario: Scenario) -> Pairs:
    traffic, slo = scenario.traffic, scenario.slo
    facts = [("arrivals", describe_traffic(traffic))]
    if traffic.input_tokens:
        facts.append(("input tokens", _describe_lengths(traffic.input_tokens)))
    if traffic.output_tokens:
        facts.append(("output tokens", _describe_lengths(traffic.output_tokens)))
    if traffic.images:
        sizes = " or ".join(map(str, traffic.images.sizes))
        facts.append(("images", f"{traffic.images.per_request} a prompt, {sizes}"))
    if traffic.trace:
        facts.append(("trace", f"{traffic.trace.path} ({traffic.trace.format})"))
    facts.append(("SLO", slo.in_words(scenario.attainment) or "none"))
    facts.append(("seed", str(scenario.seed)))
    return facts


def describe_traffic(traffic: Traffic) -> str:
    """`poisson at 4 req/s, 1,000 requests`."""
    text = _describe_arrivals(traffic.arrivals)
    if traffic.num_requests:
        text += f", {traffic.num_requests:,} requests"
    if traffic.duration_s:
        text += f", {traffic.duration_s:g} s"
    if traffic.samples_per_prompt > 1:
        text += f", {traffic.samples_per_prompt} answers a prompt"
    if traffic.beam_width > 1:
        text += f", {traffic.beam_width} beams each"
    if traffic.rollouts is not None:
        text += f", {traffic.rollouts.iterations} iterations"
    return f"{text}, turns of conversations" if traffic.has_conversations else text


def _describe_arrivals(arrivals: Arrivals) -> str:
    if arrivals.process == "closed_loop":
        return f"closed loop of {arrivals.concurrency:,}"
    text = arrivals.process.replace("_", " ")
    if arrivals.process == "burst":
        return "all at once" + ("" if arrivals.order == "given" else f", {arrivals.order.replace('_', ' ')}")
    if arrivals.stages:
        return f"{text} in {len(arrivals.stages)} stages"
    if arrivals.rate:
        text += f" at {arrivals.rate:g} req/s"
    if arrivals.process == "gamma":
        text += f" (cv {arrivals.cv:g})"
    return text


def _describe_lengths(lengths: Lengths) -> str:
    """`lognormal, mean 1155, p99 4142`."""
    if lengths.distribution == "empirical":
        return f"empirical, {lengths.path or f'{len(lengths.values or ()):,} values'}"
    if lengths.distribution == "fixed":
        return f"{lengths.value:,} each"
    names = ("low", "high", "mean", "p99", "std")
    given = [f"{name} {value:g}" for name in names if (value := getattr(lengths, name)) is not None]
    return ", ".join([lengths.distribution, *given])


_TONES: dict[Level, Tone] = {"validated": "good", "calibrated": "strong", "transferred": "warn", "datasheet": "bad"}


def trust_line(trust: Trust | None, of: str = "") -> Iterator[Block]:
    """The badge and its reason; nothing for None. of: the quantity trusted, where a result has several"""
    if trust is not None:
        yield Paragraph((f"Trust{of}: ", Span(trust.level, _TONES[trust.level]), str(trust).removeprefix(trust.level)))


def trust_blocks(trust: Trust | None) -> Iterator[Block]:
    """`trust_line`, and on pages the nearest measured cells and rows."""
    yield from trust_line(trust)
    if trust is not None:
        head = ("row", "metric", "predicted", "measured", "error")
        yield Details([_cells(trust.nearest), Table(head, _Rows(trust), "Single rows near this setup", left=2)])


class _Rows(Sequence[Sequence[Line]]):
    """Single rows near a setup, read when a page asks for them: a terminal does not."""

    def __init__(self, trust: Trust) -> None:
        self._trust = trust

    @cached_property
    def _lines(self) -> list[Sequence[Line]]:
        return [
            (row.label, row.metric, f"{row.predicted:,.4g}", f"{row.measured:,.4g}", f"{row.error:+.1%}")
            for row in nearest_rows(self._trust)
        ]

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: Any) -> Any:
        return self._lines[index]


def _cells(cells: Sequence[MeasuredCell]) -> Table:
    rows = [
        (
            f"{cell.low.model} {cell.low.weights}",
            f"{cell.low.device}, {cell.low.engine} {cell.low.version}".rstrip(),
            _range(cell.low.input_tokens, cell.high.input_tokens),
            _range(cell.low.output_tokens, cell.high.output_tokens),
            _range(cell.low.concurrency, cell.high.concurrency),
            cell.metric,
            f"{cell.rows:,}",
            f"{cell.median_error:.1%}",
        )
        for cell in cells
    ]
    head = ("model", "measured on", "input tokens", "output tokens", "concurrency", "metric", "rows", "median error")
    note = "Errors are |predicted / measured - 1| of rows whose engines' few numbers may have been fitted to them."
    return Table(head, rows, "The nearest measurements", left=2, texts=(5,), note=note if rows else "")


def _range(low: float, high: float) -> str:
    return "-" if not high else f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"


_MAX_NOTES, _NOTE_WIDTH = 3, 190
MORE = "Everything else: --details, --json"


def few_notes(notes: Sequence[str]) -> Iterator[Block]:
    """The first notes, long ones up to their first lines, and how many there are beside."""
    shown = [note if len(note) <= _NOTE_WIDTH else f"{note[:_NOTE_WIDTH].rsplit(' ', 1)[0]} ..." for note in notes]
    if len(notes) > _MAX_NOTES:
        shown = [*shown[:_MAX_NOTES], f"{len(notes) - _MAX_NOTES} more with --details."]
    if shown:
        yield Notes(shown)
