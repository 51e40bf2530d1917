"""`perfmodel calibrate --on vllm SCENARIO...`: whole steps of this device under vLLM, fitted to runs of scenarios."""

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from perfmodel.cost import Calibration
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.evidence.fit.whole_steps import EngineSteps, fit_engine_steps, read_chunks
from perfmodel.specs.scenario import Scenario
from perfmodel_executors.engines.results import CHUNKS, Progress
from perfmodel_executors.engines.run import OnEngine, execute_all_on


def calibrate_on(
    target: str, scenarios: Sequence[tuple[Scenario, str]], progress: Progress | None = None
) -> Calibration:
    """Run (scenario, its model's name) one after another on the engine that `target` names, and fit their steps.
    progress: called with (requests of the current run finished, in all if known). Raises SpecError for several models
    or devices, PerfmodelError for a server, which records no steps, and what `execute_on` raises."""
    first, name = scenarios[0]
    for scenario, model in scenarios[1:]:
        if (model, scenario.hardware) != (name, first.hardware):
            raise SpecError(
                f"got {scenario.name} of {model} on {scenario.hardware.name} beside {first.name} of {name} on "
                f"{first.hardware.name}; a calibration of whole steps is of one model on one device: fit each alone."
            )
    if target.partition(":")[2].startswith("http"):
        raise PerfmodelError(
            f"--on {target}: a server records no steps to fit to; name the vLLM that is installed here, or fit load "
            f"tests of the server: perfmodel calibrate --from FILE... --name NAME."
        )
    with TemporaryDirectory(prefix="perfmodel-calibrate-") as folder:
        outs = [Path(folder, str(number)) for number in range(len(scenarios))]
        runs = [OnEngine(*pair, out) for pair, out in zip(scenarios, outs, strict=True)]
        results = execute_all_on(target, runs, progress)
        chunks = [read_chunks(out / CHUNKS) for out in outs]
    steps = [result.steps for result in results if result.steps is not None]
    fit = fit_engine_steps([EngineSteps(*item) for item in zip((s for s, _ in scenarios), steps, chunks, strict=True)])
    facts = results[0].measured_on or {}
    source = (
        f"{sum(map(len, steps)):,} whole steps of vLLM {facts['versions']['vllm']} ({facts['device']}, "
        f"{facts['num_threads']} threads) with {first.model.name}, in {len(runs)} runs: "
        f"{', '.join(scenario.name for scenario, _ in scenarios)}. Steps left out are predicted within "
        f"{fmean(map(abs, fit.errors)):.1%} on average; single fractions are not identified"
    )
    command = f"perfmodel calibrate --on {target.partition(':')[0]} {' '.join(s.name for s, _ in scenarios)}"
    return fit.calibration.model_copy(update={"source": source, "date": date.today(), "command": command})
