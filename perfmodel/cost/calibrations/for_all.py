"""Fits shared by devices: expert popularity, exchanges of expert parallelism, sparse attention, common kernel errors.

`routing.yaml` (`perfmodel calibrate --routing`), one number for all models: the dispersion of expert popularity.
Weights of unused experts are not read, so steps of mixtures of experts grow less with batch than under uniform routing.
Only that growth is fitted, within deployments; offsets at all sizes have other causes. An expert that stands for m
finer ones has an m-th of the relative variance of one (a sum of m equal, independent shares): phi = phi(128) E / 128.

`exchange.yaml` (`--exchange`): dispatch and combine where a switch joins the ranks, for all devices: figures of two
publishers for kernels that send a token once to each rank, tables for those of DeepEP, which send it to nodes (normal)
or experts (low latency).

`kernel_errors.yaml` (`--kernel-errors`): the share of a fit's residuals common to all calls of a kernel in a run.
Residuals cover all shapes of a table; a run has those of one model. Errors of a shape at all batches and lengths
persist within a run, others average out.

All are in `hardware_specs/calibrations/`."""

from pydantic import Field

from perfmodel.cost.kernel_models.device import DeviceFacts
from perfmodel.cost.kernel_models.messages.collective import ExchangeFit
from perfmodel.cost.kernel_models.roofline import FamilyFit
from perfmodel.files.catalog import data_dir
from perfmodel.files.fitted import CommittedFits, load_fitted
from perfmodel.models.architecture import MoEFFN
from perfmodel.ops import routing
from perfmodel.specs.architectures import generations_between
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.traffic import ExpertRouting

_EXPERTS = 128


class RoutingFit(CommittedFits):
    """dispersion: variance of an expert's chance to be chosen, in units of its mean squared, among 128 experts."""

    dispersion: float = Field(default=0.0, ge=0, le=10)

    def among(self, num_experts: int) -> float:
        """The dispersion for `num_experts`."""
        return self.dispersion * num_experts / _EXPERTS

    def routing(self, num_redundant: int | None = None, ranks_per_node: int | None = None) -> routing.Routing:
        """Load of the most loaded rank, for any number of experts; see `dispersed_routing`."""

        def route(ffn: MoEFFN, num_tokens: int, num_ranks: int) -> routing.ExpertLoad:
            dispersion = self.among(ffn.num_experts)
            return routing.dispersed_routing(dispersion, num_redundant, ranks_per_node)(ffn, num_tokens, num_ranks)

        return route


def load_routing_fit() -> RoutingFit:
    """The committed fit; uniform routing without one."""
    file = data_dir("calibrations") / "routing.yaml"
    return load_fitted(RoutingFit, file) if file.is_file() else RoutingFit()


def balance_notes(scenario: Scenario, engine: EngineSpec) -> list[str]:
    """Sentences on what of `engine.enable_eplb` changes no time under the scenario's routing."""
    spec = scenario.routing
    if not engine.enable_eplb:
        return []
    if spec.capacity_factor is not None:
        why = "routing.capacity_factor gives every expert as many tokens"
    elif _is_uniform(spec, engine):
        why = "all experts are equally popular; set routing.distribution to trained, power_law or recorded"
    elif fields := sorted(engine.eplb_config.model_fields_set - {"num_redundant_experts"}):
        return [
            f"eplb_config.{' and '.join(fields)}: no effect on times, since how popular experts are does not change."
        ]
    else:
        return []
    return [f"enable_eplb changes nothing here: {why}."]


def _is_uniform(spec: ExpertRouting, engine: EngineSpec) -> bool:
    fields = (spec.alpha, spec.popularity, spec.dispersion)
    return spec.distribution == "uniform" or (engine.profile == "datasheet" and all(value is None for value in fields))


def routing_of(scenario: Scenario, fit: RoutingFit | None = None) -> routing.Routing:
    """The slowest rank's load in `scenario`. Placement gains nothing for equal experts. fit: instead of the committed
    one"""
    spec, engine = scenario.routing, scenario.engine
    if spec.capacity_factor is not None:
        return routing.with_capacity(spec.capacity_factor)
    num_redundant = engine.eplb_config.num_redundant_experts if engine.enable_eplb else None
    ranks_per_node = scenario.hardware.devices_per_node
    if spec.alpha is not None or spec.popularity is not None:
        return routing.skewed_routing(spec, num_redundant, ranks_per_node=ranks_per_node)
    if _is_uniform(spec, engine):
        return routing.slowest_uniform_routing
    if spec.dispersion is not None:
        return routing.dispersed_routing(spec.dispersion, num_redundant, ranks_per_node)
    return (fit or load_routing_fit()).routing(num_redundant, ranks_per_node)


class ExchangeFits(CommittedFits):
    """The fits of both directions, and where they come from."""

    dispatch: ExchangeFit
    combine: ExchangeFit
    dispatch_node: ExchangeFit
    combine_node: ExchangeFit
    dispatch_expert: ExchangeFit
    combine_expert: ExchangeFit

    @property
    def by_kernel(self) -> dict[str, ExchangeFit]:
        return {name: fit for name, fit in self if isinstance(fit, ExchangeFit)}


def load_exchange_fits() -> ExchangeFits:
    """The committed fits. Raises SpecError for a file that is missing or malformed."""
    return load_fitted(ExchangeFits, data_dir("calibrations") / "exchange.yaml")


class SparseAttentionFits(CommittedFits):
    """`sparse_attention.yaml` (`benchmarks/sparse_attention.py`): prompts' attention to chosen keys of 512 elements.
    kernels: by architecture and engine, `overhead_per_item_s` of a thread block alone on a compute unit"""

    kernels: dict[str, FamilyFit] = Field(min_length=1)

    def of(self, hardware: HardwareSpec, engine: str) -> FamilyFit:
        """The fit of the architecture nearest to a device's, of `engine` if it has one there, else vLLM's."""
        steps = {key: generations_between(hardware.declared.architecture, key.split("/")[0]) for key in self.kernels}
        near = {key: (far is not None, -(far or 0), key.endswith(f"/{engine}"), key) for key, far in steps.items()}
        fit = self.kernels[max(near, key=near.__getitem__)]
        item_s = fit.overhead_per_item_s / DeviceFacts.of(hardware).compute_units
        return fit.model_copy(update={"overhead_per_item_s": item_s})


class KernelErrors(CommittedFits):
    """common: by operator family, the standard deviation that all calls share over that of the residuals"""

    common: dict[str, float] = Field(min_length=1)

    def of(self, family: str) -> float:
        """The share of a family; without one, the mean of its kind (all attention), else of all."""
        if family in self.common:
            return self.common[family]
        kind = family.split("_")[0]
        alike = [share for name, share in self.common.items() if name.split("_")[0] == kind]
        shares = alike or list(self.common.values())
        return sum(shares) / len(shares)


def load_kernel_errors() -> KernelErrors:
    """The committed shares. Raises SpecError for a file that is missing or malformed."""
    return load_fitted(KernelErrors, data_dir("calibrations") / "kernel_errors.yaml")
