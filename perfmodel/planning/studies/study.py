"""From a study to its points, and from their records to answers by variant and axis, with measured quality beside."""

__all__ = [
    "Answers",
    "At",
    "Label",
    "StudyPart",
    "StudyPoints",
    "StudyResult",
    "executed_points",
    "quality_note",
    "quick",
    "simulated_points",
    "with_quality",
]

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, TypeVar

from numpy.typing import NDArray

from perfmodel.errors import SpecError
from perfmodel.files.reach import read_json
from perfmodel.files.yaml_loader import Path
from perfmodel.planning.metrics import basis_by_name
from perfmodel.planning.studies.spec import AxisSpec, BaseScenario, Setting, Study, StudyFile
from perfmodel.planning.sweeps.points import Point, Record, load_point
from perfmodel.printable import Printable, columns_of
from perfmodel.specs.overrides import as_overrides
from perfmodel.specs.scenario import Scenario

Label = int | float | str | bool
At = tuple[Label, ...]  # a label for each axis, in the order of the axes
Key = tuple[str, At]
_T = TypeVar("_T")


@dataclass(frozen=True)
class StudyPoints:
    """A study's points in one setting: as its file says, or as it is executed.

    points: (variant, labels of the axes) -> point, variants outermost
    places: an override's text -> where it stands in the file
    """

    file: StudyFile
    axes: Mapping[str, AxisSpec]
    points: Mapping[Key, Point]
    places: Mapping[str, Path]

    @property
    def metrics(self) -> tuple[str, ...]:
        return next(iter(self.points.values())).metrics

    def check(self) -> Scenario:
        """Load every variant and every value of an axis once; returns the scenario of the first point.

        Raises SpecError with the line of the study's file that is at fault.
        """
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
        """What `call` returns; a mistake in an override is reported with its line in the study's file."""
        try:
            return call()
        except SpecError as error:
            text = str(error)
            for override, place in sorted(self.places.items(), key=lambda item: -len(item[0])):
                text = text.replace(f"--set {override}:", f"{self.file.where(place)}:")
            raise SpecError(text) from None

    def answered(self, records: Sequence[Record]) -> "Answers":
        """The points' records, in their order, as answers."""
        return Answers(self.file.study, self.axes, dict(zip(self.points, records, strict=True)))


@dataclass(frozen=True)
class Answers:
    """Records by variant and labels of the axes."""

    study: Study
    axes: Mapping[str, AxisSpec]
    records: Mapping[Key, Record]

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys(variant for variant, _ in self.records))

    @property
    def reference(self) -> str:
        """The study's baseline, or the first variant where that one was not asked or has no answer."""
        there = [
            variant for variant in self.variants if any(r.values for (v, _), r in self.records.items() if v == variant)
        ]
        wanted = self.study.reference
        return wanted if wanted in there or not there else there[0]

    def places(self, without: str | None = None) -> Iterator[dict[str, Label]]:
        """Every combination of labels of the axes, or of the axes but one."""
        names = [name for name in self.axes if name != without]
        for labels in product(*(self.axes[name].labels for name in names)):
            yield dict(zip(names, labels, strict=True))

    def record(self, variant: str, at: Mapping[str, Label]) -> Record:
        return self.records[variant, tuple(at[name] for name in self.axes)]

    def value(self, variant: str, at: Mapping[str, Label], metric: str) -> float | None:
        """A metric, None where there is none."""
        return self.record(variant, at).values.get(metric)

    def line(self, variant: str, metric: str, axis: str, fixed: Mapping[str, Label]) -> list[float | None]:
        """The metric of `variant` along `axis`, the others at `fixed`."""
        return [self.value(variant, {**fixed, axis: label}, metric) for label in self.axes[axis].labels]


def simulated_points(file: StudyFile) -> StudyPoints:
    """The points that the study's file describes."""
    study = file.study
    metrics = _evaluated(study, study.metrics)
    return _points(file, file.base, study.variants, study.axes, metrics, _base_places(study, ("set",), study.set))


def executed_points(file: StudyFile) -> StudyPoints:
    """The points of the study's `executed` part. Raises SpecError where the study has none."""
    study, part = file.study, file.study.executed
    if part is None:
        raise SpecError(f"{file.path}: has no `executed` part, it can only be simulated; leave --execute out.")
    variants = {
        name: part.variants.get(name, setting) for name, setting in study.variants.items() if name not in part.leave_out
    }
    axes = {name: part.axes.get(name, axis) for name, axis in study.axes.items()}
    metrics = part.metrics or tuple(name for name in study.metrics if basis_by_name(name) == "run")
    places = _base_places(study, ("executed", "set"), part.set)
    return _points(file, file.executed_base, variants, axes, metrics, places)


def quick(points: StudyPoints, changes: bool = True) -> StudyPoints:
    """The same with a few values of each axis, and (`changes`) what the study's `quick` part changes."""
    axes = {name: axis.shortened for name, axis in points.axes.items()}
    kept = {name: set(axis.labels) for name, axis in axes.items()}
    more = points.file.study.quick.set if changes else {}
    places = {**points.places, **{text: ("quick", "set", field) for text, field in _texts(more)}}
    shorter = {
        (variant, at): replace(point, overrides=(*point.overrides, *as_overrides(more)))
        for (variant, at), point in points.points.items()
        if all(label in kept[name] for name, label in zip(axes, at, strict=True))
    }
    return StudyPoints(points.file, axes, shorter, places)


