"""Devices and networks between nodes, listed and one by one."""

__all__ = ["device_facts", "device_view", "devices_view", "network_view", "siblings_view"]

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from perfmodel.cost import peak_flops_per_s, ridge_point
from perfmodel.report.document import Block, Document, Paragraph, Span, Table
from perfmodel.report.numbers import format_number, format_si
from perfmodel.report.views.step import ridge_points
from perfmodel.specs.devices import DeviceFamily
from perfmodel.specs.hardware import HardwareSpec, MemoryLevel
from perfmodel.specs.networks import NetworkFile

_DEVICES = ("memory", "bandwidth", "bf16 peak", "FLOP/byte", "TDP W", "USD/h")
_KINDS = {"gpu": "GPUs", "cpu": "CPUs", "tpu": "TPUs", "npu": "other accelerators", "fpga": "FPGAs"}


def devices_view(devices: Sequence[HardwareSpec]) -> Document:
    """A row for each device, by kind, and how many there are."""
    return Document("", [*_by_kind(devices), Paragraph(_counted(Counter(str(each.kind) for each in devices)))])


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
    kinds = Counter(str(each.kind) for each in devices)
    for family in tables.values():
        kinds[family.kind] += len(family.devices)
    return Document(
        "",
        [
            *_by_kind(devices),
            Table(("table of siblings", "kind", "maker", "devices", "the first"), families, left=3, texts=(4,)),
            Table(("network", "a card, one way", "µs a hop"), links),
            Paragraph(f"{_counted(kinds)}. List each by --kind cpu, --maker amd or --name rtx-40."),
        ],
    )


def _by_kind(devices: Sequence[HardwareSpec]) -> list[Table]:
    kinds = [kind for kind in _KINDS if any(device.kind == kind for device in devices)]
    return [Table((_KINDS[kind], *_DEVICES), _rows(each for each in devices if each.kind == kind)) for kind in kinds]


def _rows(devices: Iterable[HardwareSpec]) -> list[tuple[str, ...]]:
    return [
        (
            device.name,
            format_si(device.memory_bytes, "B"),
            format_si(device.memory_bandwidth, "B/s"),
            format_si(peak_flops_per_s(device, "bf16"), "FLOP/s"),
            format_number(ridge_point(device), 0),
            format_number(device.declared.tdp_w, 0),
            format_number(device.price.usd_per_hour if device.price else None),
        )
        for device in devices
    ]


def _counted(kinds: Mapping[str, int]) -> str:
    each = ", ".join(f"{kinds[kind]:,} {name}" for kind, name in _KINDS.items() if kinds.get(kind))
    return f"{sum(kinds.values()):,} devices: {each}"


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
    levels = [
        (m.level, _capacity(m), m.per.replace("_", " "), format_si(m.bandwidth_bytes_per_s, "B/s"))
        for m in declared.memory
    ]
    links = [
        (
            link.name,
            format_si(link.bandwidth_bytes_per_s, "B/s"),
            {None: "–", True: "yes", False: "no"}[link.peer_to_peer],
        )
        for link in declared.links
    ]
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


def _capacity(level: MemoryLevel) -> str:
    """Capacity by datasheet, and the capacity visible to a process where it is known."""
    visible = f" ({format_si(level.visible_bytes, 'B')} visible)" if level.visible_bytes else ""
    return format_si(level.capacity_bytes, "B") + visible


def network_view(network: NetworkFile) -> Document:
    """What is declared of a network between nodes."""
    rate = format_si(network.bandwidth_bytes_per_s, "B/s")
    sources = [Paragraph(f"Source: {network.source}"), Paragraph(f"Latency: {network.latency_source}")]
    return Document(network.name, sources, f"{rate} a card, one way, {network.latency_s * 1e6:g} µs a hop")
