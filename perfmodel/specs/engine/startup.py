"""What an engine refuses at its start: number formats, degrees of parallelism, sizes of KV blocks, lengths.

Whoever reads a deployment asks here (`load_scenario`, and with it every command), so that all of them refuse the same.
"""

__all__ = ["heads_divide", "refuse_to_start"]

from collections.abc import Iterable

from perfmodel.errors import SpecError, UnsupportedError
from perfmodel.models.architecture import Attention, LatentAttention, MoEFFN
from perfmodel.models.spec import ModelSpec
from perfmodel.specs.engine.backends import backend_of
from perfmodel.specs.engine.formats import refuse_formats
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.hardware import HardwareSpec

_LEAST_LENGTH = 2
# Kinds of RoPE whose max_position_embeddings is what they reach; that of others is what they are stretched from.
_SCALED_WITHIN = (None, "default", "llama3", "longrope", "su", "mrope")


def refuse_to_start(model: ModelSpec, engine: EngineSpec, hardware: HardwareSpec) -> None:
    """Raises UnsupportedError with one sentence for what `engine` does not start with.

    model: as `engine` serves it: its dtype and quantization applied
    """
    refuse_formats(model, engine, hardware)
    _refuse_backend(engine, hardware)
    _refuse_cuts(model, engine)
    _refuse_block_size(engine)
    _refuse_length(model, engine)


def heads_divide(model: ModelSpec, tensor_parallel_size: int) -> bool:
    """Whether the attention heads can be shared out evenly, as vLLM demands.

    KV heads are shared out too, or each is on as many ranks as it takes: their number divides by the size, or the size
    by their number (`QKVParallelLinear`).
    """
    mixers = [layer.mixer for layer, _ in model.layers]
    heads = {mixer.num_heads for mixer in mixers if isinstance(mixer, Attention | LatentAttention)}
    kv_heads = {mixer.num_kv_heads for mixer in mixers if isinstance(mixer, Attention)}
    size = tensor_parallel_size
    return all(count % size == 0 for count in heads) and all(not count % size or not size % count for count in kv_heads)


def _refuse_backend(engine: EngineSpec, hardware: HardwareSpec) -> None:
    """What only engines for a single machine have, and a backend that this one has not for the device."""
    facts, name = engine.described.facts, engine.described.description.name
    if facts.backends:
        try:
            backend_of(engine.backend, facts.backends, hardware)
        except SpecError as error:
            found = str(error).partition(": ")[2].rstrip(".")
            field = "engine.profile" if engine.backend is None else "engine.backend"
            raise UnsupportedError(found, reason="no backend for the device", field=field) from None
    elif engine.backend is not None:
        raise UnsupportedError(
            f"found {engine.backend}, and {name} has one backend only; leave it out",
            reason="the engine has no backends",
            field="engine.backend",
        )
    if engine.n_gpu_layers is not None and facts.offloads_from_tokens and hardware.kind == "cpu":
        raise UnsupportedError(
            f"got {engine.n_gpu_layers} on {hardware.name}, a CPU, which computes all layers itself; leave it and "
            f"engine.cpu out, or set hardware to the GPU",
            reason="no GPU for n_gpu_layers",
            field="engine.n_gpu_layers",
        )
    for field, is_asked, is_known in (
        ("n_gpu_layers", engine.n_gpu_layers is not None, facts.offloads_from_tokens),
        ("layer_split", engine.layer_split > 1, facts.pieces_under_way),
    ):
        if is_asked and not is_known:
            raise UnsupportedError(
                f"found {getattr(engine, field)}, which {name} does not have; leave it out, or set profile to llamacpp",
                reason=f"the engine has no {field}",
                field=f"engine.{field}",
            )


def _refuse_cuts(model: ModelSpec, engine: EngineSpec) -> None:
    tp, pp = engine.tensor_parallel_size, engine.pipeline_parallel_size
    if not heads_divide(model, tp):
        mixers = [layer.mixer for layer, _ in model.layers]
        heads = sorted({mixer.num_heads for mixer in mixers if isinstance(mixer, Attention | LatentAttention)})
        raise UnsupportedError(
            f"found {tp}, and the {_listed(heads)} attention heads of {model.name} cannot be shared out over so many; "
            f"allowed {_listed(size for size in range(1, max(heads) + 1) if heads_divide(model, size))}",
            reason="attention heads do not divide by tensor_parallel_size",
            field="engine.tensor_parallel_size",
        )
    if pp > model.num_layers:
        raise UnsupportedError(
            f"found {pp} stages, and {model.name} has {model.num_layers} layers; allowed 1 to {model.num_layers}",
            reason="more pipeline stages than layers",
            field="engine.pipeline_parallel_size",
        )
    if engine.enable_expert_parallel and not any(isinstance(layer.ffn, MoEFFN) for layer, _ in model.layers):
        raise UnsupportedError(
            f"found true, and {model.name} has no experts to share out; leave it out",
            reason="expert parallelism without experts to share out",
            field="engine.enable_expert_parallel",
        )


def _refuse_block_size(engine: EngineSpec) -> None:
    sizes = engine.described.facts.kv_block_sizes
    if sizes and engine.kv_cache == "paged" and engine.block_size not in sizes:
        raise UnsupportedError(
            f"found {engine.block_size}, and {engine.described.label} takes KV blocks of {_listed(sizes)} tokens",
            reason="KV blocks of a size that the engine does not take",
            field="engine.block_size",
        )


def _refuse_length(model: ModelSpec, engine: EngineSpec) -> None:
    """Positions that the model was not trained for give wrong answers; engines that say so do not start."""
    length, trained = engine.max_model_len, model.max_position_embeddings
    if length is None:
        return
    if length < _LEAST_LENGTH:
        raise UnsupportedError(
            f"found {length}, allowed at least {_LEAST_LENGTH}: a token of the prompt and one of the answer",
            reason="max_model_len without room for an answer",
            field="engine.max_model_len",
        )
    if engine.described.facts.limits_to_positions and length > trained and model.rope_scaling in _SCALED_WITHIN:
        raise UnsupportedError(
            f"found {length}, and {model.name} has positions up to {trained}; allowed up to that, or another "
            f"rope_scaling in a copy of its config.json",
            reason="max_model_len beyond the model's positions",
            field="engine.max_model_len",
        )


def _listed(values: Iterable[int]) -> str:
    """`1, 2 or 4`"""
    *first, last = map(str, values)
    return f"{', '.join(first)} or {last}" if first else last
