"""Fits what steady states determine of kernels, for all engines: of a generation of devices, and of trained routers.

A generation leaves some of the achieved tensor rate of the one before: time to first token of long prompts is compute,
and with the engines' profiles fitted on all devices, what is left on a generation's own rows is its kernels'. Dense
products of 4-bit operands, for which no kernel table is at hand, have a bandwidth and a launch of their own: decode
steps of models in NVFP4 are little else.

How unequally popular experts are shows in how steps grow with their batch, whatever else a deployment's steps are too
long or too short by: errors are taken within cells.
"""

__all__ = ["fit_generation", "fit_popularity"]

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from perfmodel.calibrate.profile_fit import Parameter, fit_parameters, values_of
from perfmodel.calibrate.steady.profile import cell_of, log_errors
from perfmodel.calibrate.steady.simulation import simulate_steady_states
from perfmodel.calibrate.steady.states import SteadyState, with_dispersion
from perfmodel.cost.calibrations.files import GenerationFit
from perfmodel.cost.calibrations.for_all import RoutingFit
from perfmodel.errors import SpecError
from perfmodel.models.architecture import MoEFFN

Floats = NDArray[np.float64]
Progress = Callable[[int, int], None]
# Around what the fastest matrix products found leave: 1745 of 2250 TFLOP/s on a B200, 794.5 of 989 on an H100 (bf16,
# stas00/ml-engineering, "Maximum Achievable Matmul FLOPS"). Prompts that take longer have other reasons.
_COMPUTE = Parameter("compute", 0.966, 0.87, 1.06)
_OF_4_BITS = (Parameter("four_bit_memory", 0.8, 0.3, 1.0), Parameter("four_bit_launch_s", 1e-6, 1e-7, 1e-5))
_DISPERSION = Parameter("dispersion", 0.5, 0.01, 5.0)
_ROUNDS = 2
_MOST_CONCURRENCY = 16  # of the fit of a generation: larger batches take long to simulate
_MOST_SLOTS = 128  # of the fit of routers, which is about how steps grow
_MOST_ROWS = 48


def fit_generation(
    architecture: str, rows: Sequence[SteadyState], *, progress: Progress | None = None
) -> GenerationFit:
    """The fit of `architecture` from the rows on its devices that can be taken at face value.

    Raises SpecError where there are none.
    """
    mine = [row for row in rows if row.scenario.hardware.declared.architecture == architecture]
    mine = _some_of_each(mine, _MOST_CONCURRENCY)
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
        chosen += members[:: max(1, len(members) * len(cells) // _MOST_ROWS)]
    return chosen
