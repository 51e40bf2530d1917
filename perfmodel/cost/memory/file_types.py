"""Which GGUF types of a model fit a device: how many layers lie on it, and which context they leave room for.

As `perfmodel memory` asks for every type: does it fit whole, with the context of the scenario; else how many of its
layers do, the others staying with the CPU; and how long a context all layers leave room for.
"""

__all__ = ["FILE_TYPES", "TypeFit", "fits_of_types"]

from bisect import bisect_left
from dataclasses import dataclass

from perfmodel.cost.memory.plan import MemoryPlan, plan_memory
from perfmodel.errors import DoesNotFitError
from perfmodel.models.params import weight_bytes
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.formats import served_model
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.hardware import HardwareSpec

# From the best to the smallest that people publish for most models.
FILE_TYPES = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "iq4_xs", "q3_k_m", "iq3_xxs", "q2_k", "iq2_xxs")
_USUAL_CONTEXT = 4096  # --fit-ctx: below it llama.cpp moves layers away rather than shorten the context


@dataclass(frozen=True, slots=True)
class TypeFit:
    """What becomes of a model in one file type.

    weight_bytes: of all layers; layers: on the device with `context` tokens for each slot, the head counting as one;
    num_layers: of all, counted so; max_context: of one sequence with all layers on the device, 0 if they do not fit
    """

    file_type: str
    weight_bytes: float
    context: int
    layers: int
    num_layers: int
    max_context: int

    @property
    def fits(self) -> bool:
        """Whether all of it lies on the device."""
        return self.layers == self.num_layers


def fits_of_types(model: ModelSpec, hardware: HardwareSpec, engine: EngineSpec) -> list[TypeFit]:
    """Each of `FILE_TYPES`; none for an engine that computes all layers on one kind of device."""
    if not engine.described.facts.offloads_from_tokens:
        return []
    context = engine.max_model_len or min(_USUAL_CONTEXT, model.max_position_embeddings)
    asked = engine.model_copy(update={"max_model_len": context, "n_gpu_layers": None, "num_gpu_blocks_override": None})
    return [_fit(file_type, model, hardware, asked) for file_type in FILE_TYPES]


def _fit(file_type: str, model: ModelSpec, hardware: HardwareSpec, engine: EngineSpec) -> TypeFit:
    engine = engine.model_copy(update={"quantization": file_type})
    context, num_layers = engine.max_model_len or 0, model.num_layers + 1
    whole = _planned(model, hardware, engine)
    # the more layers the less fits: the first count, from none on, that does not
    most = bisect_left(range(1, num_layers + 1), True, key=lambda n: not _holds(model, hardware, engine, n, context))
    size = sum(weight_bytes(served_model(model, engine, hardware)).values())
    longest = min(whole.max_context(), model.max_position_embeddings) if whole is not None else 0
    return TypeFit(file_type, size, context, most, num_layers, longest)


def _holds(model: ModelSpec, hardware: HardwareSpec, engine: EngineSpec, layers: int, context: int) -> bool:
    """Whether so many layers and the KV of a context of all slots lie on the device."""
    plan = _planned(model, hardware, engine.model_copy(update={"n_gpu_layers": layers}))
    return plan is not None and plan.max_batch(context) >= engine.max_num_seqs


def _planned(model: ModelSpec, hardware: HardwareSpec, engine: EngineSpec) -> MemoryPlan | None:
    try:
        return plan_memory(model, hardware, engine)
    except DoesNotFitError:
        return None
