"""`Scenario`: model + hardware + engine + traffic + SLO, the file that users copy; as it is served; and its prices."""

import datetime
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import ceil
from typing import Annotated, Any, ClassVar

from pydantic import Field, PrivateAttr, ValidationInfo, model_validator

from perfmodel.dates import today
from perfmodel.errors import SpecError, UnsupportedError
from perfmodel.files.base import CheckedSpec, Resolved, Spec
from perfmodel.files.blocks import Block
from perfmodel.files.units import NonNegativeFloat
from perfmodel.files.yaml_loader import Path, Positions
from perfmodel.models.layer_formats import with_layer_formats
from perfmodel.models.model_changes import ModelChanges
from perfmodel.models.number_formats import with_dtype, with_eviction, with_quantization
from perfmodel.models.spec import ChangedFrom, ModelSpec
from perfmodel.specs.cluster import ClusterSpec, PoolGroup, PoolSpec
from perfmodel.specs.engine.description import Use
from perfmodel.specs.engine.devices import refuse_missing_units, refuse_to_start, with_defaults
from perfmodel.specs.engine.formats import auto_dtype
from perfmodel.specs.engine.pooling import answer_conflicts, pooling_defaults, with_pooling
from perfmodel.specs.engine.spec import EngineSpec, PromptCompression
from perfmodel.specs.hardware import HardwareSpec, NetworkSpec, Price, PriceOverride, Site
from perfmodel.specs.scenario_source import ScenarioSource
from perfmodel.specs.slo import DEFAULT_ATTAINMENT, SLO
from perfmodel.specs.traffic import ONE_TOKEN, ExpertRouting, Sampling, Traffic

_STALE = datetime.timedelta(days=183)
_WAY_OUT = "give a current one as price.usd_per_gpu_hour"


class Overheads(Spec):
    """Multiples of overheads, which no datasheet declares; 1 leaves them as they are, 0.5 halves them.

    host:    the engine's own time per step, launches without CUDA graphs, and the front end's (HTTP, tokenisation)"""

    kernels: NonNegativeFloat = 1.0  # what a kernel costs beside its bytes and FLOPs: launch, ramp-up, drain
    host: NonNegativeFloat = 1.0


# A millisecond and 35 kB to make one, before it has done anything, and seventeen times that with intervals.
_MAX_ENGINES = 10_000

# Of engines that exchange KV.
_SHARED = (
    *("dtype", "float32_matmul_precision", "quantization", "quantization_group_size", "quantization_by_layer"),
    *("kv_cache", "kv_cache_dtype", "kv_cache_group_size", "kv_cache_residual_tokens", "kv_tiers", "kv_eviction"),
    "mamba_ssm_cache_dtype",
)


