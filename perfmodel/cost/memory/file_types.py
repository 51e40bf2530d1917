"""Which GGUF types of a model fit a device: layers on the device, and the longest context.

For each type: does the model fit with the scenario's slots and context? If not, how many layers fit, the rest on the
CPU? What context do all layers leave room for? Defaults: one slot, as llama.cpp's slots share one KV pool that one
sequence may fill; the shortest context that llama.cpp falls back to."""

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
class AskedSlots:
    """What has to fit: `slots` sequences of `context` tokens each."""

    slots: int
    context: int


@dataclass(frozen=True, slots=True)
class TypeFit:
    """A model in one file type.

    weight_bytes: of all layers; asked: what has to fit
    layers:       on the device then, the head included; num_layers: of the model, counted likewise
    max_context:  tokens per slot with all layers on the device; 0 if these do not fit"""

    file_type: str
    weight_bytes: float
    asked: AskedSlots
    layers: int
    num_layers: int
    max_context: int

    @property
    def fits(self) -> bool:
        """Whether the whole model is on the device."""
        return self.layers == self.num_layers


def fits_of_types(model: ModelSpec, hardware: HardwareSpec, engine: EngineSpec) -> list[TypeFit]:
    """Each of `FILE_TYPES` with the slots of `engine`; none for one that cannot split layers between device and CPU.

    Defaults: one slot, and the shortest context that llama.cpp falls back to."""
    if not engine.described.facts.offloads_from_tokens:
        return []
    given, usual = engine.model_fields_set, min(_USUAL_CONTEXT, model.max_position_embeddings)
    context = engine.max_model_len if "max_model_len" in given else None
    asked = AskedSlots(engine.max_num_seqs if "max_num_seqs" in given else 1, context or usual)
    whole = engine.model_copy(update={"n_gpu_layers": None, "num_gpu_blocks_override": None})
    return [_fit(file_type, model, hardware, whole, asked) for file_type in FILE_TYPES]


def _fit(file_type: str, model: ModelSpec, hardware: HardwareSpec, engine: EngineSpec, asked: AskedSlots) -> TypeFit:
    engine = engine.model_copy(update={"quantization": file_type, "max_model_len": asked.context})
    num_layers, longest = model.num_layers + 1, model.max_position_embeddings
    whole = _planned(model, hardware, engine)
    # The more layers, the less fits: search the first count that does not fit. On a CPU all layers lie, or none.
    counts = (num_layers,) if hardware.kind == "cpu" else range(1, num_layers + 1)
    first = bisect_left(counts, True, key=lambda n: not _holds(model, hardware, engine, n, asked))
    size = sum(weight_bytes(served_model(model, engine, hardware)).values())
    context = 0 if whole is None else min(whole.max_context(asked.slots), longest)
    return TypeFit(file_type, size, asked, counts[first - 1] if first else 0, num_layers, context)


def _holds(model: ModelSpec, hardware: HardwareSpec, engine: EngineSpec, layers: int, asked: AskedSlots) -> bool:
    plan = _planned(model, hardware, engine.model_copy(update={"n_gpu_layers": layers}))
    return plan is not None and plan.max_batch(asked.context) >= asked.slots


def _planned(model: ModelSpec, hardware: HardwareSpec, engine: EngineSpec) -> MemoryPlan | None:
    try:
        return plan_memory(model, hardware, engine)
    except DoesNotFitError:
        return None
