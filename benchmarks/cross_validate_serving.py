"""Engine profiles on models and devices that they were not fitted on.

    python benchmarks/cross_validate_serving.py serving TRUTH/serving/vllm_runs.json
    python benchmarks/cross_validate_serving.py steady-state TRUTH/serving/steady_state.csv.gz

Each fold leaves out the runs of one model, of one device, or of one cell (a model under an engine's version on a device
in a number format), fits the profile's parameters on the rest, and predicts what was left out. Derivatives are taken
once for all folds (the means are all but linear in the parameters); what is left out is simulated with its fold's own
profile. Its 80 % intervals come from what fits leave unexplained of the rest: of steady states, of each of its cells,
left out in turn, and on a device that has no rows in the rest of each of its devices. Kernels' parameters are not
refitted: they come from kernel tables; nor are those of all engines, of which there are four (routing.yaml,
generation@*.yaml).
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from perfmodel.cost import EngineProfile, Residuals, load_engine_profile
from perfmodel.dates import today
from perfmodel.evidence.fit import profiles
from perfmodel.evidence.fit.parameters import LinearErrors, values_of, with_facts
from perfmodel.evidence.observation import Observation, Prediction
from perfmodel.evidence.predict.recorded import shortened_stages, simulate_runs, simulate_steady_states
from perfmodel.evidence.report import Rows
from perfmodel.evidence.sources.recorded import read_serving_runs
from perfmodel.evidence.sources.steady import read_steady_states


class HeldOut(NamedTuple):
    """A mean of a run that its fold's fit has not seen; the ends of its 80 % interval are factors of the prediction."""

    predicted: float
    measured: float
    group: str
    low: float
    high: float