class Scenario(CheckedSpec):
    """A scenario with its names resolved: `model` and `hardware` are the specs themselves.

    However it is made, `model_changes` and the engine's formats are applied to `model`, arguments that were not given
    have the defaults of the engine's version on the device, and `cluster.network` and `host` are those of all hardware.
    `perfmodel.specs.load_scenario` makes one from a file.

    Raises SpecError, UnsupportedError for what the engine does not start with."""

    name: str
    model: Annotated[
        ModelSpec, Resolved("A name in workloads/models, or a path to a model card or a Hugging Face config.json")
    ]
    hardware: Annotated[HardwareSpec, Resolved("A name in hardware_specs, or a path to a hardware file")]
    model_changes: ModelChanges = ModelChanges()
    engine: EngineSpec = EngineSpec()
    traffic: Traffic
    sampling: Sampling = Sampling()
    routing: ExpertRouting = ExpertRouting()
    prompt_compression: PromptCompression | None = None
    slo: SLO = SLO()
    cluster: ClusterSpec = ClusterSpec()
    price: PriceOverride | None = None
    site: Site | None = None
    overheads: Overheads = Overheads()
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    # What `perfmodel plan` looks for; a figure that `validate published` compares with; what `validate techniques`
    # takes out of the scenario to see what it gains
    plan: Annotated[Spec, Block("plan")] | None = None
    published: Annotated[Spec, Block("published")] | None = None
    technique: Annotated[Spec, Block("technique")] | None = None
    _source: ScenarioSource = PrivateAttr(ScenarioSource())
    # `scenario_file.changed_scenario`, which knows files, and sets it
    _read_changed: ClassVar[Callable[["Scenario", Mapping[str, Any]], "Scenario"]]

    def with_(self, changes: Mapping[str, Any]) -> "Scenario":
        """A validated copy with `changes`: `{"engine.max_num_seqs": 64}`; values as for `--set`, also `"2x"`.

        Raises SpecError for invalid values, and for a scenario made in Python that no file could state."""
        return type(self)._read_changed(self, changes)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> "Scenario":
        """pydantic's copy, without validation or source; `with_` validates."""
        copied = super().model_copy(update=update, deep=deep)
        copied._source = ScenarioSource()
        return copied

    def _conflicts(self) -> Iterator[str]:
        is_owned = self.price is not None and self.price.owned is not None
        if is_owned and (self.site is None or self.site.usd_per_kwh is None):
            yield "got price.owned without a price of electricity; owned devices pay for theirs, set site.usd_per_kwh"
        yield from self._conflicts_of_images()
        if self.sampling.method == "greedy" and self.traffic.samples_per_prompt > 1:
            yield "got greedy sampling with samples_per_prompt above 1, which vLLM refuses: all answers would be one"
        gateway, classes = self.cluster.gateway, self.traffic.classes
        is_fair = gateway is not None and gateway.scheduling_policy == "vtc"
        if is_fair and len(classes) < 2:
            yield f"got scheduling_policy vtc for {len(classes)} tenants; give at least 2 as traffic.classes"
        if not is_fair and any(one.weight != 1 for one in classes):
            yield "got a weight of traffic.classes, which vtc reads; set cluster.gateway.scheduling_policy: vtc"
        for deployment in self.cluster.deployments:
            if deployment.share is None or deployment.is_disaggregated:
                yield from self._differing_kv_formats(deployment)
        for pool in self.pools:
            engine, hardware, model = pool.engine, pool.hardware or self.hardware, pool.model or self.model
            if engine.mm_encoder_only and pool.role != "encode":
                yield "got mm_encoder_only for an engine that answers; give it a pool with `role: encode`"
            if engine.kv_offload is not None:
                engine.kv_offload.link_of(hardware)
            yield from self._conflicts_of_adapters(pool)
            yield from self._conflicts_of_cores_and_beams(pool)
            yield from self._conflicts_of_shapes(pool)
            if engine.afd_config is not None:
                yield from self._conflicts_of_afd()
            if pool.role in ("prefill", "decode"):
                if engine.speculative_config is not None:
                    yield (
                        "got speculative_config in pools that exchange KV; the drafter's KV is not moved between them, "
                        "leave one of the two out"
                    )
                if engine.kv_cache == "off":
                    yield "got kv_cache=off in prefill and decode pools, which exchange their KV; keep it on"
                if engine.kv_offload and pool.role == "decode":
                    yield (
                        "got kv_offload in a decode pool, whose KV comes from prefill replicas; give it to the engine "
                        "of the prefill pool alone"
                    )
                self.cluster.kv_transfer.link_of(hardware)
            (self.cluster.network or hardware.network or NetworkSpec()).share_of(hardware)
            refuse_missing_units(engine, hardware)
            # As vLLM asks of draft models: their tokens are compared with the model's own.
            drafter = engine.speculative_config.model if engine.speculative_config is not None else None
            if drafter is not None and drafter.vocab_size != model.vocab_size:
                yield (
                    f"got the draft model {drafter.name} with a vocabulary of {drafter.vocab_size:,} for {model.name} "
                    f"with {model.vocab_size:,}: drafts are its tokens; choose a smaller model of the same family"
                )
        yield from self._differing_stores()
        num_engines = sum(pool.most_replicas * pool.engine.data_parallel_size for pool in self.pools)
        if num_engines > _MAX_ENGINES:
            yield (
                f"got {num_engines:,} engines (replicas x data_parallel_size); expected at most {_MAX_ENGINES:,}, as "
                f"each has its own queue and KV blocks: simulate a slice, a tenth of the replicas under a tenth of the "
                f"traffic"
            )

    def _conflicts_of_adapters(self, pool: PoolSpec) -> Iterator[str]:
        engine, adapters = pool.engine, self.traffic.adapters
        if adapters is not None and not engine.enable_lora:
            yield "got traffic.adapters without engine.enable_lora; set that, or leave the adapters out"
        if adapters is not None and (adapters.rank or 0) > engine.max_lora_rank:
            yield (
                f"got traffic.adapters.rank={adapters.rank}; expected at most "
                f"engine.max_lora_rank={engine.max_lora_rank}, the rank of a slot"
            )
        if engine.enable_lora and pool.role != "unified":
            yield "got enable_lora in prefill and decode pools; only unified engines have it"

    def _conflicts_of_cores_and_beams(self, pool: PoolSpec) -> Iterator[str]:
        """What shared cores of the host, and beams, do not go with."""
        engine, hardware, width = pool.engine, pool.hardware or self.hardware, self.traffic.beam_width
        host, facts = self.cluster.host or hardware.host, engine.described.facts
        both = {
            "prefill and decode pools": pool.role != "unified",
            "engine.speculative_config": engine.speculative_config is not None,
        }
        of_cores = both | {
            f"the device {hardware.name}, whose cores compute the model": hardware.kind == "cpu",
            f"engine.profile={engine.profile}, whose processes are not known": facts.host_processes is None,
            "a replica on several nodes": engine.num_devices > hardware.devices_per_node,
            "engine.pipeline_parallel_size": engine.pipeline_parallel_size > 1,
            "engine.enable_dbo": engine.enable_dbo,
        }
        of_beams = both | {
            f"engine.profile={engine.profile}, whose beams are not known": not facts.api_server_beam_s,
            "a gateway, autoscaling, failures or shares of pools": self.cluster.is_dynamic,
            "engine.data_parallel_size": engine.data_parallel_size > 1,
            "prompt_compression": self.prompt_compression is not None,
            f"{self.model.name}, which generates no text": self.model.pooling is not None or engine.runner == "pooling",
        }
        given = {} if host is None else {f"host.cores={host.cores}": of_cores}
        given |= {f"traffic.beam_width={width}": of_beams} if width > 1 else {}
        if self.prompt_compression is not None:
            given["prompt_compression"] = {"conversations, whose prompts repeat": self.traffic.has_conversations}
        for one, others in given.items():
            for other in (name for name, is_given in others.items() if is_given):
                yield f"got {one} beside {other}: not modelled together; leave one of the two out"

    def _conflicts_of_shapes(self, pool: PoolSpec) -> Iterator[str]:
        """What answers of a required shape do not go with."""
        engine, model, shapes = pool.engine, pool.model or self.model, self.traffic.structured_outputs
        others = {
            f"engine.profile={engine.profile}": not engine.rules.masks_shapes,
            f"{model.name}, which returns no text": model.pooling is not None,
            "prefill and decode pools": pool.role != "unified",
            f"engine.batching={engine.batching}": engine.batching != "continuous",
            f"engine.pipeline_parallel_size={engine.pipeline_parallel_size}": engine.pipeline_parallel_size > 1,
        }
        for other in (name for name, is_given in others.items() if is_given and shapes is not None):
            yield f"got traffic.structured_outputs beside {other}, which is not modelled; leave out or change one"

    def _conflicts_of_afd(self) -> Iterator[str]:
        """What separate attention and feed-forward devices do not go with, beside an engine's own fields."""
        others = {
            "a gateway, autoscaling, failures or shares of pools": self.cluster.is_dynamic,
            "traffic.images": self.traffic.images is not None,
            "traffic.structured_outputs": self.traffic.structured_outputs is not None,
            "traffic.beam_width": self.traffic.beam_width > 1,
            "host.cores": (self.cluster.host or self.hardware.host) is not None,
        }
        for other in (name for name, is_given in others.items() if is_given):
            yield f"got engine.afd_config beside {other}, with which it is not modelled; leave one of them out"

    def _conflicts_of_images(self) -> Iterator[str]:
        """What images in the traffic do not go with."""
        images = self.traffic.images
        if any(pool.role == "encode" for pool in self.pools):
            self.cluster.ec_transfer.link_of(self.hardware)
            if images is None:
                yield "got an encode pool without traffic.images, which it encodes; give these, or leave the pool out"
        for pool in self.pools if images is not None else ():
            engine, model, place = pool.engine, pool.model or self.model, "traffic.images"
            if model.vision is None:
                yield f"got {place} for {model.name}, whose encoder is not known; choose a model as qwen3-vl-8b"
                return
            if (
                images is not None
                and not model.vision.takes_videos
                and any(size.num_frames > 1 for size in images.sizes)
            ):
                yield f"got a video (num_frames above 1) for {model.name}, which takes images alone; set it to 1"
            most, limit = model.vision.max_tokens, engine.max_num_batched_tokens
            if engine.disable_chunked_mm_input and most > limit:
                yield (
                    f"got disable_chunked_mm_input with max_num_batched_tokens={limit}, below the {most} tokens of the "
                    f"largest image; raise it, as vLLM asks, or let images be cut"
                )
            others = {
                "prompt_compression": self.prompt_compression is not None,
                "engine.speculative_config": engine.speculative_config is not None,
                f"engine.batching={engine.batching}": engine.batching != "continuous",
                f"engine.kv_cache={engine.kv_cache}": engine.kv_cache != "paged",
                "engine.layer_split": engine.layer_split > 1,
                f"engine.profile={engine.profile}": not engine.rules.encodes_in_steps,
            }
            for other in (name for name, is_given in others.items() if is_given):
                yield f"got {place} beside {other}, which is not modelled together; leave out or change one of the two"

    def _differing_kv_formats(self, deployment: PoolGroup) -> Iterator[str]:
        """All pools of a deployment have one model and KV format; traffic splits may differ."""
        pools = [self.cluster.pools[number] for number in deployment.pools]
        common, place, advice = self.engine, "the scenario's engine", "once, under `engine`"
        if deployment.share is not None:
            common, place, advice = pools[0].engine, "another", "alike in all pools of the deployment"
        for pool, name in product(pools, _SHARED):
            value, shared = getattr(pool.engine, name), getattr(common, name)
            if value != shared:
                yield (
                    f"got {name}={value} in a {pool.role} pool and {shared} in {place}; pools serve the same model "
                    f"and exchange its KV cache, set {name} {advice}"
                )

    def _differing_stores(self) -> Iterator[str]:
        """Engines that share a store have the same blocks, and say the same of it."""
        first: dict[str, object] = {}
        for pool in self.pools:
            tiers = pool.engine.kv_offload.secondary_tiers if pool.engine.kv_offload is not None else ()
            model, engine = pool.model or self.model, pool.engine
            sizes = engine.tensor_parallel_size, engine.pipeline_parallel_size, engine.kv_block_tokens
            blocks = model.name, *sizes, *(getattr(engine, name) for name in _SHARED)
            for tier in tiers:
                if tier.shared and first.setdefault(tier.name, (tier, *blocks)) != (tier, *blocks):
                    yield (
                        f"got pools that share the store {tier.name} and differ in it, in their model, its formats, "
                        f"block_size, tensor_parallel_size or pipeline_parallel_size; name a store for each kind of "
                        f"blocks"
                    )

    @model_validator(mode="after")
    def _is_served(self, info: ValidationInfo) -> "Scenario":
        """Apply engine defaults and model formats, however the scenario was made."""
        fields = _served_fields(self, info.context or Positions(self.name))
        self.__dict__.update(fields)
        self.model_fields_set.update(fields)
        return self

    @property
    def pools(self) -> tuple[PoolSpec, ...]:
        """The cluster's pools; plain replicas are one unified pool."""
        cluster = self.cluster
        if cluster.pools:
            return cluster.pools
        return (PoolSpec(replicas=cluster.replicas, engine=self.engine, autoscaling=cluster.autoscaling),)

    def of_pool(self, pool: PoolSpec) -> "Scenario":
        """The scenario of one replica of `pool`: its engine and hardware, without a cluster."""
        hardware = pool.hardware or self.hardware
        engine = pool.engine
        if pool.role == "encode":  # no text: no KV to share, and no CUDA graphs (v1/worker/mm_encoder_model_runner.py)
            only = {"mm_encoder_only": True, "enforce_eager": True, "enable_prefix_caching": False}
            engine = engine.model_copy(update=only)
        own = {"engine": engine, "hardware": hardware, "model": pool.model or self.model}
        return self.model_copy(update={**own, "cluster": ClusterSpec()})

    @property
    def num_nodes(self) -> int:
        """Nodes of the widest replica; replicas may share one."""
        sizes = [(pool.engine.num_devices, pool.hardware or self.hardware) for pool in self.pools]
        return max(ceil(num_devices / hardware.devices_per_node) for num_devices, hardware in sizes)

    @property
    def attainment(self) -> float:
        """Required share of requests within per-request limits: the plan's, default 0.9."""
        share: float = getattr(self.plan, "attainment", DEFAULT_ATTAINMENT)
        return share

    @property
    def needs_token_times(self) -> bool:
        """Whether any limit needs single token times."""
        return any(slo.needs_token_times for slo in (self.slo, *(one.slo or self.slo for one in self.traffic.classes)))

    @property
    def num_devices(self) -> int:
        """Maximum devices of all replicas."""
        return sum(pool.most_replicas * pool.engine.num_devices for pool in self.pools)


