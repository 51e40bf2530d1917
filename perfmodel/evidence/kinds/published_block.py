"""`published`: a published figure for a scenario, and the metric it is compared with (of a run, step, operator, kernel
or memory), with value, unit, source and, for ratios, the baseline. See docs/published.md."""

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from perfmodel.errors import did_you_mean
from perfmodel.files.base import Spec
from perfmodel.files.tables import load_table
from perfmodel.files.units import NonNegativeInt, PositiveFloat, PositiveInt
from perfmodel.planning.metrics import ALIASES, RATIOS, Basis, Metric, metric_named, needs_no_run
from perfmodel.planning.typical_step import StepSpec

_TABLE = load_table("published_figures")
_REMARK = re.compile(r"\(.*\)")
_NO_MODEL = "tiny-llama"  # what figures without a model of their own are given


def factor_of_unit(unit: str, dimension: str, metric: str) -> float:
    """One `unit` in the unit of `dimension`. Case, spaces and remarks in brackets are ignored. Raises ValueError that
    names the units of `metric`."""
    usual, table, own = _TABLE["dimensions"][dimension]
    known: dict[str, float] = _TABLE["units"][table]
    plain = "".join(_REMARK.sub("", unit).split()).lower()
    if plain in known:
        return known[plain] / known[own]
    near = did_you_mean(plain, known)
    raise ValueError(f"unit: got {unit!r}, {metric} is given in {usual}{near and '.' + near}")


class KernelShape(Spec):
    """One kernel of given sizes on one device, timed alone; `format` as in `engine.quantization`, or bf16, fp16, fp32.

    gemm:              (m, k) x (k, n)
    attention_prefill: `batch` causal prompts of `tokens` (after `cached` ones), `heads` query heads; flash or standard
                       attention as `engine.attention` says
    attention_decode:  `batch` sequences of one new token and `context` tokens of KV; split as `engine.split_kv` says
    moe:               `tokens` tokens through `top_k` of `experts` experts, hidden x intermediate each, shared out over
                       `expert_parallel` devices, chosen as the scenario's `routing` says
    all_reduce:        `message_bytes` over `ranks` devices"""

    operator: Literal["gemm", "attention_prefill", "attention_decode", "moe", "all_reduce"]
    format: str | None = None
    m: PositiveInt | None = None
    n: PositiveInt | None = None
    k: PositiveInt | None = None
    batch: PositiveInt | None = None
    tokens: PositiveInt | None = None
    cached: NonNegativeInt | None = None
    context: PositiveInt | None = None
    heads: PositiveInt | None = None
    kv_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    v_head_dim: PositiveInt | None = None
    window: PositiveInt | None = None
    kv_format: str | None = None
    experts: PositiveInt | None = None
    top_k: PositiveInt | None = None
    hidden: PositiveInt | None = None
    intermediate: PositiveInt | None = None
    expert_parallel: PositiveInt | None = None
    is_gated: bool | None = None
    message_bytes: PositiveFloat | None = None
    ranks: PositiveInt | None = None

    @model_validator(mode="after")
    def _has_the_sizes_of_its_operator(self) -> "KernelShape":
        needed, optional = _TABLE["kernels"][self.operator]
        given = {name for name in type(self).model_fields if getattr(self, name) is not None} - {"operator"}
        missing = [name for name in needed if name not in given]
        if missing:
            raise ValueError(f"{self.operator} needs {', '.join(missing)} (it takes {', '.join((*needed, *optional))})")
        unused = sorted(given - {*needed, *optional})
        if unused:
            raise ValueError(
                f"{self.operator} has no {', '.join(unused)}; remove it (it takes {', '.join((*needed, *optional))})"
            )
        return self

    def size(self, name: str, default: int = 1) -> int:
        """A size, or its default."""
        value = getattr(self, name)
        return default if value is None else int(value)


