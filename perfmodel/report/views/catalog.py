"""What a device, a model or a scenario is, listed and one by one; two results compared; techniques."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from perfmodel.cost import peak_flops_per_s, ridge_point
from perfmodel.evidence.executed.technique import TechniqueStatus
from perfmodel.models.executed import why_not_executed
from perfmodel.models.params import count_parameters, weight_bytes
from perfmodel.models.spec import ModelSpec
from perfmodel.planning.comparison import Change, MetricChange, ResultComparison
from perfmodel.report.document import Block, Document, Heading, Line, Paragraph, Span, Table, Tone
from perfmodel.report.numbers import MISSING, format_metric, format_number, format_short, format_si
from perfmodel.report.views.step import ridge_points
from perfmodel.specs.devices import DeviceFamily
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.networks import NetworkFile

_NAMED = (".hardware.name", ".model.name")  # whose other facts are in a file
_TONES: dict[str, Tone] = {"better": "good", "worse": "bad", "": ""}


def comparison_view(result: ResultComparison) -> Document:
    """Inputs, versions, answers; or that nothing differs."""
    blocks: list[Block] = [
        _changes("Inputs", list(_folded(result.inputs)), result),
        _changes("Versions", result.versions, result),
        _answers(result),
        _changes("Other answers", result.texts, result),
    ]
    if result.is_same:
        blocks = [Paragraph("Nothing differs.")]
    return Document(f"{result.one} and {result.other}", blocks, f"Two results of kind {result.kind}")


def _folded(changes: Sequence[Change]) -> Iterator[Change]:
    """Without the facts of a device or a model that is another: its name says it."""
    others = {item.field.removesuffix(".name"): 0 for item in changes if item.field.endswith(_NAMED)}
    for change in changes:
        owner = next((name for name in others if change.field.startswith(f"{name}.")), "")
        if not owner or change.field == f"{owner}.name":
            yield change
        else:
            others[owner] += 1
    for owner, count in others.items():
        if count:
            yield Change(f"{owner}: {count} facts", "as in its file", "as in its file")


def _changes(title: str, changes: Sequence[Change], result: ResultComparison) -> Table:
    values = [[MISSING if value is None else str(value) for value in (change.one, change.other)] for change in changes]
    rows = [(change.field, *texts) for change, texts in zip(changes, values, strict=True)]
    return Table(("field", result.one, result.other), rows, title, left=3)


def _answers(result: ResultComparison) -> Table:
    has_places = any(answer.place for answer in result.answers)
    head = (*(["of"] * has_places), "metric", result.one, result.other, "difference", "relative", "")
    rows = [(*([answer.place] * has_places), *_cells(answer)) for answer in result.answers]
    return Table(head, rows, "Answers, best first", left=1 + has_places, texts=(len(head) - 1,))


def _cells(change: MetricChange) -> tuple[Line, ...]:
    metric = change.metric
    difference = format_short(change.difference * metric.scale)
    cells = metric.title, format_metric(metric, change.one), format_metric(metric, change.other)
    moved = difference if difference.startswith("-") else f"+{difference}"
    relative = MISSING if change.relative is None else f"{change.relative:+.1%}"
    return (*cells, moved, relative, Span(change.verdict, _TONES[change.verdict]))


_DEVICES = ("memory", "bandwidth", "bf16 peak", "FLOP/byte", "TDP W", "USD/h")
_KINDS = {"gpu": "GPUs", "cpu": "CPUs", "tpu": "TPUs", "npu": "other accelerators", "fpga": "FPGAs"}
_MODELS = ("model", "type", "parameters", "active", "layers", "hidden", "weights", "executed")
_TECHNIQUES = (
    *("technique", "simulated", "executed: composition of steps, simulated and executed speedup"),
    "validated: predicted / published",
)


def scenarios_view(scenarios: Sequence[Mapping[str, Any]], traffic: Sequence[Mapping[str, Any]]) -> Document:
    """A row for each scenario, and for each traffic file with its other names."""
    rows = [(scenario["name"], scenario["purpose"]) for scenario in scenarios]
    named = [(", ".join((*item["aliases"][:1], item["name"])), item["purpose"]) for item in traffic]
    tables = [Table(("scenario", "what it is"), rows, left=2), Table(("--traffic", "what it is"), named, left=2)]
    return Document("", tables)


def model_facts(model: ModelSpec) -> dict[str, Any]:
    """A model's sizes as data."""
    counts = count_parameters(model)
    return {
        "name": model.name,
        "hf_id": model.hf_id,
        "model_type": model.model_type,
        "num_parameters": counts.total,
        "num_active_parameters": counts.active,
        "published_parameters": model.published_params,
        "parameters_by_component": dict(counts.stored),
        "weight_bytes": sum(weight_bytes(model).values()),
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "weights": model.quantization.weights or model.dtype,
        "not_executed": why_not_executed(model),
    }


