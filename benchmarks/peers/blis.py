"""BLIS's published law of a step, under our scheduler, on open-loop runs of vLLM.

BLIS (inference-sim/inference-sim, Apache-2.0) is a discrete-event simulator in Go. Stated here is the step time of its
default, `trained-physics`, from sim/latency/trained_physics_model.go @0e28870, with the coefficients that it ships
(inference-sim/blis-registry coefficients/trained-physics.yaml @103e5de) and its figures of devices
(its guide's latency-models.md). Requests, prefix cache and batches are of our scheduler, which plans no step ahead
here: BLIS does not, either. Two coefficients are zero there, of a decode's FLOPs and of a prompt's KV cache, and left
out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from unittest.mock import patch

from perfmodel.cost import EngineProfile, ServerFit, StepCosts
from perfmodel.cost.steps.tables import Usage
from perfmodel.evidence.observation import Observation
from perfmodel.evidence.predict.recorded import requests_of, stage_latencies
from perfmodel.models.architecture import Attention, MoEFFN
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.work import BatchShape
from perfmodel.sim import simulate

_PEAKS = {  # FLOP/us of BF16, of FP8, bytes/us
    "h100-sxm-80gb": (989.5e6, 1979e6, 3.35e6),
    "a100-sxm-80gb": (312e6, 0.0, 2.039e6),
    "l40s": (362.05e6, 733e6, 0.864e6),
}
_DENSE_WIDTHS = {"llama-4-scout-fp8": 16384}  # BLIS takes every other layer for a dense one (of 48 all have experts)
_PROMPT_COMPUTE, _DECODE_KV, _WEIGHTS, _ALL_REDUCE = 0.152128, 1.94710771, 1.36252915, 0.752037
_LAYER_US, _REQUEST_US, _STEP_US, _EXPERT_LAYER_US = 32.09546717, 4.41684444, 126.024825, 481.8613888
_IN_US, _END_US, _TOKEN_US = 15563.199579, 777.3455, 45.907545  # of a request, and of each token that it gets
# Models of the 15 runs that the coefficients were fitted to (generalization-validation-protocol.md
# @8ed0229), of which Qwen2.5-7B and Yi-34B are not among ours.
FITTED_MODELS = frozenset({"llama-2-7b", "llama-3.1-70b", "llama-4-scout-fp8", "mistral-nemo"})


@dataclass
class LawOfStep:
    """Times steps of `model` on `device` as BLIS does; a `StepCostModel` without runs of equal steps."""

    model: ModelSpec
    device: str
    tensor_parallel: int = 1
    has_runs: bool = False
    taken_us: float = 0.0

    def duration_ps(self, shape: BatchShape) -> int:
        duration_us = self.duration_us(shape)
        self.taken_us += duration_us
        return round(duration_us * 1e6)

    def duration_us(self, shape: BatchShape) -> float:
        """Microseconds of a step of `shape`."""
        model, tp = self.model, self.tensor_parallel
        flops_per_us, fp8_flops_per_us, bytes_per_us = _PEAKS[self.device]
        weight_bytes = 2.0
        if model.quantization.weights == "fp8":
            flops_per_us, weight_bytes = fp8_flops_per_us or flops_per_us, 1.0
        layer = model.layers[0][0]
        assert isinstance(layer.mixer, Attention)
        assert layer.ffn is not None
        num_layers, width = sum(count for _, count in model.layers), model.hidden_size
        num_heads = layer.mixer.num_heads
        head = width // num_heads
        kv_width = layer.mixer.num_kv_heads * head
        experts = layer.ffn if isinstance(layer.ffn, MoEFFN) else None
        dense_width = _DENSE_WIDTHS.get(model.name, layer.ffn.intermediate_size)
        num_expert_layers = 0 if experts is None else num_layers // (2 if model.name in _DENSE_WIDTHS else 1)
        num_dense_layers = num_layers - num_expert_layers

        prompt_tokens = shape.num_tokens - shape.num_decodes
        attended = sum(tokens * (1.5 * tokens + cached) for tokens, cached in shape.prefills)
        projections = width * (2 * width + 2 * kv_width)
        flops = num_layers * (2 * prompt_tokens * projections / tp + 4 * num_heads / tp * attended * head)
        flops += 6 * width * prompt_tokens * num_dense_layers * dense_width / tp
        weights = num_layers * projections + 3 * width * num_dense_layers * dense_width
        if experts is not None:
            flops += 6 * width * prompt_tokens * num_expert_layers * experts.top_k * experts.intermediate_size / tp
            weights += 3 * width * num_expert_layers * experts.num_experts * experts.intermediate_size
        kv_bytes = num_layers * 2 * kv_width / tp * 2 * shape.decode_context
        message_bytes = 2 * num_layers * shape.num_tokens * width * 4 * (tp - 1) / tp
        return (
            _PROMPT_COMPUTE * flops / flops_per_us
            + (_DECODE_KV * kv_bytes + _WEIGHTS * weights * weight_bytes / tp) / bytes_per_us
            + _ALL_REDUCE * message_bytes / bytes_per_us
            + _LAYER_US * num_layers
            + _REQUEST_US * (shape.num_decodes + len(shape.prefills))
            + _STEP_US
            + (_EXPERT_LAYER_US * num_expert_layers if model.name in _DENSE_WIDTHS else 0.0)
        )

    def usage(self) -> Usage:
        total = Usage()
        total.bound_s["overhead"] = self.taken_us / 1e6
        return total

    def fresh(self) -> "LawOfStep":
        return replace(self, taken_us=0.0)


def stages_by_law(stages: Sequence[Observation]) -> list[dict[str, float]]:
    """Latencies in ms of the stages of one run, as `stage_latencies` names them."""
    scenario = stages[0].scenario
    engine = scenario.engine.model_copy(update={"async_scheduling": False})
    scenario = scenario.model_copy(update={"engine": engine})
    law = LawOfStep(scenario.model, scenario.hardware.name, engine.tensor_parallel_size)
    profile = EngineProfile(engine=engine.profile, server=ServerFit(in_s=_IN_US / 1e6))
    with patch.object(StepCosts, "cost_model", lambda costs, draw=None: law):
        requests = requests_of(simulate(scenario, profile=profile, keep_steps=False))
    rows = []
    for stage in stages:
        figures = stage_latencies(stage, requests)
        num_tokens = round((figures["e2el_mean"] - figures["ttft_mean"]) / figures["itl_mean"]) + 1
        for name in figures:
            figures[name] += 1e-3 * (
                _TOKEN_US if name.startswith(("ttft", "itl")) else _END_US + num_tokens * _TOKEN_US
            )
        rows.append(figures)
    return rows
