"""Fits what serving at a fixed concurrency determines of an engine: steps with prompts, synchronous hosts, graphs.

Time to first token at low concurrency is the front end and one step with a prompt; time per output token at low
concurrency is a step's fixed costs, which the kernels' tables have too high where they were timed launch by launch.

What a profile leaves unexplained is what it does where it has not been: its residuals are those of whole cells (a model
under an engine's version on a device in a number format) that each fit leaves out, and for devices that no row is of
those of whole devices.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost import EngineProfile, Residuals, load_calibration
from perfmodel.cost.calibrations.routing import RoutingFit
from perfmodel.cost.calibrations.unmeasured import GenerationFit
from perfmodel.errors import SpecError
from perfmodel.evidence.fit.forms import (
    STEP_PARAMETERS,
    LinearErrors,
    Parameter,
    fit_parameters,
    of_one_more,
    residuals_of,
    values_of,
)
from perfmodel.evidence.predict.steady import SteadyStatePair, simulate_steady_states
from perfmodel.evidence.sources.steady import SteadyState, with_dispersion
from perfmodel.models.architecture import LatentAttention, MoEFFN
from perfmodel.specs import Scenario

Floats = NDArray[np.float64]

# Of every engine: a step's launches beside CUDA graphs, per layer and what layers of experts and of latent attention
# add; what a replayed graph leaves of the experts' launches; tokenisation. What a step has beside its layers is little:
# rows of models that all have some sixty layers would not tell the two apart, and take both to smaller models.
_OF_PROMPTS = (
    Parameter("host.prompt_step_s", 3e-3, 1e-4, 1e-1),
    Parameter("host.hidden_prompt_step_s", 1e-2, 1e-4, 2e-2),
    Parameter("host.hidden_prompt_layer_s", 5e-4, 1e-5, 5e-3),
    Parameter("host.hidden_prompt_moe_layer_s", 5e-4, 1e-5, 5e-3),
    Parameter("graph_kernel_s", 2.5e-6, 5e-7, 1e-5),
    Parameter("server.in_per_prompt_token_s", 3e-6, 1e-7, 2e-5),
)
# Begins where launches show behind the device: below, nothing would move it.
_OF_LATENTS = (Parameter("host.hidden_prompt_latent_layer_s", 2e-3, 1e-5, 1e-2),)
# Hidden beside the device when scheduled asynchronously; seen where an engine plans synchronously.
HIDDEN_PARAMETERS = (
    Parameter("host.hidden_step_s", 1e-3, 5e-5, 5e-3),
    Parameter("host.hidden_per_sequence_s", 1e-5, 2e-7, 1e-4),
)
# Known from serving runs where an engine has any.
_OF_STEPS = (
    *STEP_PARAMETERS,
    Parameter("server.in_s", 1e-2, 3e-4, 8e-2),
)
_WEIGHTS = {"tpot": 1.0, "ttft": 0.4}
_MOST_ROWS_profile = 60
_MOST_CONCURRENCY_profile = 32  # larger batches take long to simulate and depend on kernels


def fit_steady_profile(
    begin: EngineProfile,
    rows: Sequence[SteadyState],
    *,
    most_rows: int = _MOST_ROWS_profile,
    progress: Callable[[int, int], None] | None = None,
) -> EngineProfile:
    """The profile of an engine that explains mean TTFT and TPOT of its rows best; the rest is that of `begin`.

    What rows at face value do not determine is then fitted to the time to first token of rows that may be speculated.
    """
    mine = fitting_rows(rows, begin.engine, most_rows)
    parameters = parameters_of(begin, mine)

    def errors(profile: EngineProfile) -> Floats:
        return log_errors(simulate_steady_states(mine, profile=profile))

    best = fit_parameters(begin, parameters, errors, progress=progress)
    best = _with_the_undetermined(best, parameters, rows, most_rows)
    model = LinearErrors.around(begin, parameters, errors, np.log(values_of(best, parameters)))
    return with_steady_residuals(best, mine, model)


def with_steady_residuals(
    profile: EngineProfile, rows: Sequence[SteadyState], model: LinearErrors[EngineProfile]
) -> EngineProfile:
    """`profile` with what fits leave unexplained of cells and of devices that they were not fitted to.

    rows, model: what the profile was fitted to, and the model of its errors
    """
    devices = sorted({row.scenario.hardware.name for row in rows})
    update = {"devices": tuple(devices)} | _residuals(rows, model, cell_of)
    if len(devices) > 1:
        elsewhere = _residuals(rows, model, lambda scenario: scenario.hardware.name)
        update |= {f"{name}_elsewhere": residuals for name, residuals in elsewhere.items()}
    return profile.model_copy(update=update)


def _residuals(
    rows: Sequence[SteadyState], model: LinearErrors[EngineProfile], group_of: Callable[[Scenario], str]
) -> dict[str, Residuals]:
    """What fits leave of the groups that each leaves out, as it is to be expected of one more cell."""
    groups = np.repeat([group_of(row.scenario) for row in rows], len(_WEIGHTS))
    num_cells = len({cell_of(row.scenario) for row in rows})
    found = _steady_residuals(rows, model.held_out(groups))
    return {name: of_one_more(residuals, num_cells) for name, residuals in found.items()}


def _with_the_undetermined(
    fitted: EngineProfile, parameters: Sequence[Parameter], rows: Sequence[SteadyState], most_rows: int
) -> EngineProfile:
    """`fitted` with what its `parameters` lack and rows determine whose decodes may be speculated."""
    suspected = _of_each_cell([row for row in rows if row.knows_lengths and not row.is_clear], fitted.engine, most_rows)
    lacking = [each for each in _of_layers(suspected) if each not in parameters]

    def errors(profile: EngineProfile) -> Floats:
        return log_errors(simulate_steady_states(suspected, profile=profile))

    return fit_parameters(fitted, lacking, errors) if lacking else fitted


def cell_of(scenario: Scenario) -> str:
    """The model, engine with its version, device and number format that a row has in common with others."""
    engine, quantization = scenario.engine, scenario.model.quantization
    return " ".join((scenario.model.name, engine.described.label, scenario.hardware.name, str(quantization.weights)))


def _steady_residuals(rows: Sequence[SteadyState], errors: Floats) -> dict[str, Residuals]:
    """What a profile leaves unexplained of `rows`; of steps, which are kernels mostly, in units of how far fits come.

    errors: as of `log_errors`, of a profile that was not fitted to the row's cell
    """
    spread = np.array([_spread(row) for row in rows])
    found = {}
    for place, (metric, weight) in enumerate(_WEIGHTS.items()):
        factors = np.exp(errors[place :: len(_WEIGHTS)] / weight)
        units = spread if metric == "tpot" else np.ones(len(rows))
        found[f"{metric}_residuals"] = residuals_of(factors, np.ones(len(rows)), units)
    return found


def _spread(row: SteadyState) -> float:
    scenario = row.scenario
    return load_calibration(scenario.hardware, scenario.engine.profile).spread


def parameters_of(begin: EngineProfile, rows: Sequence[SteadyState]) -> list[Parameter]:
    """The parameters of an engine that `rows` determine and nothing else has."""
    parameters = [*_OF_PROMPTS, *_of_layers(rows)]
    if not all(row.scenario.engine.async_scheduling for row in rows):
        parameters += HIDDEN_PARAMETERS
    if not begin.latency_residuals.num_rows:
        parameters += _OF_STEPS
    return parameters


def _of_layers(rows: Sequence[SteadyState]) -> tuple[Parameter, ...]:
    """The parameters of kinds of layers that not all models have, as far as `rows` have them."""
    has_latents = any(
        isinstance(layer.mixer, LatentAttention) for row in rows for layer, _ in row.scenario.model.layers
    )
    return _OF_LATENTS if has_latents else ()


def fitting_rows(rows: Sequence[SteadyState], engine: str, most: int = _MOST_ROWS_profile) -> list[SteadyState]:
    """Rows of `engine` that can be taken at face value and are quickly simulated, the same number of each cell."""
    return _of_each_cell([row for row in rows if row.is_clear], engine, most)


def _of_each_cell(rows: Sequence[SteadyState], engine: str, most: int) -> list[SteadyState]:
    groups: dict[str, list[SteadyState]] = {}
    for row in rows:
        concurrency = row.scenario.traffic.arrivals.concurrency or 0
        if row.scenario.engine.profile == engine and concurrency <= _MOST_CONCURRENCY_profile:
            groups.setdefault(cell_of(row.scenario), []).append(row)
    chosen: list[SteadyState] = []
    for members in groups.values():
        step = max(1, len(members) * len(groups) // most)
        chosen += members[::step]
    return chosen


def log_errors(pairs: Sequence[SteadyStatePair]) -> Floats:
    """Weighted log(predicted / measured) of TPOT and TTFT in turn; 0 of rows that cannot be simulated, and of TPOT
    where speculation is suspected."""
    errors = []
    for pair in pairs:
        for metric, weight in _WEIGHTS.items():
            is_known = pair.ttft_ms is not None and pair.tpot_ms is not None
            is_known &= pair.row.is_clear or metric == "ttft"
            ratio = pair.predicted(f"{metric}_mean") / pair.measured(f"{metric}_mean") if is_known else 1.0
            errors.append(weight * np.log(ratio))
    return np.array(errors)


Progress = Callable[[int, int], None]
# Around what the fastest matrix products found leave: 1745 of 2250 TFLOP/s on a B200, 794.5 of 989 on an H100 (bf16,
# stas00/ml-engineering, "Maximum Achievable Matmul FLOPS"). Prompts that take longer have other reasons.
_COMPUTE = Parameter("compute", 0.966, 0.87, 1.06)
_OF_4_BITS = (Parameter("four_bit_memory", 0.8, 0.3, 1.0), Parameter("four_bit_launch_s", 1e-6, 1e-7, 1e-5))
_DISPERSION = Parameter("dispersion", 0.5, 0.01, 5.0)
_ROUNDS = 2
_MOST_CONCURRENCY_generation = 16  # of the fit of a generation: larger batches take long to simulate
_MOST_SLOTS = 128  # of the fit of routers, which is about how steps grow
_MOST_ROWS_generation = 48


def fit_generation(
    architecture: str, rows: Sequence[SteadyState], *, progress: Progress | None = None
) -> GenerationFit:
    """The fit of `architecture` from the rows on its devices that can be taken at face value.

    Raises SpecError where there are none.
    """
    mine = [row for row in rows if row.scenario.hardware.declared.architecture == architecture]
    mine = _some_of_each(mine, _MOST_CONCURRENCY_generation)
    if not mine:
        raise SpecError(f"no rows on devices of architecture {architecture!r} to fit")
    begin = GenerationFit(architecture=architecture)
    parameters = [_COMPUTE, *(_OF_4_BITS if any(map(_multiplies_4_bits, mine)) else ())]

    def errors(generation: GenerationFit) -> Floats:
        return log_errors(simulate_steady_states(mine, generation=generation))

    best = fit_parameters(begin, parameters, errors, rounds=_ROUNDS, progress=progress)
    values = dict(zip((p.field for p in parameters), values_of(best, parameters), strict=True))
    return best.model_copy(update={name: float(f"{value:.4g}") for name, value in values.items()})


def _multiplies_4_bits(row: SteadyState) -> bool:
    """Whether dense layers are in NVFP4."""
    model = row.scenario.model
    return model.quantization.weights == "nvfp4" and not _num_experts(row)


def _num_experts(row: SteadyState) -> int:
    """Experts of the largest block; 0 of a dense model."""
    blocks = [layer.ffn for layer, _ in row.scenario.model.layers]
    return max((block.num_experts for block in blocks if isinstance(block, MoEFFN)), default=0)


def fit_popularity(rows: Sequence[SteadyState], *, progress: Progress | None = None) -> RoutingFit:
    """The dispersion of experts' popularity from rows of mixtures of experts that can be taken at face value.

    Raises SpecError where there are none.
    """
    mine = _some_of_each([row for row in rows if _num_experts(row)], _MOST_SLOTS)
    if not mine:
        raise SpecError("no rows of mixtures of experts to fit")
    cells = np.array([" ".join((cell_of(row.scenario), *_degrees(row))) for row in mine])

    def errors(fit: RoutingFit) -> Floats:
        pairs = simulate_steady_states([with_dispersion(row, fit.among(_num_experts(row))) for row in mine])
        of_steps = log_errors(pairs)[::2]
        for cell in np.unique(cells):
            of_steps[cells == cell] -= np.median(of_steps[cells == cell])
        return of_steps

    best = fit_parameters(RoutingFit(), [_DISPERSION], errors, rounds=_ROUNDS, progress=progress)
    return best.model_copy(update={"dispersion": float(f"{best.dispersion:.3g}")})


def _degrees(row: SteadyState) -> tuple[str, ...]:
    """Steps of other parallel degrees are too long or too short by other parts."""
    engine = row.scenario.engine
    return str(engine.tensor_parallel_size), str(engine.data_parallel_size), str(engine.enable_expert_parallel)


def _some_of_each(rows: Sequence[SteadyState], most_concurrency: int) -> list[SteadyState]:
    """Rows that can be taken at face value, about as many of each cell."""
    cells: dict[str, list[SteadyState]] = {}
    for row in rows:
        if row.is_clear and (row.scenario.traffic.arrivals.concurrency or 0) <= most_concurrency:
            cells.setdefault(cell_of(row.scenario), []).append(row)
    chosen: list[SteadyState] = []
    for members in cells.values():
        chosen += members[:: max(1, len(members) * len(cells) // _MOST_ROWS_generation)]
    return chosen