def models_view(facts: Sequence[dict[str, Any]]) -> Document:
    """A row for each of `model_facts`."""
    rows = [
        (
            *(fact["name"], fact["model_type"]),
            *(f"{fact[key] / 1e9:,.2f} B" for key in ("num_parameters", "num_active_parameters")),
            *(str(fact["num_layers"]), format_number(fact["hidden_size"], 0), fact["weights"]),
            "no" if fact["not_executed"] else "yes",
        )
        for fact in facts
    ]
    return Document("", [Table(_MODELS, rows, left=2)])


def prices_view(facts: Sequence[dict[str, Any]]) -> Document:
    """A row for each price, and how many of them should be asked again."""
    rows = [
        (
            *(fact["device"], format_number(fact["usd_per_hour"], 2), str(fact["kind"] or MISSING).replace("_", " ")),
            *(fact["date"] or MISSING, MISSING if fact["age_days"] is None else format_number(fact["age_days"], 0)),
            ("unconfirmed: " if fact["is_unconfirmed"] else "") + fact["source"],
        )
        for fact in facts
    ]
    stale, open_ = (sum(fact[key] for fact in facts) for key in ("is_stale", "is_unconfirmed"))
    head = ("device", "USD an hour", "kind", "date", "days old", "source")
    sentence = f"{stale} of {len(facts)} are more than half a year old, {open_} are unconfirmed."
    return Document(
        "", [Table(head, rows, left=1, texts=(2, 3, 5)), Paragraph(f"{sentence} Your own: --price h100=2.10.")]
    )


def model_view(model: ModelSpec) -> Document:
    """A model's layers, parameters by component, and bytes."""
    facts = model_facts(model)
    rows = [(name, format_number(count, 0)) for name, count in facts["parameters_by_component"].items() if count]
    rows.append(("active per token", format_number(facts["num_active_parameters"], 0)))
    shape = (
        f"{model.num_layers} layers, hidden {model.hidden_size:,}, vocabulary {model.vocab_size:,}, "
        f"up to {model.max_position_embeddings:,} positions"
    )
    blocks: list[Block] = [
        Paragraph(shape),
        Table(("parameters", ""), rows, total=("total", format_number(facts["num_parameters"], 0))),
        *(Paragraph(f"{count} x {_part(layer.mixer)} + {_part(layer.ffn)}") for layer, count in model.layers),
        Paragraph(f"Weights: {format_si(facts['weight_bytes'], 'B')} as {facts['weights']}"),
    ]
    blocks += map(Paragraph, model.encoder_notes)
    if facts["not_executed"]:
        blocks.append(Paragraph(f"Simulated only: {facts['not_executed']} is not executed yet."))
    if model.source:
        blocks.append(Paragraph(Span(f"Source: {model.source}", "muted")))
    return Document(model.name, blocks, f"{model.model_type} {model.hf_id or ''}".rstrip())


def _part(part: Any) -> str:
    """A layer's mixer or feed-forward part with its sizes."""
    if part is None:
        return "nothing"
    sizes = {key: value for key, value in asdict(part).items() if isinstance(value, int) and value > 1}
    return f"{type(part).__name__}({', '.join(f'{key} {value}' for key, value in sizes.items())})"


_VERDICTS = {"missed": "missed", "proves nothing": "no effect on a CPU, waits for a GPU"}


