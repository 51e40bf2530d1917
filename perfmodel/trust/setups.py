"""`MeasuredSetup`: what a scenario and a measurement are compared by, to say how near they are to each other."""

__all__ = ["SIZES", "MeasuredSetup", "setup_of"]

from functools import lru_cache
from typing import NamedTuple

from perfmodel.models.architecture import (
    Attention,
    GatedDeltaNet,
    LatentAttention,
    LinearAttention,
    Mamba,
    Mixer,
    MoEFFN,
)
from perfmodel.models.params import count_parameters
from perfmodel.models.spec import ModelSpec
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.traffic import Lengths

SIZES = ("total_b", "active_b", "devices", "input_tokens", "output_tokens", "concurrency")


class MeasuredSetup(NamedTuple):
    """A deployment and its load, as far as measurements of others tell of it.

    device:        and the CPU that holds the other layers, where it has only some: "rtx-4090 + ryzen-9-7950x"
    family:        the kinds of the model's layers: "dense, attention", "mixture of experts, latent attention"
    weights:       their number format; separate: whether prompts and answers have workers of their own
    total_b, active_b: parameters in billions, all and of a token
    devices:       of an engine that answers
    input_tokens, output_tokens: means of a request; 0 where a trace has them, or conversations that grow
    concurrency:   requests in flight in a closed loop or at most, 0 where arrivals decide
    """

    device: str
    architecture: str
    engine: str
    version: str
    model: str
    family: str
    weights: str
    separate: bool
    total_b: float
    active_b: float
    devices: float
    input_tokens: float = 0.0
    output_tokens: float = 0.0
    concurrency: float = 0.0


def setup_of(scenario: Scenario) -> MeasuredSetup:
    """The setup of a scenario; of separate workers that of those which decode."""
    pool = next((pool for pool in scenario.pools if pool.role != "prefill" and not pool.shadow), scenario.pools[0])
    model, engine, traffic = pool.model or scenario.model, pool.engine, scenario.traffic
    family, total, active = _sizes(model)
    concurrency = traffic.arrivals.concurrency if traffic.arrivals.process == "closed_loop" else None
    hardware = pool.hardware or scenario.hardware
    return MeasuredSetup(
        device=hardware.name if engine.cpu is None else f"{hardware.name} + {engine.cpu}",
        architecture=hardware.declared.architecture or "",
        engine=engine.profile,
        version=engine.described.version.described,
        model=model.name,
        family=family,
        weights=model.quantization.weights or model.dtype,
        separate=scenario.cluster.is_disaggregated,
        total_b=total / 1e9,
        active_b=active / 1e9,
        devices=float(engine.num_devices),
        input_tokens=0.0 if traffic.has_conversations else _mean(traffic.input_tokens),
        output_tokens=_mean(traffic.output_tokens),
        concurrency=float(concurrency or 0.0),
    )


def _mean(lengths: Lengths | None) -> float:
    """In tokens; 0 where a file has them."""
    return (lengths.mean_tokens or 0.0) if lengths is not None else 0.0


@lru_cache(maxsize=256)
def _sizes(model: ModelSpec) -> tuple[str, int, int]:
    """The model's family, and its parameters, all and of a token."""
    layers = [layer for layer, _ in model.layers]
    sparse = any(isinstance(layer.ffn, MoEFFN) for layer in layers)
    mixers = sorted({_kind(layer.mixer) for layer in layers if layer.mixer is not None})
    counted = count_parameters(model)
    return f"{'mixture of experts' if sparse else 'dense'}, {' and '.join(mixers)}", counted.total, counted.active


def _kind(mixer: Mixer) -> str:
    match mixer:
        case LatentAttention():
            return "latent attention" if mixer.indexer is None else "sparse latent attention"
        case GatedDeltaNet():
            return "gated delta rule"
        case Mamba():
            return "state space"
        case LinearAttention():
            return "linear attention"
        case Attention():
            return "attention"
