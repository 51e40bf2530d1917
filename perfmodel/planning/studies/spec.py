"""`Study`: one question, asked of a scenario under several variants and along axes; what a study file says.

A variant and a value of an axis are `--set` overrides of the base scenario (`engine.batching: static`), or of the
study's own `step` block (`step.batch: 8`), which the metrics of steps and of memory are of. `load_study`
reads it, checks it, and finds the file of its base scenario.
"""

__all__ = [
    "AxisSpec",
    "BaseScenario",
    "ExecutedPart",
    "PlotSpec",
    "QualitySpec",
    "QuickPart",
    "Setting",
    "Study",
    "StudyFile",
    "load_study",
]

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from perfmodel.errors import SpecError, did_you_mean
from perfmodel.files.base import Spec
from perfmodel.files.catalog import find_file
from perfmodel.files.reach import may_touch
from perfmodel.files.units import PositiveInt, common_numbers
from perfmodel.files.validation import parse
from perfmodel.files.yaml_loader import Path, Positions, load_yaml
from perfmodel.planning.metrics import ALIASES, Metric, study_metric
from perfmodel.planning.sweeps.typical_step import StepSpec
from perfmodel.specs.overrides import as_overrides

Setting = dict[str, Any]  # dotted field -> value, as `--set` writes them


class AxisSpec(Spec):
    """What is varied for every variant alike: values of a field, or named settings.

    field:     the field that takes each value, or several that all do
    multiples: further fields, which take so many times the value (`traffic.num_requests: 4`)
    settings:  instead: label -> overrides
    short:     the values of a `--quick` study; by default the first and the last
    """

    field: str | tuple[str, ...] | None = None
    values: tuple[int | float | str | bool, ...] = ()
    multiples: dict[str, float] = Field(default_factory=dict)
    settings: dict[str, Setting] = Field(default_factory=dict)
    unit: str = ""
    short: tuple[int | float | str | bool, ...] = ()

    @model_validator(mode="after")
    def _values_or_settings(self) -> "AxisSpec":
        if bool(self.settings) == bool(self.field and self.values):
            raise ValueError("give `field` and `values`, or `settings` (label: {field: value}), one of the two")
        if self.settings and (self.field or self.values or self.multiples):
            raise ValueError("found settings beside field, values or multiples; keep the settings alone")
        known = self.labels
        if len(set(map(str, known))) < len(known):
            raise ValueError("found a value twice; each is a point of its own")
        stray = [value for value in self.short if value not in known]
        if stray:
            raise ValueError(f"short: found {stray[0]!r}, allowed some of the axis's own: {', '.join(map(str, known))}")
        return self

    @property
    def labels(self) -> tuple[int | float | str | bool, ...]:
        """The axis's values in order: numbers, names, or the labels of settings."""
        return self.values or tuple(self.settings)

    @property
    def is_numeric(self) -> bool:
        return self._numbers is not None

    @property
    def numbers(self) -> tuple[float, ...]:
        """The labels as numbers, those with units (`4 TB/s`) in the unit of the last; the axis is numeric."""
        assert self._numbers is not None
        return self._numbers[0]

    @property
    def unit_label(self) -> str:
        """The unit that is given, or that of the labels."""
        return self.unit or (self._numbers[1] if self._numbers is not None else "")

    @property
    def _numbers(self) -> tuple[tuple[float, ...], str] | None:
        labels = self.labels
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in labels):
            return tuple(map(float, labels)), ""
        return common_numbers([str(value) for value in labels]) if all(isinstance(v, str) for v in labels) else None

    @property
    def shortened(self) -> "AxisSpec":
        """The axis with its `short` values, or its ends."""
        kept = self.short or tuple(dict.fromkeys((self.labels[0], self.labels[-1])))
        settings = {name: self.settings[name] for name in self.settings if name in kept}
        return self.model_copy(update={"values": () if settings else kept, "settings": settings})

    def overrides(self, label: Any) -> Setting:
        """The fields that `label` sets."""
        if self.settings:
            return self.settings[label]
        fields = (self.field,) if isinstance(self.field, str) else self.field or ()
        return {**dict.fromkeys(fields, label), **{name: _times(label, n) for name, n in self.multiples.items()}}


