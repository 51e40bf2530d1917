"""`Study`: a scenario evaluated under several variants and along axes. Both are `--set` overrides of the base scenario
(`engine.batching: static`) or of the study's `step` block (`step.batch: 8`), used by metrics of steps and memory."""

import pathlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal, TypeVar

from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from perfmodel.errors import SpecError, did_you_mean
from perfmodel.files.base import Spec
from perfmodel.files.catalog import find_file
from perfmodel.files.sandbox import is_allowed, read_json
from perfmodel.files.units import PositiveInt, common_numbers
from perfmodel.files.validation import parse
from perfmodel.files.yaml_loader import Path, Positions, load_yaml
from perfmodel.planning.findings import better_by
from perfmodel.planning.metrics import ALIASES, Metric, basis_by_name, study_metric
from perfmodel.planning.points import Point, Record, load_point
from perfmodel.planning.typical_step import StepSpec
from perfmodel.renderable import Renderable, columns_of
from perfmodel.specs.overrides import as_overrides
from perfmodel.specs.scenario import Scenario

Setting = dict[str, Any]  # dotted field -> value, as `--set` writes them


class AxisSpec(Spec):
    """What is varied for every variant alike: values of a field, or named settings.

    field:     the field that takes each value, or several that all do
    multiples: further fields, which take so many times the value (`traffic.num_requests: 4`)
    settings:  instead: label -> overrides
    short:     the values of a `--quick` study; by default the first and the last"""

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
            raise ValueError("got settings beside field, values or multiples; keep the settings alone")
        known = self.labels
        if len(set(map(str, known))) < len(known):
            raise ValueError("got a value twice; each is a point of its own")
        stray = [value for value in self.short if value not in known]
        if stray:
            raise ValueError(f"short: got {stray[0]!r}; expected some of the axis's own: {', '.join(map(str, known))}")
        return self

    @property
    def labels(self) -> tuple[int | float | str | bool, ...]:
        """Axis values in order: numbers, names, or labels of settings."""
        return self.values or tuple(self.settings)

    @property
    def is_numeric(self) -> bool:
        return self._numbers is not None

    @property
    def numbers(self) -> tuple[float, ...]:
        """The labels as numbers; those with units (`4 TB/s`) in the unit of the last. The axis must be numeric."""
        assert self._numbers is not None
        return self._numbers[0]

    @property
    def unit_label(self) -> str:
        """The given unit, or that of the labels."""
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
        """Overrides that `label` sets."""
        if self.settings:
            return self.settings[label]
        fields = (self.field,) if isinstance(self.field, str) else self.field or ()
        changed: Setting = dict.fromkeys(fields, label)
        for name, factor in self.multiples.items():
            is_number = isinstance(label, int | float) and not isinstance(label, bool)
            value = label * factor if is_number else label
            changed[name] = int(value) if is_number and value == int(value) else value
        return changed


class PlotSpec(Spec):
    """One picture. lines: a metric over an axis; bars: by variant; waterfall: a ladder's rungs; pareto: metric over
    metric, a dot for each variant.

    metric:   what is drawn; by default the study's first
    x:        an axis, or for pareto a metric; by default the first axis with numbers
    panels:   an axis whose values get a picture each, side by side
    relative: draw how many times better than the baseline
    log:      which axes are logarithmic"""

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
    rounds:     every point is run so many times, in random order; medians count"""

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
    variants:  overrides that stand for those of a variant there"""

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
            return value  # validation reports it
        return [ALIASES.get(name, name) if isinstance(name, str) else name for name in value]

    @model_validator(mode="after")
    def _names_are_its_own(self) -> "Study":
        def check(field: str, names: Iterable[str | None], known: Collection[str]) -> None:
            for name in names:
                if name is not None and name not in known:
                    raise ValueError(f"{field}: got {name!r}; expected {', '.join(known)}.{did_you_mean(name, known)}")

        check("baseline", [self.baseline], self.variants)
        for name in self.metrics:
            if self.metric_named(name).needs_context and (self.step is None or self.step.context is None):
                raise ValueError(f"metrics: {name} needs `step: {{batch: 1, context: 1024}}`, tokens of each sequence")
        drawn = [*self.metrics, *([self.quality.metric] if self.quality else [])]
        for index, plot in enumerate(self.plots):
            check(f"plots.{index}.metric", [plot.metric], drawn)
            check(f"plots.{index}.panels", [plot.panels], self.axes)
            check(f"plots.{index}.x", [plot.x], drawn if plot.kind == "pareto" else self.axes)
            if plot.kind == "lines" and self.x_axis(plot) is None:
                raise ValueError(f"plots.{index}: lines need an axis of numbers; add one to `axes`, or draw bars")
            if plot.kind == "pareto" and plot.x is None:
                raise ValueError(f"plots.{index}: pareto needs `x`, a second metric: {', '.join(drawn)}")
            if plot.kind == "waterfall" and not self.ladder:
                raise ValueError(f"plots.{index}: a waterfall shows the rungs of a ladder; set `ladder: true`")
        if self.executed is not None:
            check("executed.variants", self.executed.variants, self.variants)
            check("executed.leave_out", self.executed.leave_out, self.variants)
            check("executed.axes", self.executed.axes, self.axes)
        check("quality.keys", self.quality.keys if self.quality else (), self.variants)
        return self

    def metric_named(self, name: str) -> Metric:
        """One of the study's metrics, measured quality included. Raises ValueError for an unknown name."""
        if self.quality is not None and name == self.quality.metric:
            return Metric(name, name.replace("_", " "), "", is_better_low=True)
        return study_metric(name)

    @property
    def all_metrics(self) -> list[str]:
        """The requested metrics, and the measured quality if any."""
        quality = [self.quality.metric] if self.quality is not None else []
        return list(dict.fromkeys([*self.metrics, *quality]))

    def x_axis(self, plot: PlotSpec) -> str | None:
        """The axis that lines are drawn over."""
        if plot.x is not None:
            return plot.x
        return next((name for name, axis in self.axes.items() if axis.is_numeric), None)

    @property
    def reference(self) -> str:
        """The `baseline` variant, or the first."""
        return self.baseline or next(iter(self.variants))


