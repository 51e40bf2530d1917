"""The page of the physics: each form's formula, parameters and source, and what the calibrations hold for it."""

__all__ = ["Fitted", "fits_by_form", "forms_page"]

import inspect
import re
from collections.abc import Iterator, Mapping
from math import exp
from pathlib import Path
from typing import Any, NamedTuple

from docs_site.places import ROOT
from docs_site.tables import as_code, in_cell, table
from perfmodel.cost.kernel_models.registry import KERNEL_MODELS, KernelModel
from perfmodel.files.yaml_loader import load_yaml
from perfmodel.specs.json_schema import meanings_of

_FOLDER = ROOT / "hardware_specs" / "calibrations"
_FIT_HEADER = ("device and engine", "family", "measurements", "10th percentile", "median", "90th percentile")
# What parameters of several forms mean alike; of the others the formula above them tells.
_ALIKE = {
    "launch_s": "launch of the kernel, with what it costs before and after its work",
    "floor_s": "below which no measurement falls: the host's time where kernels were launched one by one",
    "eager_floor_s": "below which no kernel launched by itself falls: the host's time",
    "compute_fraction": "share of the declared tensor rate that is reached",
    "tensor_fraction": "share of the declared tensor rate that is reached",
    "gemm_fraction": "share of the declared tensor rate that the projections reach",
    "memory_fraction": "share of the declared bandwidth of the memory that is reached",
    "weight_fraction": "the same while weights are read",
    "activation_fraction": "the same while activations are read and written",
    "kv_fraction": "the same while the cache is read",
    "link_fraction": "share of the declared bandwidth of the link that is reached",
    "low_latency_fraction": "the same by the low-latency protocol",
    "simple_fraction": "the same by the protocol for large messages",
    "one_shot_fraction": "the same where each rank reads all others' data at once",
    "two_shot_fraction": "the same where each rank reduces its part, then all gather",
    "simple_start_s": "what the protocol for large messages takes before it moves a byte",
    "link_latency_s": "of the link itself, a declared figure",
    "overhead_per_item_s": "per sequence of an attention, per expert that a batch touches",
    "knee": "how sharp the step from one bound to the other is; larger is sharper",
    "vector_knee": "the same for few rows",
    "kernel": "facts of the kernel's code: tiles, splits, what a block does",
    "domain": "sizes and formats that the fit is for",
    "beyond": "the fit for what this one does not reach",
    "rate": "which declared rate multiplies",
    "most_bytes": "largest message that it serves",
    "most_ranks": "most ranks that it serves",
    "micro_batch": "tokens that are computed at once; 0: all",
    "on_cpu": "the fit for what the CPU computes",
    "on_device": "the fit for what the device computes",
    "wave_quantization": "1: a last, partial wave of thread blocks costs a whole one",
    "moves_all_slots": "whether slots of experts elsewhere are moved as well",
}
_BACKENDS = {"block_matmul": "decode_residuals", "block_stream": "prompt_residuals", "on_host": ""}


class Fitted(NamedTuple):
    """A fit of a form: where it stands, of what, and its residuals."""

    place: str
    family: str
    residuals: Mapping[str, float]


def forms_page() -> str:
    """What the page has below its introduction."""
    fits = fits_by_form()
    rows = [(f"[{name}](#{name})", str(len(fits[name])), in_cell(_title(form))) for name, form in KERNEL_MODELS.items()]
    text = table(("form", "fits", "what"), rows) + "\n"
    return text + "".join(_section(name, form, fits[name]) for name, form in KERNEL_MODELS.items())


def fits_by_form() -> dict[str, list[Fitted]]:
    """All fits in the calibration files, by the form that they are of."""
    fits: dict[str, list[Fitted]] = {name: [] for name in KERNEL_MODELS}
    for path in sorted(_FOLDER.glob("*.yaml")):
        for form, fit in _fits_in(path):
            fits[form].append(fit)
    return fits