class PlotSpec(Spec):
    """One picture. lines: a metric over an axis; bars: by variant; waterfall: a ladder's rungs; pareto: metric over
    metric, a dot for each variant.

    metric:   what is drawn; by default the study's first
    x:        an axis, or for pareto a metric; by default the first axis with numbers
    panels:   an axis whose values get a picture each, side by side
    relative: draw how many times better than the baseline
    log:      which axes are logarithmic
    """

    kind: Literal["lines", "bars", "waterfall", "pareto"]
    metric: str | None = None
    x: str | None = None
    panels: str | None = None
    relative: bool = False
    log: tuple[Literal["x", "y"], ...] = ()

    @field_validator("log", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, str) else value


class QuickPart(Spec):
    """What `--quick` changes beside taking fewer values of each axis: fewer requests, shorter answers."""

    set: Setting = Field(default_factory=dict)


class ExecutedPart(Spec):
    """How the study is run for real (`--execute`), and simulated once more beside it.

    base, set:  the scenario, small enough for the machine at hand; by default the study's own
    variants:   overrides that stand for those of a variant; a variant that is not named here keeps its own
    leave_out:  variants that are not run, each with the reason
    axes:       other values for an axis; an axis that is not named here keeps its own
    rounds:     every point is run so many times, in random order; medians count
    """

    base: str | dict[str, Any] | None = None
    set: Setting = Field(default_factory=dict)
    variants: dict[str, Setting] = Field(default_factory=dict)
    leave_out: dict[str, str] = Field(default_factory=dict)
    axes: dict[str, AxisSpec] = Field(default_factory=dict)
    metrics: tuple[str, ...] = ()
    rounds: PositiveInt = 3


class QualitySpec(Spec):
    """A measured quality of each variant: perplexity, from a file that `perfmodel study --quality` wrote.

    file:      a JSON file, relative to the study's
    keys:      variant -> the entry of the file that stands for it; variants without one have no value
    model:     whose quality it is, as said in pictures: the study's own has no weights here
    base, set: the scenario that it is measured in
    variants:  overrides that stand for those of a variant there
    """

    metric: str = "perplexity"
    file: str
    keys: dict[str, str]
    model: str = ""
    base: str = "tiny-llama-cpu"
    set: Setting = Field(default_factory=dict)
    variants: dict[str, Setting] = Field(default_factory=dict)


