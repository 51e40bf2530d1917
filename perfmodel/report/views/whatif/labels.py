"""What varied values are called: a path, a value on its axis, a place in a sentence."""

__all__ = ["path_label", "place_label", "x_label"]

from perfmodel.report.numbers import format_short

_LABELS = {
    "peak_flops": "peak FLOPs",
    "bandwidth": "bandwidth",
    "capacity": "capacity",
    "power_cap_w": "power cap in W",
    "kernels": "kernel overheads",
    "host": "host time",
    "rate": "arrival rate",
    "concurrency": "concurrency",
}
_OF_NETWORKS = {"bandwidth_bytes_per_s": "network bandwidth", "latency_s": "network latency"}
_NAMES = {"hbm": "HBM", "nvlink": "NVLink", "pcie": "PCIe", "infinity_fabric": "Infinity Fabric", "ici": "ICI"}


def path_label(path: str) -> str:
    """`HBM bandwidth` for hardware.hbm.bandwidth; other paths stay as they are."""
    parts = path.split(".")
    if parts[:2] == ["cluster", "network"] and parts[-1] in _OF_NETWORKS:
        return _OF_NETWORKS[parts[-1]]
    if parts[:2] == ["cluster", "pools"] and "hardware" in parts:
        return f"{path_label('.'.join(parts[3:]))} of pool {parts[2]}"
    if path == "cluster.kv_transfer.bandwidth_bytes_per_s":
        return "KV link bandwidth"
    if path == "hardware":
        return "device"
    label = _LABELS.get(parts[-1])
    if label is None or parts[0] not in ("hardware", "overheads", "traffic"):
        return path
    owner = _NAMES.get(parts[-2], "")
    return f"{owner} {label}" if owner else label if len(parts) == 2 or parts[0] == "traffic" else path


def x_label(x: float, unit: str) -> str:
    """A value on an axis with its unit."""
    return f"{format_short(x)}x" if unit == "x" else f"{format_short(x)} {unit}".strip()


def place_label(path: str, x: float, unit: str) -> str:
    """A place on an axis in a sentence: `6 req/s`, `1.3x the HBM bandwidth`, `batch 148`."""
    if path == "step.batch":
        return f"batch {format_short(x)}"
    if path == "traffic.arrivals.rate" and not unit:
        return f"{format_short(x)} req/s"
    return f"{x_label(x, unit)} the {path_label(path)}" if unit == "x" else f"{path_label(path)} {x_label(x, unit)}"