def _fits_in(path: Path) -> Iterator[tuple[str, Fitted]]:
    content, place = load_yaml(path).data, path.stem
    for family, fit in content.get("families", {}).items():
        yield fit.get("form", "roofline"), Fitted(place, family, fit.get("residuals", {}))
    for name, fit in content.get("architectures", {}).items():
        yield "roofline", Fitted(place, f"architecture {name}", fit.get("residuals", {}))
    for name in ("dispatch", "combine"):
        if "residuals" in content.get(name, {}):
            yield "expert_exchange", Fitted(place, name, content[name]["residuals"])
    for name, backend in content.get("backends", {}).items():
        for form, key in _BACKENDS.items():
            if not key or key in backend:
                yield form, Fitted(place, f"backend {name}", backend.get(key, {}))


def _section(name: str, form: KernelModel, fits: list[Fitted]) -> str:
    modules = dict.fromkeys((inspect.getmodule(form.time), inspect.getmodule(form.fit)))
    docs = "\n\n".join(_prose(inspect.cleandoc(module.__doc__ or "")) for module in modules if module is not None)
    sources = ", ".join(_link(module) for module in modules if module is not None)
    return f"## {name}\n\n{docs}\n\nIn {sources}.\n\n{_parameters(form)}\n{_fits(name, fits)}\n"


def _title(form: KernelModel) -> str:
    module = inspect.getmodule(form.time)
    assert module is not None
    return (module.__doc__ or "").split("\n", 1)[0].rstrip(".")


def _link(module: Any) -> str:
    path = "perfmodel/" + module.__name__.removeprefix("perfmodel.").replace(".", "/") + ".py"
    return f"[{path}](../../{path})"


def _prose(docstring: str) -> str:
    """A docstring as Markdown: indented lines are formulas, which follow an empty line and stand as they are."""
    lines: list[str] = []
    for line in docstring.splitlines():
        is_formula = line.startswith("    ")
        if is_formula and lines and lines[-1].strip() and not lines[-1].startswith("    "):
            lines.append("")
        lines.append(line if is_formula else _plain(line))
    return "\n".join(lines)


def _plain(line: str) -> str:
    """Prose in which only code type is Markdown: stars multiply, and angles compare."""
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(p if p.startswith("`") else re.sub(r"([*_\[\]])", r"\\\1", p.replace("<", "&lt;")) for p in parts)


def _parameters(form: KernelModel) -> str:
    notes = _ALIKE | meanings_of(form.fit)
    rows = [
        (
            as_code(name),
            _shown(field.default),
            _range(field.metadata),
            in_cell(notes.get(name, "see the formula")),
        )
        for name, field in form.fit.model_fields.items()
        if name not in ("form", "residuals")
    ]
    return f"### {form.fit.__name__}\n\n" + table(("parameter", "default", "range", "meaning"), rows)


def _shown(value: Any) -> str:
    if isinstance(value, bool | str):
        return as_code(value)
    return as_code(f"{value:g}") if isinstance(value, int | float) else ""


def _range(metadata: list[Any]) -> str:
    signs = (("gt", "&gt; "), ("ge", "≥ "), ("lt", "&lt; "), ("le", "≤ "))
    values = ((sign, getattr(item, key, None)) for key, sign in signs for item in metadata)
    return ", ".join(f"{sign}{value:g}" for sign, value in values if isinstance(value, int | float))


def _fits(name: str, fits: list[Fitted]) -> str:
    head = f"### Fits of {name}\n\n"
    if not fits:
        return head + "No calibration holds one; it is for fits of your own.\n"
    rows = [(as_code(fit.place), as_code(fit.family), *_quantiles(fit.residuals)) for fit in fits]
    return head + table(_FIT_HEADER, rows)


def _quantiles(residuals: Mapping[str, float]) -> tuple[str, str, str, str]:
    if not residuals.get("num_rows"):
        return "", "", "", ""
    low, middle, high = (100 * (exp(residuals.get(key, 0.0)) - 1) for key in ("p10", "p50", "p90"))
    return f"{residuals['num_rows']:,}", f"{low:+.0f} %", f"{middle:+.0f} %", f"{high:+.0f} %"