class Study(Spec):
    """A study file. `ladder: true`: each variant keeps the overrides of those before it."""

    study: str
    question: str
    base: str | dict[str, Any]
    set: Setting = Field(default_factory=dict)
    variants: dict[str, Setting] = Field(min_length=1)
    ladder: bool = False
    baseline: str | None = None
    axes: dict[str, AxisSpec] = Field(default_factory=dict)
    metrics: tuple[str, ...] = Field(min_length=1)
    step: StepSpec | None = None
    plots: tuple[PlotSpec, ...] = ()
    quick: QuickPart = QuickPart()
    executed: ExecutedPart | None = None
    quality: QualitySpec | None = None

    @field_validator("metrics", mode="before")
    @classmethod
    def _known_by_other_names(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value  # for validation to say
        return [ALIASES.get(name, name) if isinstance(name, str) else name for name in value]

    @model_validator(mode="after")
    def _names_are_its_own(self) -> "Study":
        self._check("baseline", self.baseline, self.variants)
        for name in self.metrics:
            if self.metric_named(name).needs_context and (self.step is None or self.step.context is None):
                raise ValueError(f"metrics: {name} needs `step: {{batch: 1, context: 1024}}`, tokens of each sequence")
        self._check_plots()
        if self.executed is not None:
            for field in ("variants", "leave_out"):
                for label in getattr(self.executed, field):
                    self._check(f"executed.{field}", label, self.variants)
            for label in self.executed.axes:
                self._check("executed.axes", label, self.axes)
        for label in self.quality.keys if self.quality else ():
            self._check("quality.keys", label, self.variants)
        return self

    def _check_plots(self) -> None:
        drawn = [*self.metrics, *([self.quality.metric] if self.quality else [])]
        for index, plot in enumerate(self.plots):
            self._check(f"plots.{index}.metric", plot.metric, drawn)
            self._check(f"plots.{index}.panels", plot.panels, self.axes)
            self._check(f"plots.{index}.x", plot.x, drawn if plot.kind == "pareto" else self.axes)
            if plot.kind == "lines" and self.x_axis(plot) is None:
                raise ValueError(f"plots.{index}: lines need an axis of numbers; add one to `axes`, or draw bars")
            if plot.kind == "pareto" and plot.x is None:
                raise ValueError(f"plots.{index}: pareto needs `x`, a second metric: {', '.join(drawn)}")
            if plot.kind == "waterfall" and not self.ladder:
                raise ValueError(f"plots.{index}: a waterfall shows the rungs of a ladder; set `ladder: true`")

    @staticmethod
    def _check(field: str, name: str | None, known: Any) -> None:
        if name is not None and name not in known:
            raise ValueError(f"{field}: found {name!r}, allowed {', '.join(known)}.{did_you_mean(name, known)}")

    def metric_named(self, name: str) -> Metric:
        """One of the study's metrics, a measured quality included. Raises ValueError for an unknown name."""
        if self.quality is not None and name == self.quality.metric:
            return Metric(name, name.replace("_", " "), "", is_better_low=True)
        return study_metric(name)

    @property
    def all_metrics(self) -> list[str]:
        """The metrics that are asked for, and the measured quality where the study has one."""
        quality = [self.quality.metric] if self.quality is not None else []
        return list(dict.fromkeys([*self.metrics, *quality]))

    def x_axis(self, plot: PlotSpec) -> str | None:
        """The axis that lines are drawn over."""
        if plot.x is not None:
            return plot.x
        return next((name for name, axis in self.axes.items() if axis.is_numeric), None)

    @property
    def reference(self) -> str:
        """The variant that others are compared with: `baseline`, or the first."""
        return self.baseline or next(iter(self.variants))


def _times(value: Any, factor: float) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    product = value * factor
    return int(product) if product == int(product) else product


@dataclass(frozen=True, slots=True)
class BaseScenario:
    """Where a study's scenario is: a file, or a block inside the study's own; `overrides` go before all others."""

    path: str
    inside: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class StudyFile:
    """A study with its file, in which mistakes are looked up."""

    path: pathlib.Path
    study: Study
    base: BaseScenario
    executed_base: BaseScenario
    positions: Positions

    def where(self, place: Path) -> str:
        """`file:line: place` of what a mistake is in."""
        return f"{self.positions.where(place)}: {'.'.join(map(str, place))}"


def load_study(path_or_name: str | pathlib.Path, overrides: Sequence[str] = ()) -> StudyFile:
    """The study of a file, or one of workloads/scenarios/studies by name; `overrides` change its base scenario.

    Raises SpecError: `file:line: field: what was found, what is allowed`, one line per mistake.
    """
    path = find_file("studies", path_or_name)
    loaded = load_yaml(path)
    if not isinstance(loaded.data.get("study", ""), str) or "study" not in loaded.data:
        raise SpecError(
            f"{path}: found no `study: NAME`, so this is not a study; scenarios are for `perfmodel simulate` and "
            f"`perfmodel execute`."
        )
    study = parse(Study, loaded.data, loaded.positions)
    base = _base(study.base, study.set, overrides, ("base",), path, loaded.positions)
    executed = study.executed
    executed_base = base
    if executed is not None:
        if executed.base is None:
            more = (*base.overrides, *as_overrides(executed.set))
            executed_base = BaseScenario(base.path, base.inside, more)
        else:
            place = ("executed", "base")
            executed_base = _base(executed.base, executed.set, (), place, path, loaded.positions)
    return StudyFile(path, study, base, executed_base, loaded.positions)


def _base(
    given: str | dict[str, Any],
    setting: Setting,
    overrides: Sequence[str],
    place: tuple[str, ...],
    file: pathlib.Path,
    positions: Positions,
) -> BaseScenario:
    more = (*as_overrides(setting), *overrides)
    if isinstance(given, dict):
        return BaseScenario(str(file), place, more)
    beside = file.parent / given
    try:
        found = beside if may_touch(beside) and beside.is_file() else find_file("scenarios", given)
    except SpecError as error:
        raise SpecError(f"{positions.where(place)}: {'.'.join(place)}: {error}") from None
    return BaseScenario(str(found), (), more)