def _points(
    file: StudyFile,
    base: BaseScenario,
    variants: Mapping[str, Setting],
    axes: Mapping[str, AxisSpec],
    metrics: tuple[str, ...],
    places: dict[str, Path],
) -> StudyPoints:
    study = file.study
    points: dict[Key, Point] = {}
    settings = _settings(study, variants, places)
    for name, axis in axes.items():
        places.update(_axis_places(study, name, axis))
    for (variant, setting), at in product(settings.items(), product(*(axis.labels for axis in axes.values()))):
        moved = [axis.overrides(label) for axis, label in zip(axes.values(), at, strict=True)]
        overrides = (*base.overrides, *(text for each in (*moved, setting) for text in as_overrides(each)))
        points[variant, at] = Point(base.path, metrics, overrides, base.inside, study.step)
    return StudyPoints(file, axes, points, places)


def _settings(study: Study, variants: Mapping[str, Setting], places: dict[str, Path]) -> dict[str, Setting]:
    """The overrides of each variant, and their places; those of a ladder's rung come on top of the rungs below."""
    own = study.executed.variants if study.executed is not None else {}
    settings: dict[str, Setting] = {}
    so_far: Setting = {}
    for name, setting in variants.items():
        settings[name] = so_far = {**so_far, **setting} if study.ladder else setting
        root: Path = ("executed", "variants") if setting is own.get(name) else ("variants",)
        places.update({text: (*root, name, field) for text, field in _texts(setting)})
    return settings


def _axis_places(study: Study, name: str, axis: AxisSpec) -> dict[str, Path]:
    is_own = axis is not study.axes.get(name)
    root: Path = ("executed", "axes", name) if is_own else ("axes", name)
    found: dict[str, Path] = {}
    for index, label in enumerate(axis.labels):
        for text, field in _texts(axis.overrides(label)):
            inner: Path = ("settings", str(label), field) if axis.settings else ("values", index)
            found.setdefault(text, (*root, *(("multiples", field) if field in axis.multiples else inner)))
    return found


def _base_places(study: Study, place: Path, setting: Setting) -> dict[str, Path]:
    found: dict[str, Path] = {text: ("set", field) for text, field in _texts(study.set)}
    return found | {text: (*place, field) for text, field in _texts(setting)}


def _texts(setting: Setting) -> list[tuple[str, str]]:
    """(override's text, field) of each."""
    return list(zip(as_overrides(setting), setting, strict=True))


def _evaluated(study: Study, metrics: Sequence[str]) -> tuple[str, ...]:
    """Metrics that come of points: all but a measured quality."""
    measured = study.quality.metric if study.quality is not None else None
    return tuple(name for name in metrics if name != measured)


@dataclass(frozen=True)
class StudyPart:
    """The study asked on one machine. scenario: its first point's; answers: by clock, the one that counts first"""

    scenario: Scenario
    answers: Mapping[str, Answers]

    @property
    def first(self) -> Answers:
        """The answers that count."""
        return next(iter(self.answers.values()))

    @property
    def metrics(self) -> list[str]:
        """The metrics of the study that were asked here."""
        records = self.first.records.values()
        return [name for name in self.first.study.all_metrics if any(name in record.values for record in records)]

    @property
    def notes(self) -> list[str]:
        """What points' records say beside their values, once each."""
        records = [record for each in self.answers.values() for record in each.records.values()]
        return list(dict.fromkeys(note for record in records for note in record.notes))


@dataclass(frozen=True, repr=False)
class StudyResult(Printable):
    """All parts of a study: simulated, and executed here where that was asked for.

    is_quick: of few values and of the changes that the study's `quick` part makes, so that its answer may be another
    """

    study: Study
    parts: Sequence[StudyPart]
    notes: Sequence[str] = ()
    is_quick: bool = False

    def columns(self) -> dict[str, NDArray[Any]]:
        """A row for each point: `part`, `clock`, `variant`, its place on the axes, the metrics, and `problem`."""
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
    """`answers` with the quality that the study's file names, where a variant has one.

    Raises SpecError for a file that is not there, is not JSON, or lacks an entry.
    """
    quality = file.study.quality
    if quality is None:
        return answers
    measured = _read(file, quality.file)
    values = {variant: _value(measured, key, quality.metric, file) for variant, key in quality.keys.items()}
    records = {
        key: replace(record, values={**record.values, quality.metric: values.get(key[0])}) if record.values else record
        for key, record in answers.records.items()
    }
    return replace(answers, records=records)


def quality_note(file: StudyFile) -> str:
    """What the measurement that the study's quality comes from says of itself; nothing without one."""
    quality = file.study.quality
    said = _read(file, quality.file).get("measured") if quality is not None else None
    if quality is None or not isinstance(said, Mapping):
        return ""
    what = f"{quality.metric.capitalize()}: `{said.get('command')}`, over {said.get('num_tokens'):,} tokens of "
    return f"{what}{said.get('text')}. {said.get('note')}"


def _read(file: StudyFile, name: str) -> Mapping[str, Any]:
    path = file.path.parent / name
    try:
        document = read_json(path)
    except (OSError, ValueError) as error:
        raise SpecError(f"{file.where(('quality', 'file'))}: {name} cannot be read ({error}).") from None
    return document if isinstance(document, dict) else {}


def _value(measured: Mapping[str, Any], key: str, metric: str, file: StudyFile) -> float:
    entry: Any = measured
    for part in key.split("/"):
        entry = entry.get(part) if isinstance(entry, Mapping) else None
    value = entry.get(metric) if isinstance(entry, Mapping) else entry
    if not isinstance(value, int | float):
        raise SpecError(f"{file.where(('quality', 'keys'))}: found {key!r}, which the file has no {metric} for.")
    return float(value)
