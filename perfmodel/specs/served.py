"""Scenario fields as served: model changes and formats applied, engine defaults filled in; refuses invalid starts."""

from dataclasses import replace
from typing import Any

from perfmodel.errors import SpecError, UnsupportedError
from perfmodel.files.yaml_loader import Path, Positions
from perfmodel.models.layer_formats import with_layer_formats
from perfmodel.models.model_changes import ModelChanges
from perfmodel.models.number_formats import with_dtype, with_eviction, with_quantization
from perfmodel.models.spec import ChangedFrom, ModelSpec
from perfmodel.specs.engine.description import Use
from perfmodel.specs.engine.devices import refuse_to_start, with_defaults
from perfmodel.specs.engine.formats import auto_dtype
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.hardware import HardwareSpec


def served_fields(scenario: Any, positions: Positions) -> dict[str, Any]:
    """Fields of a `Scenario` that differ once served: the model, engine defaults, and `cluster.network` on all
    hardware.

    Raises SpecError, or UnsupportedError for what no engine starts with: `file:line: field: ...`.
    """
    hardware, cluster = scenario.hardware, scenario.cluster
    use: Use = "offline" if scenario.traffic.arrivals.process == "burst" else "server"
    changed = _changed(scenario.model, scenario.model_changes, positions)
    model = _as_served(changed, scenario.engine, hardware, positions)
    network = {} if cluster.network is None else {"network": cluster.network}
    pools = []
    for number, pool in enumerate(cluster.pools):
        place, device, served = ("cluster", "pools", number), pool.hardware or hardware, model
        if pool.share is not None:  # a model, or a version, of its own
            served = _as_served(pool.model or changed, pool.engine, device, positions, place)
        engine = _with_defaults(pool.engine, served, device, use, positions)
        _check_start(served, engine, device, positions, place)
        update: dict[str, Any] = {"engine": engine, "model": None if served is model else served}
        if pool.hardware is not None and network:
            update["hardware"] = pool.hardware.model_copy(update=network)
        pools.append(pool.model_copy(update=update))
    engine = _with_defaults(scenario.engine, model, hardware, use, positions)
    if pools:
        cluster = cluster.model_copy(update={"pools": tuple(pools)})
    else:
        _check_start(model, engine, hardware, positions, ())
    fields = {"model": model, "engine": engine, "cluster": cluster}
    return fields | ({"hardware": hardware.model_copy(update=network)} if network else {})


def _as_served(
    model: ModelSpec, engine: EngineSpec, hardware: HardwareSpec, positions: Positions, prefix: Path = ()
) -> ModelSpec:
    place: Path = (*prefix, "engine", "quantization")
    try:
        dtype = auto_dtype(engine.dtype, model, engine, hardware)
        model = with_quantization(with_dtype(model, dtype), engine.quantization, engine.quantization_group_size)
        place = ("engine", "quantization_by_layer")
        with_layer_formats(model, engine.quantization_by_layer)
        place = (*prefix, "engine", "kv_eviction")
        if engine.kv_eviction is not None:
            model = with_eviction(model, engine.kv_eviction.num_tokens, engine.kv_eviction.recent_tokens)
    except SpecError as error:
        raise SpecError(f"{positions.where(place)}: {error}") from None
    return model


def _changed(model: ModelSpec, changes: ModelChanges, positions: Positions) -> ModelSpec:
    if changes == ModelChanges():
        return model
    from perfmodel.models.changes import CHANGES

    original = model
    for field, change in CHANGES.items():
        if getattr(changes, field) is None:
            continue
        try:
            model = change(model, changes)
        except SpecError as error:
            place = ("model_changes", field)
            raise SpecError(f"{positions.where(place)}: {'.'.join(place)}: {error}") from None
    has_weights = original.weights_path is not None
    return replace(model, weights_path=None, changed_from=ChangedFrom(original, changes)) if has_weights else model


def _with_defaults(
    engine: EngineSpec, model: ModelSpec, hardware: HardwareSpec, use: Use, positions: Positions
) -> EngineSpec:
    """`engine` with the model's context length and version defaults."""
    try:
        return with_defaults(engine, hardware, use, model.max_position_embeddings)
    except ValueError as error:
        raise SpecError(f"{positions.where(('engine', 'max_num_seqs'))}: engine: {error}.") from None


def _check_start(
    model: ModelSpec, engine: EngineSpec, hardware: HardwareSpec, positions: Positions, prefix: Path
) -> None:
    """Raise UnsupportedError, with its place, for what the engine does not start with."""
    try:
        refuse_to_start(model, engine, hardware)
    except UnsupportedError as error:
        place = (*prefix, *error.field.split("."))
        shown = f"{positions.where(place)}: {'.'.join(map(str, place))}: "
        raise UnsupportedError(str(error), error.reason, error.field, shown) from None