def techniques_view(rows: Sequence[TechniqueStatus]) -> Document:
    """A table for each family, and how many techniques have got how far."""
    blocks: list[Block] = []
    for family in dict.fromkeys(row.family for row in rows):
        members = [row for row in rows if row.family == family]
        blocks += [Heading(family), Paragraph(Span(members[0].what_family, "muted"))]
        cells = []
        for row in members:
            if row.outcome is None:
                executed = f"no: {row.why_not_executed}"
            else:
                shown = "; ".join(f"{pair.simulated:.2f}, {pair.executed:.2f}" for pair in row.pairs.values())
                verdict = _VERDICTS.get(row.outcome, "yes, slower on a CPU" if row.is_slower_here else "yes")
                executed = f"{verdict}: {shown}"
            validated = "no figure"
            if row.ratio is not None:
                count = f"{len(row.ratios)} figures" if len(row.ratios) > 1 else next(iter(row.ratios))
                validated = f"{'missed, ' if row.validated == 'missed' else ''}{row.ratio:.2f} ({count})"
            cells.append((row.entry.name, "yes" if row.is_simulated else "not yet", executed, validated))
        blocks.append(Table(_TECHNIQUES, cells, left=4))
        for reason in dict.fromkeys(row.entry.missing for row in members if row.entry.missing):
            names = ", ".join(row.entry.name for row in members if row.entry.missing == reason)
            blocks.append(Paragraph(Span(f"Not yet: {names}: {reason}", "muted")))
    counts = {
        "simulated": sum(row.is_simulated for row in rows),
        "executed as simulated": sum(row.is_executed for row in rows),
        "of them slower on this CPU": sum(row.is_slower_here for row in rows),
        "executed otherwise (missed)": sum(row.outcome == "missed" for row in rows),
        "without an effect on a CPU (proves nothing)": sum(row.outcome == "proves nothing" for row in rows),
        "validated by published figures": sum(row.validated == "yes" for row in rows),
        "missed by them": sum(row.validated == "missed" for row in rows),
    }
    text = ", ".join(f"{count} {name}" for name, count in counts.items())
    return Document("", [*blocks, Paragraph(f"{len(rows)} techniques: {text}")])


def devices_view(devices: Sequence[HardwareSpec]) -> Document:
    """A row for each device, by kind, and how many there are."""
    return Document("", [*_by_kind(devices), Paragraph(_num_by_kind(Counter(str(device.kind) for device in devices)))])


def siblings_view(
    devices: Sequence[HardwareSpec], tables: Mapping[str, DeviceFamily], networks: Sequence[NetworkFile]
) -> Document:
    """A row for each device with a file of its own, for each table of siblings, and for each network between nodes."""
    families = [
        (name, family.kind, family.maker, str(len(family.devices)), next(iter(family.devices)))
        for name, family in tables.items()
    ]
    links = [
        (network.name, format_si(network.bandwidth_bytes_per_s, "B/s"), format_number(network.latency_s * 1e6, 1))
        for network in networks
    ]
    kinds = Counter(str(device.kind) for device in devices)
    for family in tables.values():
        kinds[family.kind] += len(family.devices)
    blocks: list[Block] = [
        *_by_kind(devices),
        Table(("table of siblings", "kind", "maker", "devices", "the first"), families, left=3, texts=(4,)),
        Table(("network", "a card, one way", "µs a hop"), links),
        Paragraph(f"{_num_by_kind(kinds)}. List each by --kind cpu, --maker amd or --name rtx-40."),
    ]
    return Document("", blocks)


def _by_kind(devices: Sequence[HardwareSpec]) -> list[Table]:
    rows: dict[str, list[tuple[str, ...]]] = {kind: [] for kind in _KINDS}
    for device in devices:
        sizes = format_si(device.memory_bytes, "B"), format_si(device.memory_bandwidth, "B/s")
        peak = format_si(peak_flops_per_s(device, "bf16"), "FLOP/s")
        ridge, tdp = format_number(ridge_point(device), 0), format_number(device.declared.tdp_w, 0)
        price = format_number(device.price.usd_per_hour if device.price else None)
        rows[str(device.kind)].append((device.name, *sizes, peak, ridge, tdp, price))
    return [Table((_KINDS[kind], *_DEVICES), of_kind) for kind, of_kind in rows.items() if of_kind]