@dataclass(frozen=True)
class StudyFile:
    """A study with its file and the positions of its fields. base: the scenario of its points"""

    path: pathlib.Path
    study: Study
    base: Point
    executed_base: Point
    positions: Positions

    def where(self, place: Path) -> str:
        """`file:line: place` for an error message."""
        return f"{self.positions.where(place)}: {'.'.join(map(str, place))}"


def load_study(path_or_name: str | pathlib.Path, overrides: Sequence[str] = ()) -> StudyFile:
    """Load a study from a file, or by name from workloads/scenarios/studies; `overrides` change its base scenario.
    Raises SpecError: `file:line: field: what was found, what is allowed`, one line per mistake."""
    path = find_file("studies", path_or_name)
    loaded = load_yaml(path)
    if not isinstance(loaded.data.get("study", ""), str) or "study" not in loaded.data:
        raise SpecError(
            f"{path}: has no `study: NAME`, so this is not a study; scenarios are for `perfmodel simulate` and "
            f"`perfmodel execute`."
        )
    study = parse(Study, loaded.data, loaded.positions)

    def point(given: str | dict[str, Any], place: tuple[str, ...], changes: tuple[str, ...]) -> Point:
        if isinstance(given, dict):
            return Point(str(path), (), changes, place)
        sibling = path.parent / given
        try:
            file = sibling if is_allowed(sibling) and sibling.is_file() else find_file("scenarios", given)
        except SpecError as error:
            raise SpecError(f"{loaded.positions.where(place)}: {'.'.join(place)}: {error}") from None
        return Point(str(file), (), changes)

    base = executed_base = point(study.base, ("base",), (*as_overrides(study.set), *overrides))
    if study.executed is not None:
        changes = as_overrides(study.executed.set)
        if study.executed.base is None:
            executed_base = replace(base, overrides=(*base.overrides, *changes))
        else:
            executed_base = point(study.executed.base, ("executed", "base"), changes)
    return StudyFile(path, study, base, executed_base, loaded.positions)


Label = int | float | str | bool
At = tuple[Label, ...]  # a label for each axis, in the order of the axes
Key = tuple[str, At]
_T = TypeVar("_T")