Errors = dict[str, list[HeldOut]]  # by metric
_NO_INTERVAL = (float("nan"), float("nan"))
_CUTS: dict[str, Callable[[Any], str]] = {
    "model": lambda scenario: scenario.model.name,
    "device": lambda scenario: scenario.hardware.name,
    "cell": profiles.config_key,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("serving", "steady-state"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--engine", action="append", help="only this one (may be given several times)")
    parser.add_argument("--cut", action="append", choices=tuple(_CUTS), help="what is left out (default: each in turn)")
    parser.add_argument("--report", type=Path, help="write the tables to this Markdown file, too")
    arguments = parser.parse_args()
    engines = arguments.engine or (["vllm"] if arguments.kind == "serving" else ["sglang", "trtllm", "vllm"])
    judge = _serving if arguments.kind == "serving" else _steady_states
    tables = []
    for cut in arguments.cut or _CUTS:
        pooled: Errors = {}
        for engine in engines:
            result = judge(arguments.path, engine, cut)
            tables.append(_show(f"{engine}, leaving out one {cut} at a time", result))
            for metric, rows in result.items():
                pooled.setdefault(metric, []).extend(rows)
        if len(engines) > 1:
            tables.append(_show(f"all engines, leaving out one {cut} at a time", pooled))
    if arguments.report:
        arguments.report.write_text(_report(arguments, tables), encoding="utf-8")


@cache
def _serving_runs(path: Path, engine: str) -> tuple[list[Observation], list[Observation], LinearErrors]:
    """An engine's runs, whole and shortened for the fit, and what the profile's parameters do to the latter's means."""
    runs = [run for run in read_serving_runs(path)[0] if run.scenario.engine.profile == engine]
    short = shortened_stages(runs, 0.1)
    begin = profiles.starting_profile(with_facts(load_engine_profile(engine)))

    def errors(profile: EngineProfile) -> np.ndarray:
        return profiles.stage_log_errors(simulate_runs(short, profile=profile))

    here = np.log(values_of(begin, profiles.PARAMETERS))  # the committed numbers, near every fold's
    return runs, short, LinearErrors.around(begin, profiles.PARAMETERS, errors, here)


def _serving(path: Path, engine: str, cut: str) -> Errors:
    runs, short, model = _serving_runs(path, engine)
    counts = [len(profiles.stage_log_errors([Prediction(run, run.metrics)])) for run in short]
    groups = np.repeat([_CUTS[cut](run.scenario) for run in runs], counts)
    serving: Errors = {}
    for group in sorted(set(groups)):
        profile = _fitted(model, groups != group)
        rest = [run for run in short if _CUTS[cut](run.scenario) != group]
        residuals = profiles.step_residuals(rest, profile) if rest else Residuals()
        profile = profile.model_copy(update={"latency_residuals": residuals})
        left_out = [run for run in runs if _CUTS[cut](run.scenario) == group]
        for pair in simulate_runs(left_out, profile=profile, intervals=True):
            if not pair.row.is_overloaded:
                _add(serving, pair, group)
    return serving


@cache
def _fitting_rows(path: Path, engine: str) -> tuple[list[Observation], list[Observation], LinearErrors]:
    """An engine's rows at face value, those of them to fit, and what the profile's parameters do to the latter."""
    rows = read_steady_states(path)[0]
    clear = [row for row in rows if row.is_reliable and row.scenario.engine.profile == engine]
    fitted = profiles.fitting_rows(rows, engine)
    begin = with_facts(load_engine_profile(engine))

    def errors(profile: EngineProfile) -> np.ndarray:
        return profiles.steady_log_errors(simulate_steady_states(fitted, profile=profile))

    parameters = profiles.parameters_of(begin, fitted)
    here = np.log(values_of(begin, parameters))  # the committed numbers, near every fold's
    return clear, fitted, LinearErrors.around(begin, parameters, errors, here)


def _steady_states(path: Path, engine: str, cut: str) -> Errors:
    clear, fitted, model = _fitting_rows(path, engine)
    name = _CUTS[cut]
    groups = np.repeat([name(row.scenario) for row in fitted], 2)
    steady_states: Errors = {}
    for group in sorted(set(groups)):
        profile = _fitted(model, groups != group)
        rest = [row for row in fitted if name(row.scenario) != group]
        profile = _with_residuals(profile, model, rest, groups != group)
        left_out = [row for row in clear if name(row.scenario) == group]
        for pair in simulate_steady_states(left_out, profile=profile, intervals=True):
            _add(steady_states, pair, group)
    return steady_states


def _with_residuals(
    profile: EngineProfile, model: LinearErrors, rest: Sequence[Observation], keep: np.ndarray
) -> EngineProfile:
    """What fits without each cell, or each device, leave unexplained of it, of the rows that a fold was fitted to."""
    if not rest:
        nothing = EngineProfile(engine=profile.engine)
        names = ("devices", "tpot_residuals", "ttft_residuals", "tpot_residuals_elsewhere", "ttft_residuals_elsewhere")
        return profile.model_copy(update={name: getattr(nothing, name) for name in names})
    part = replace(model, at_here=model.at_here[keep], slopes=model.slopes[keep])
    return profiles.with_steady_residuals(profile, rest, part)


def _add(found: Errors, pair: Prediction, group: str) -> None:
    for metric, value in pair.metrics.items():
        if metric in pair.row.metrics:
            ends = pair.intervals.get(metric, _NO_INTERVAL)
            found.setdefault(metric, []).append(HeldOut(value, pair.row.metrics[metric], group, *ends))


def _fitted(model: LinearErrors, keep: np.ndarray) -> EngineProfile:
    """The profile fitted on what is kept; with nothing kept, the plausible starting point."""
    if not keep.any():
        return model.profile(model.here)
    return model.profile(model.optimum(keep))


def _show(title: str, found: Errors) -> str:
    """The table of one way of leaving out, printed and returned."""
    lines = [f"{title}: median / mean / p90 absolute error in %, bias, in 80 % interval", ""]
    lines += [f"  {metric:12} {_line(rows)}" for metric, rows in found.items()]
    groups = sorted({row.group for rows in found.values() for row in rows})
    lines += [_of_groups(metric, rows, groups) for metric, rows in found.items()]
    for group in groups:
        lines.append(f"  without {group}:")
        lines += [
            f"    {metric:12} {_line([row for row in rows if row.group == group])}" for metric, rows in found.items()
        ]
    text = "\n".join(lines)
    print(f"\n{text}", flush=True)
    return text


def _of_groups(metric: str, rows: Sequence[HeldOut], groups: Sequence[str]) -> str:
    """Each group counts once: median and p90 over groups of the median error in each."""
    errors = [[abs(row.predicted / row.measured - 1) for row in rows if row.group == group] for group in groups]
    middle, most = np.quantile([np.median(error) for error in errors], [0.5, 0.9])
    return f"  {metric:12} {len(groups)} left out: median {middle:.1%} and p90 {most:.1%} of their medians"


def _report(arguments: argparse.Namespace, tables: Sequence[str]) -> str:
    cuts = "".join(f" --cut {cut}" for cut in arguments.cut or ())
    data = arguments.path.name.split(".")[0]
    command = f"python benchmarks/cross_validate_serving.py {arguments.kind} <{data}>{cuts}"
    head = f"# Held out: {arguments.kind}\n\nWritten by `{command}` on {today()}.\n\n{_about()}\n"
    return head + "".join(f"\n```\n{table}\n```\n" for table in tables)


def _about() -> str:
    assert __doc__ is not None
    return __doc__.strip().rpartition("\n\n")[2]


def _line(rows: Sequence[HeldOut]) -> str:
    predicted, measured, labels, low, high = zip(*rows, strict=True)
    stats = Rows(predicted, measured, labels, (low, high)).stats()
    coverage = "" if stats.interval_coverage is None else f"  {stats.interval_coverage:4.0%}"
    errors = f"{stats.median_ape * 100:5.1f} /{stats.mean_ape * 100:5.1f} /{stats.p90_ape * 100:5.1f}"
    return f"{errors} {stats.bias:+.2f}{coverage}"


if __name__ == "__main__":
    main()