def _num_by_kind(kinds: Mapping[str, int]) -> str:
    counts = ", ".join(f"{kinds[kind]:,} {name}" for kind, name in _KINDS.items() if kinds.get(kind))
    return f"{sum(kinds.values()):,} devices: {counts}"


def device_facts(device: HardwareSpec) -> dict[str, Any]:
    """A device's row as data."""
    return {
        "name": device.name,
        "kind": device.kind,
        "maker": device.maker,
        "memory_bytes": device.memory_bytes,
        "memory_bandwidth_bytes_per_s": device.memory_bandwidth,
        "peak_flops_per_s": device.declared.peak_flops_per_s,
        "ridge_flop_per_byte": ridge_points(device),
        "tdp_w": device.declared.tdp_w,
        "usd_per_hour": device.price.usd_per_hour if device.price else None,
    }


def device_view(device: HardwareSpec) -> Document:
    """All that is declared of a device, and where it comes from."""
    declared, price = device.declared, device.price
    rates = [
        (rate, format_si(peak, "FLOP/s"), format_number(peak / device.memory_bandwidth, 1))
        for rate, peak in declared.peak_flops_per_s.items()
    ]
    levels = []
    for level in declared.memory:
        visible = f" ({format_si(level.visible_bytes, 'B')} visible)" if level.visible_bytes else ""
        capacity, bandwidth = format_si(level.capacity_bytes, "B"), format_si(level.bandwidth_bytes_per_s, "B/s")
        levels.append((level.level, capacity + visible, level.per.replace("_", " "), bandwidth))
    peer = {None: "–", True: "yes", False: "no"}
    links = [(one.name, format_si(one.bandwidth_bytes_per_s, "B/s"), peer[one.peer_to_peer]) for one in declared.links]
    blocks: list[Block] = [
        *_about(device),
        Table(("dtype", "dense peak", "ridge FLOP/byte"), rates),
        Table(("memory", "capacity", "per", "bandwidth"), levels),
        Table(("link", "one way", "peer to peer"), links),
        Paragraph(f"TDP {format_number(declared.tdp_w, 0)} W. Source: {declared.source}"),
    ]
    price_line = "no price is known" if price is None else f"{price.usd_per_hour:g} USD an hour ({price.origin})"
    blocks.append(Paragraph(f"Price: {price_line}"))
    if declared.unconfirmed:
        missing = f"Not confirmed in a vendor's document: {', '.join(declared.unconfirmed)}"
        blocks.append(Paragraph(Span(missing, "communication")))
    return Document(device.name, blocks, f"{device.kind}, {declared.architecture or 'other'}")


def _about(device: HardwareSpec) -> list[Paragraph]:
    """Its units, what code can rely on, and whose memory it has."""
    declared, memory = device.declared, device.declared.memory[0]
    large = f", {declared.performance_cores} of them large" if declared.performance_cores else ""
    lines = [f"{declared.compute_units} compute units{large} at {format_si(declared.clock_hz, 'Hz')}"]
    if declared.instructions:
        lines.append(f"Instructions: {', '.join(declared.instructions)}")
    if memory.bus_width_bits and memory.transfers_per_s:
        lines.append(f"Memory of {memory.bus_width_bits} bits at {memory.transfers_per_s / 1e9:g} GT/s")
    if memory.unified:
        lines.append(f"Memory shared between CPU and GPU; the device has {memory.device_share:.0%} of it by default")
    return [Paragraph(line) for line in lines]


def network_view(network: NetworkFile) -> Document:
    """What is declared of a network between nodes."""
    rate = format_si(network.bandwidth_bytes_per_s, "B/s")
    sources = [Paragraph(f"Source: {network.source}"), Paragraph(f"Latency: {network.latency_source}")]
    return Document(network.name, sources, f"{rate} a card, one way, {network.latency_s * 1e6:g} µs a hop")