@dataclass(frozen=True)
class StudyPoints:
    """Points of a study by (variant, labels of the axes), variants outermost; as its file says or as executed."""

    file: StudyFile
    axes: Mapping[str, AxisSpec]
    points: Mapping[Key, Point]
    is_executed: bool = False

    @property
    def metrics(self) -> tuple[str, ...]:
        return next(iter(self.points.values())).metrics

    def check(self) -> Scenario:
        """Load every variant and axis value once; returns the first scenario. Raises SpecError with its line."""
        first_variant, first_at = next(iter(self.points))
        scenario: Scenario | None = None
        for (variant, at), point in self.points.items():
            changed = sum(label != other for label, other in zip(at, first_at, strict=True))
            if changed + (variant != first_variant) <= 1:
                loaded, _ = self.located(partial(load_point, point))
                scenario = scenario or loaded
        assert scenario is not None  # the first point is always loaded
        return scenario

    def located(self, call: Callable[[], _T]) -> _T:
        """Call `call`; errors of an override get their line in the study's file."""
        try:
            return call()
        except SpecError as error:
            text = str(error)
            places = dict(reversed(list(self._places())))
            for override, place in sorted(places.items(), key=lambda item: -len(item[0])):
                text = text.replace(f"--set {override}:", f"{self.file.where(place)}:")
            raise SpecError(text) from None

    def _places(self) -> Iterator[tuple[str, Path]]:
        """(override, path in the study's file), highest precedence first."""
        study, part = self.file.study, self.file.study.executed if self.is_executed else None
        yield from _texts(study.quick.set, "quick", "set")
        for name in self.axes:
            is_own = part is not None and name in part.axes
            root = ("executed", "axes", name) if is_own else ("axes", name)
            axis = part.axes[name] if part is not None and is_own else study.axes[name]
            for index, label in enumerate(axis.labels):
                for text, (field,) in _texts(axis.overrides(label)):
                    inner: Path = ("settings", str(label), field) if axis.settings else ("values", index)
                    yield text, (*root, *(("multiples", field) if field in axis.multiples else inner))
        for name, setting in study.variants.items():
            if part is not None and name in part.variants:
                yield from _texts(part.variants[name], "executed", "variants", name)
            else:
                yield from _texts(setting, "variants", name)
        yield from _texts(part.set if part is not None else {}, "executed", "set")
        yield from _texts(study.set, "set")

    def answered(self, records: Sequence[Record]) -> "Answers":
        """The points' records, in order, as answers."""
        return Answers(self.file.study, self.axes, dict(zip(self.points, records, strict=True)))


@dataclass(frozen=True)
class Answers:
    """Records by variant and axis labels."""

    study: Study
    axes: Mapping[str, AxisSpec]
    records: Mapping[Key, Record]

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys(variant for variant, _ in self.records))

    @property
    def metrics(self) -> list[str]:
        """Metrics with a value somewhere."""
        values = [pair for record in self.records.values() for pair in record.values.items()]
        return list(dict.fromkeys(name for name, value in values if value is not None))

    @property
    def reference(self) -> str:
        """The study's baseline, or the first variant if the baseline has no answer."""
        there = list(dict.fromkeys(variant for (variant, _), record in self.records.items() if record.values))
        wanted = self.study.reference
        return wanted if wanted in there or not there else there[0]

    def places(self, without: str | None = None) -> Iterator[dict[str, Label]]:
        """Every combination of axis labels, or of all axes but `without`."""
        names = [name for name in self.axes if name != without]
        for labels in product(*(self.axes[name].labels for name in names)):
            yield dict(zip(names, labels, strict=True))

    def value(self, variant: str, at: Mapping[str, Label], metric: str) -> float | None:
        """A metric's value, or None."""
        record = self.records.get((variant, tuple(at[name] for name in self.axes)))
        return None if record is None else record.values.get(metric)

    def gain(self, variant: str, reference: str, at: Mapping[str, Label], metric: Metric) -> float | None:
        """Factor by which `variant` beats `reference` in `metric` at the axis labels `at`; None without either."""
        value, base = self.value(variant, at, metric.key), self.value(reference, at, metric.key)
        return better_by(value, base, metric.is_better_low) if value and base else None

    def line(self, variant: str, metric: str, axis: str, fixed: Mapping[str, Label]) -> list[float | None]:
        """The `metric` of `variant` along `axis`, with the other axes at `fixed`."""
        return [self.value(variant, {**fixed, axis: label}, metric) for label in self.axes[axis].labels]


def simulated_points(file: StudyFile) -> StudyPoints:
    """The points that the study's file describes."""
    study = file.study
    measured = study.quality.metric if study.quality is not None else None  # measured, not evaluated at points
    metrics = tuple(name for name in study.metrics if name != measured)
    return _points(file, file.base, study.variants, study.axes, metrics)


def executed_points(file: StudyFile) -> StudyPoints:
    """The points of the study's `executed` part. Raises SpecError without one."""
    study, part = file.study, file.study.executed
    if part is None:
        raise SpecError(f"{file.path}: has no `executed` part, it can only be simulated; leave --execute out.")
    variants = {
        name: part.variants.get(name, setting) for name, setting in study.variants.items() if name not in part.leave_out
    }
    axes = {name: part.axes.get(name, axis) for name, axis in study.axes.items()}
    metrics = part.metrics or tuple(name for name in study.metrics if basis_by_name(name) == "run")
    return replace(_points(file, file.executed_base, variants, axes, metrics), is_executed=True)


def quick(points: StudyPoints, changes: bool = True) -> StudyPoints:
    """The points at a few values of each axis and, with `changes`, with the study's `quick` part."""
    axes = {name: axis.shortened for name, axis in points.axes.items()}
    kept = {name: set(axis.labels) for name, axis in axes.items()}
    more = points.file.study.quick.set if changes else {}
    shorter = {
        (variant, at): replace(point, overrides=(*point.overrides, *as_overrides(more)))
        for (variant, at), point in points.points.items()
        if all(label in kept[name] for name, label in zip(axes, at, strict=True))
    }
    return replace(points, axes=axes, points=shorter)