def _served_fields(scenario: Scenario, positions: Positions) -> dict[str, Any]:
    """Fields of `scenario` that differ once served: the model, engine defaults, and the cluster's `network` and `host`
    on all hardware.

    Raises SpecError, or UnsupportedError for what no engine starts with: `file:line: field: ...`."""
    hardware, cluster = scenario.hardware, scenario.cluster
    use: Use = "offline" if scenario.traffic.arrivals.process == "burst" else "server"
    changed = _changed(scenario.model, scenario.model_changes, positions)
    model = _as_served(changed, scenario.engine, hardware, positions)
    given = {"network": cluster.network, "host": cluster.host}
    around = {name: value for name, value in given.items() if value is not None}
    pools = []
    for number, pool in enumerate(cluster.pools):
        place, device, served = ("cluster", "pools", number), pool.hardware or hardware, model
        if pool.share is not None:  # a model, or a version, of its own
            served = _as_served(pool.model or changed, pool.engine, device, positions, place)
        engine = _with_defaults(pool.engine, served, device, use, positions)
        _check_start(served, engine, device, positions, place)
        update: dict[str, Any] = {"engine": engine, "model": None if served is model else served}
        if pool.hardware is not None and around:
            update["hardware"] = pool.hardware.model_copy(update=around)
        pools.append(pool.model_copy(update=update))
    engine = _with_defaults(scenario.engine, model, hardware, use, positions)
    for path, sentence in answer_conflicts(scenario.traffic, model, pools):
        raise positions.error(path, sentence)
    if pools:
        cluster = cluster.model_copy(update={"pools": tuple(pools)})
    else:
        _check_start(model, engine, hardware, positions, ())
    fields = {"model": model, "engine": engine, "cluster": cluster}
    if model.pooling is not None and scenario.traffic.trace is None:
        fields["traffic"] = scenario.traffic.model_copy(update={"output_tokens": ONE_TOKEN})
    return fields | ({"hardware": hardware.model_copy(update=around)} if around else {})


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
        model = with_pooling(model, engine)
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
            raise positions.error(("model_changes", field), error) from None
    has_weights = original.weights_path is not None
    return replace(model, weights_path=None, changed_from=ChangedFrom(original, changes)) if has_weights else model


