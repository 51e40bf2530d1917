"""From a parsed scenario to the one that is served: its model changed and in its formats, defaults filled in.

What the engine does not start with is refused here.
"""

__all__ = ["served_scenario"]

from dataclasses import replace

from perfmodel.errors import SpecError, UnsupportedError
from perfmodel.files.yaml_loader import Path, Positions
from perfmodel.models.kv_formats import with_eviction
from perfmodel.models.layer_formats import with_layer_formats
from perfmodel.models.model_changes import ModelChanges
from perfmodel.models.number_formats import with_dtype, with_quantization
from perfmodel.models.spec import ChangedFrom, ModelSpec
from perfmodel.specs.engine.description import Use
from perfmodel.specs.engine.devices import with_defaults
from perfmodel.specs.engine.formats import auto_dtype
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.engine.startup import refuse_to_start
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.traffic import Traffic


def served_scenario(scenario: Scenario, positions: Positions) -> Scenario:
    """Changes, and the engine's dtype and quantization, applied to the model, and the context length filled in.

    positions: of the scenario's fields in its file

    Raises SpecError, UnsupportedError for what no engine starts with: `file:line: field: ...`.
    """
    changed = _changed(scenario.model, scenario.model_changes, positions)
    engine, model = scenario.engine, _as_served(changed, scenario.engine, scenario.hardware, positions)
    cluster, pools = scenario.cluster, []
    for number, pool in enumerate(scenario.cluster.pools):
        theirs = model
        if pool.share is not None:  # a model, or a version, of its own
            where = ("cluster", "pools", number)
            theirs = _as_served(
                pool.model or changed, pool.engine, pool.hardware or scenario.hardware, positions, where
            )
        own = _with_defaults(pool.engine, theirs, pool.hardware or scenario.hardware, scenario.traffic, positions)
        pools.append(pool.model_copy(update={"engine": own, "model": None if theirs is model else theirs}))
        _check_start(theirs, own, pool.hardware or scenario.hardware, positions, ("cluster", "pools", number))
    cluster = cluster.model_copy(update={"pools": tuple(pools)}) if pools else cluster
    engine = _with_defaults(engine, model, scenario.hardware, scenario.traffic, positions)
    if not pools:
        _check_start(model, engine, scenario.hardware, positions)
    served = {"model": model, "engine": engine, "cluster": cluster}
    return _networked(scenario.model_copy(update=served))


def _networked(scenario: Scenario) -> Scenario:
    """`cluster.network` as the network of all hardware."""
    cluster = scenario.cluster
    if cluster.network is None:
        return scenario
    update = {"network": cluster.network}
    pools = tuple(
        pool.model_copy(update={"hardware": pool.hardware.model_copy(update=update)}) if pool.hardware else pool
        for pool in cluster.pools
    )
    hardware = scenario.hardware.model_copy(update=update)
    return scenario.model_copy(
        update={"hardware": hardware, "cluster": cluster.model_copy(update={"pools": pools}) if pools else cluster}
    )


def _as_served(
    model: ModelSpec, engine: EngineSpec, hardware: HardwareSpec, positions: Positions, prefix: Path = ()
) -> ModelSpec:
    """`model` in the formats that `engine` serves it in."""
    dtype = auto_dtype(engine.dtype, model, engine, hardware)
    try:
        model = with_quantization(with_dtype(model, dtype), engine.quantization, engine.quantization_group_size)
    except SpecError as error:
        raise SpecError(f"{positions.where((*prefix, 'engine', 'quantization'))}: {error}") from None
    try:
        with_layer_formats(model, engine.quantization_by_layer)
    except SpecError as error:
        raise SpecError(f"{positions.where(('engine', 'quantization_by_layer'))}: {error}") from None
    try:
        if engine.kv_eviction is not None:
            model = with_eviction(model, engine.kv_eviction.num_tokens, engine.kv_eviction.recent_tokens)
    except SpecError as error:
        raise SpecError(f"{positions.where((*prefix, 'engine', 'kv_eviction'))}: {error}") from None
    return model


def _check_start(
    model: ModelSpec, engine: EngineSpec, hardware: HardwareSpec, positions: Positions, prefix: Path = ()
) -> None:
    """Raises UnsupportedError, with its place, for what the engine does not start with."""
    try:
        refuse_to_start(model, engine, hardware)
    except UnsupportedError as error:
        place = (*prefix, *error.field.split("."))
        shown = f"{positions.where(place)}: {'.'.join(map(str, place))}: "
        raise UnsupportedError(str(error), error.reason, error.field, shown) from None


def _changed(model: ModelSpec, changes: ModelChanges, positions: Positions) -> ModelSpec:
    """`model` with each change that the scenario names, in the order of their fields."""
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
    engine: EngineSpec, model: ModelSpec, hardware: HardwareSpec, traffic: Traffic, positions: Positions
) -> EngineSpec:
    """`engine` with the model's context length and its version's defaults where the file gives none."""
    use: Use = "offline" if traffic.arrivals.process == "burst" else "server"
    try:
        return with_defaults(engine, hardware, use, model.max_position_embeddings)
    except ValueError as error:
        raise SpecError(f"{positions.where(('engine', 'max_num_seqs'))}: engine: {error}.") from None