def _points(
    file: StudyFile,
    base: Point,
    variants: Mapping[str, Setting],
    axes: Mapping[str, AxisSpec],
    metrics: tuple[str, ...],
) -> StudyPoints:
    study, settings = file.study, dict(variants)
    if study.ladder:  # a rung comes on top of the rungs below
        so_far: Setting = {}
        for name, setting in variants.items():
            settings[name] = so_far = {**so_far, **setting}
    points: dict[Key, Point] = {}
    for (variant, setting), at in product(settings.items(), product(*(axis.labels for axis in axes.values()))):
        moved = [axis.overrides(label) for axis, label in zip(axes.values(), at, strict=True)]
        overrides = (*base.overrides, *(text for item in (*moved, setting) for text in as_overrides(item)))
        points[variant, at] = replace(base, metrics=metrics, overrides=overrides, step=study.step)
    return StudyPoints(file, axes, points)


def _texts(setting: Setting, *root: str) -> list[tuple[str, Path]]:
    """(override, path of its field) pairs."""
    return [(text, (*root, field)) for text, field in zip(as_overrides(setting), setting, strict=True)]


@dataclass(frozen=True)
class StudyPart:
    """The study on one machine. scenario: its first point's; answers: by clock, the authoritative one first"""

    scenario: Scenario
    answers: Mapping[str, Answers]

    @property
    def first(self) -> Answers:
        """The authoritative answers."""
        return next(iter(self.answers.values()))

    @property
    def metrics(self) -> list[str]:
        """The study's metrics evaluated here."""
        records = self.first.records.values()
        return [name for name in self.first.study.all_metrics if any(name in record.values for record in records)]

    @property
    def notes(self) -> list[str]:
        """Distinct notes of the records."""
        records = [record for answers in self.answers.values() for record in answers.records.values()]
        return list(dict.fromkeys(note for record in records for note in record.notes))


@dataclass(frozen=True, repr=False)
class StudyResult(Renderable):
    """All parts of a study: simulated, and executed if requested. is_quick: with few values and the `quick` changes,
    which may give other findings"""

    study: Study
    parts: Sequence[StudyPart]
    notes: Sequence[str] = ()
    is_quick: bool = False

    def columns(self) -> dict[str, NDArray[Any]]:
        """A row per point: `part`, `clock`, `variant`, axis labels, metrics, and `problem`."""
        return columns_of(
            [
                {
                    **{"part": number, "clock": clock, "variant": variant},
                    **dict(zip(answers.axes, map(str, at), strict=True)),
                    **{name: record.values.get(name) for name in self.study.all_metrics},
                    "problem": record.problem,
                }
                for number, part in enumerate(self.parts)
                for clock, answers in part.answers.items()
                for (variant, at), record in answers.records.items()
            ]
        )


def with_quality(answers: Answers, file: StudyFile) -> Answers:
    """`answers` with the study's measured quality. Raises SpecError for a missing or invalid file, or missing entry."""
    quality = file.study.quality
    if quality is None:
        return answers
    measured, values = _measured(file, quality), {}
    for variant, key in quality.keys.items():
        entry: Any = measured
        for part in key.split("/"):
            entry = entry.get(part) if isinstance(entry, Mapping) else None
        value = entry.get(quality.metric) if isinstance(entry, Mapping) else entry
        if not isinstance(value, int | float):
            where = file.where(("quality", "keys"))
            raise SpecError(f"{where}: got {key!r}, which the file has no {quality.metric} for.")
        values[variant] = float(value)
    records = {
        key: replace(record, values={**record.values, quality.metric: values.get(key[0])}) if record.values else record
        for key, record in answers.records.items()
    }
    return replace(answers, records=records)


def quality_note(file: StudyFile) -> str:
    """The quality measurement's own note; empty without one."""
    quality = file.study.quality
    about = _measured(file, quality).get("measured") if quality is not None else None
    if quality is None or not isinstance(about, Mapping):
        return ""
    what = f"{quality.metric.capitalize()}: `{about.get('command')}`, over {about.get('num_tokens'):,} tokens of "
    return f"{what}{about.get('text')}. {about.get('note')}"


def _measured(file: StudyFile, quality: QualitySpec) -> Mapping[str, Any]:
    try:
        document = read_json(file.path.parent / quality.file)
    except (OSError, ValueError) as error:
        raise SpecError(f"{file.where(('quality', 'file'))}: {quality.file} cannot be read ({error}).") from None
    return document if isinstance(document, dict) else {}