def _with_defaults(
    engine: EngineSpec, model: ModelSpec, hardware: HardwareSpec, use: Use, positions: Positions
) -> EngineSpec:
    """`engine` with the model's context length, version defaults, and its drafts' acceptance from the catalog."""
    if engine.speculative_config is not None:
        engine = engine.model_copy(update={"speculative_config": engine.speculative_config.drafting_for(model)})
    try:
        return with_defaults(engine, hardware, use, model.max_position_embeddings, pooling_defaults(model, engine))
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


def price_in_use(hardware: HardwareSpec, override: PriceOverride | None = None) -> Price | None:
    """Hourly device price: the scenario's, else the file's or the list's."""
    if override is None:
        return hardware.price
    price = override.price_of(hardware) or hardware.price
    return None if price is None else override.mixed(price)


def is_stale(price: Price) -> bool:
    """Whether it is older than half a year."""
    return price.date is not None and today() - price.date > _STALE


def price_lines(scenario: Scenario) -> list[str]:
    """Price per kind of device, with kind, source and date; none without a price."""
    return [
        f"Price: {price.usd_per_hour:g} USD per device hour of {device.name} ({price.origin})."
        for device, price in _prices(scenario)
        if price is not None
    ]


def price_notes(scenario: Scenario) -> list[str]:
    """Notes on missing, unconfirmed and old prices."""
    return [note for device, price in _prices(scenario) if (note := _price_note(device.name, price))]


def _price_note(device: str, price: Price | None) -> str:
    if price is None:
        return f"No price of {device} is known, so costs are left out; give price.usd_per_gpu_hour."
    what = f"The price of {device}, {price.usd_per_hour:g} USD per hour,"
    if price.is_unconfirmed:
        return f"{what} is unconfirmed: no list or quote is at hand; {_WAY_OUT}."
    return f"{what} dates from {price.date}, more than half a year ago; {_WAY_OUT}." if is_stale(price) else ""


def _prices(scenario: Scenario) -> Iterator[tuple[HardwareSpec, Price | None]]:
    devices = {device.name: device for device in (pool.hardware or scenario.hardware for pool in scenario.pools)}
    return ((device, price_in_use(device, scenario.price)) for device in devices.values())