class Published(Spec):
    """A published figure, and how it is to be predicted.

    metric:    see perfmodel.planning.metrics, or docs/published.md
    value:     a number in `unit`; [low, high] where the source gives a range
    technique: the family of techniques that the figure is about, any text; figures are grouped by it
    setup:     what the source says of how it was measured; note: why the prediction may differ from it
    fitted:    whether it stands in a table that calibrations were fitted to: then it validates nothing
    step, operator, kernel: what of a step is meant, where the metric is not of a whole run
    baseline:  `--set` overrides that turn the scenario into what the figure is relative to; then `ratio` says which
               way round, and `value` is a ratio"""

    metric: str
    value: float | tuple[float, float]
    unit: str = ""
    source: str
    id: str = ""
    technique: str = "unnamed"
    url: str = ""
    setup: str = ""
    note: str = ""
    fitted: bool = False
    step: StepSpec | None = None
    operator: tuple[str, ...] = ()
    kernel: KernelShape | None = None
    baseline: tuple[str, ...] = ()
    ratio: Literal["speedup", "gain", "saving", "scenario_over_baseline", "baseline_over_scenario"] | None = Field(
        default=None, description="Only with `baseline`; default speedup: how many times better than the baseline"
    )

    @field_validator("metric", mode="before")
    @classmethod
    def _known_by_other_names(cls, value: Any) -> Any:
        return ALIASES.get(value, value) if isinstance(value, str) else value

    @field_validator("operator", "baseline", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else () if value is None else value

    @model_validator(mode="before")
    @classmethod
    def _value_with_its_unit(cls, data: Any) -> Any:
        """`value: 104.9 tok/s` gives value and unit."""
        if isinstance(data, dict) and isinstance(data.get("value"), str) and not data.get("unit"):
            number, _, unit = data["value"].strip().partition(" ")
            return {**data, "value": number, "unit": unit.strip()}
        return data

    @model_validator(mode="after")
    def _is_something_to_predict(self) -> "Published":
        if self.kernel is not None and (self.step is not None or self.operator):
            raise ValueError("got kernel beside step or operator; a kernel is timed alone, keep one of them")
        if self.operator and self.step is None:
            raise ValueError("got operator without step; say of which step it is one, as in step: {prefill: 512}")
        if self.ratio is not None and not self.baseline:
            raise ValueError("got ratio without baseline; give the `--set` overrides that make the baseline")
        ends = self.value if isinstance(self.value, tuple) else (self.value, self.value)
        if not 0 < ends[0] <= ends[1]:
            raise ValueError("value: expected a number above 0, or [low, high] of two such numbers")
        if self.metric_spec.needs_context and (self.step is None or self.step.context is None):
            raise ValueError(f"{self.metric} needs `step: {{batch: ..., context: ...}}`, tokens of each sequence")
        _ = self.factor
        return self

    @property
    def metric_spec(self) -> Metric:
        """The metric. Raises ValueError for an invalid one."""
        return metric_named(self.metric, self.basis)

    @property
    def basis(self) -> Basis:
        """The basis of the figure."""
        if self.kernel is not None:
            return "kernel"
        if self.operator:
            return "operator"
        return "memory" if needs_no_run(self.metric) else "step" if self.step is not None else "run"

    @property
    def dimension(self) -> str:
        """Dimension of `unit`: the metric's own, or that of a ratio."""
        return RATIOS[self.ratio or "speedup"] if self.baseline else self.metric_spec.dimension

    @property
    def factor(self) -> float:
        """Factor from `unit` to the metric's own unit."""
        return factor_of_unit(self.unit, self.dimension, self.metric)

    @property
    def family(self) -> str:
        """The table that counts the figure's error."""
        if self.basis == "run":
            return "system ratios" if self.baseline else "systems"
        return {"kernel": "kernels", "operator": "kernels", "step": "steps", "memory": "memory"}[self.basis]


def complete(data: dict[str, Any]) -> None:
    """Fill in what a figure of a step or kernel does not need: traffic and, for a kernel, the model."""
    block = data.get("published")
    if not isinstance(block, dict):
        return
    if not block.keys().isdisjoint(("kernel", "operator", "step")) or needs_no_run(str(block.get("metric"))):
        data.setdefault("traffic", dict(_TABLE["no_traffic"]))
    if "kernel" in block:
        data.setdefault("model", _NO_MODEL)
