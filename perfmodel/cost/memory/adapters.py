"""LoRA adapters in memory, and what taking them to a slot costs a step.

    slot    r (s K + N) b over the linear layers of a device, whatever the adapter's rank: allocated at the start
    load    from the host  max( copies c, slot bytes / W )        two copies of each slice; W: the device's link
            from the disk  f + file bytes / F  before that        read through the host's file cache

vLLM loads before the step, which waits. c, f, F: `hardware_specs/calibrations/adapters.yaml`. Source: vLLM 0.30,
vllm/lora/layers (`create_lora_weights`, `set_lora`), vllm/v1/worker/lora_model_runner_mixin.py."""

from collections.abc import Sequence
from typing import NamedTuple

from pydantic import Field

from perfmodel.cost.kernel_models.roofline import FamilyFit
from perfmodel.files.catalog import data_dir
from perfmodel.files.fitted import CommittedFits, load_fitted
from perfmodel.models.architecture import Layer
from perfmodel.models.number_formats import bytes_per_weight
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.adapters import AdapterTarget, block_targets, vocabulary_targets
from perfmodel.ops.formats import served_model
from perfmodel.ops.sharding import Sharding
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.hardware import GivenLink
from perfmodel.specs.scenario import Scenario


class AdapterFits(CommittedFits):
    """kernels: vLLM's, an item is a thread block; copy_s: of a matrix to a slot; file_s, file_bytes_per_s: to read an
    adapter and to make it ready in the host's memory"""

    kernels: FamilyFit
    copy_s: float = Field(ge=1e-7, le=1e-3)
    file_s: float = Field(ge=0, le=1)
    file_bytes_per_s: float = Field(ge=1e7, le=1e11)


def load_adapter_fits() -> AdapterFits:
    """The committed fits. Raises SpecError for a file that is missing or malformed."""
    return load_fitted(AdapterFits, data_dir("calibrations") / "adapters.yaml")


class AdapterLoad(NamedTuple):
    """Seconds of one adapter: from the host's memory to a slot, and from the disk to that memory."""

    from_host_s: float
    from_disk_s: float

    def step_s(self, num_from_host: int, num_from_disk: int) -> float:
        """What a step waits for so many adapters."""
        return (num_from_host + num_from_disk) * self.from_host_s + num_from_disk * self.from_disk_s


def targets_of(
    model: ModelSpec, engine: EngineSpec, layers: Sequence[Layer], *, has_vocabulary: bool, shard: Sharding
) -> list[AdapterTarget]:
    """The linear layers of `layers` with adapters under `engine`, on a device of `shard`. model: as served;
    has_vocabulary: embedding and LM head are among them"""
    blocks = [block for layer in layers for block in (layer.mixer, layer.ffn)]
    targets = [target for block in blocks for target in block_targets(block, model.hidden_size, shard)]
    targets += vocabulary_targets(model) if has_vocabulary else ()
    modules = engine.lora_target_modules
    return [target for target in targets if modules is None or target.name in modules]


def slot_bytes(model: ModelSpec, engine: EngineSpec, layers: Sequence[Layer], *, has_vocabulary: bool) -> float:
    """Bytes of a slot on a device: adapters of rank `max_lora_rank` of `engine` beside the linear modules of `layers`
    of `model`, and with `has_vocabulary` beside embedding and head."""
    targets = targets_of(model, engine, layers, has_vocabulary=has_vocabulary, shard=Sharding.of(engine))
    elements = sum(target.elements_per_rank for target in targets)
    return engine.max_lora_rank * elements * bytes_per_weight(model.dtype)


def adapter_load(scenario: Scenario) -> AdapterLoad | None:
    """What loading an adapter costs steps of the scenario's engine; None without adapters."""
    engine, adapters = scenario.engine, scenario.traffic.adapters
    if adapters is None or not engine.enable_lora:
        return None
    fits, model = load_adapter_fits(), served_model(scenario.model, engine)
    layers, rank = list(model.iter_layers()), adapters.rank or engine.max_lora_rank
    # The file has all heads and columns, and neither embedding nor LM head, which few adapters change.
    whole = targets_of(model, engine, layers, has_vocabulary=False, shard=Sharding())
    file_bytes = rank * bytes_per_weight(model.dtype) * sum(target.elements_per_rank for target in whole)
    num_copies = 2 * sum(len(target.widths) for target in whole)
    link = GivenLink(link="pcie").link_of(scenario.hardware) if scenario.hardware.kind != "cpu" else None
    copied_s = 0.0 if link is None else file_bytes / engine.tensor_parallel_size / link.bandwidth_bytes_per_s
    from_host_s = max(num_copies * fits.copy_s, copied_s)
    return AdapterLoad(from_host_s, fits.file_s + file_bytes / fits.file_bytes_per_s)
