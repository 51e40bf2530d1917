"""A plan's search space: layouts of a model on devices, and scheduling settings for each. A candidate is one replica
(disaggregated: one group of prefill and decode replicas); the rate sets their number. It is expressed as `--set`
overrides, so that it can be simulated, stored and exported as a scenario."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, TypeVar

from perfmodel.cost import MemoryPlan, plan_memory, usd_per_hour
from perfmodel.cost.kernel_models.device import tdp_w
from perfmodel.errors import DoesNotFitError, SpecError, UnsupportedError
from perfmodel.models.architecture import MoEFFN
from perfmodel.models.spec import ModelSpec
from perfmodel.planning.encoders import encode_pool, pool_fields
from perfmodel.planning.spec import MAX_CANDIDATES, UNIFIED, PlanSpace, PlanSpec, PoolSpace, ratio_of
from perfmodel.specs import load_scenario
from perfmodel.specs.cluster import KvTransferSpec, PoolSpec
from perfmodel.specs.engine.speculation import RIGHT_OF_MTP, RIGHT_OF_NGRAMS
from perfmodel.specs.overrides import as_overrides
from perfmodel.specs.scenario import Scenario, price_in_use


@dataclass(frozen=True)
class Base:
    """The scenario to plan for: a file's path or name, with overrides as `--set` takes them."""

    path: str
    overrides: tuple[str, ...] = ()

    def load(self, more: tuple[str, ...] = ()) -> Scenario:
        """The scenario with `more` overrides, without its own pools, which the plan replaces."""
        return load_scenario(self.path, (*self.overrides, *more))


@dataclass(frozen=True)
class Layout:
    """What step times depend on: devices, parallelism, number formats, speculation.

    choices:  fields set by the plan, as `--set` names them
    scenario: the base scenario with them, one unified replica
    cluster:  kept from the base scenario: router, network, KV transfer, host"""

    choices: Mapping[str, Any]
    scenario: Scenario
    cluster: Mapping[str, Any]

    @property
    def kv_transfer(self) -> KvTransferSpec:
        """The link between prefill and decode replicas."""
        return KvTransferSpec.model_validate(self.cluster.get("kv_transfer") or {})

    @property
    def label(self) -> str:
        """`h100-sxm-80gb TP4, FP8 weights`"""
        return f"{self.device} {', '.join(self.traits)}"

    @property
    def device(self) -> str:
        return self.scenario.hardware.name

    @property
    def traits(self) -> list[str]:
        """Parallelism and formats."""
        engine = self.scenario.engine
        sizes = {"PP": engine.pipeline_parallel_size, "DP": engine.data_parallel_size}
        sizes["PCP"] = engine.prefill_context_parallel_size
        parts = [f"TP{engine.tensor_parallel_size}", *(f"{name}{size}" for name, size in sizes.items() if size > 1)]
        if engine.enable_expert_parallel:
            parts.append("EP")
        if "engine.all2all_backend" in self.choices:
            parts.append(f"{engine.all2all_backend} exchange")
        if engine.enable_dbo:
            parts.append("DBO")
        if engine.afd_config is not None:
            parts.append(f"{engine.afd_config.num_ffn_devices} FFN devices")
        if engine.quantization:
            parts.append(f"{engine.quantization.upper()} weights")
        if engine.kv_cache_dtype != "auto":
            parts.append(f"{engine.kv_cache_dtype.upper()} KV cache")
        drafts = engine.speculative_config
        if drafts is not None:
            parts.append(f"{'MTP' if drafts.is_mtp_of(self.scenario.model) else drafts.method} drafts")
        return parts


@dataclass(frozen=True)
class PrefillEngine:
    """A prefill replica that differs from the decode replicas; formats and speculation are theirs."""

    layout: Layout
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True)
class Encoders:
    """Encode replicas in front of others. pool: their fields in a cluster; ratio: encode replicas, and others or groups
    of prefill and decode ones"""

    layout: Layout
    pool: Mapping[str, Any]
    ratio: tuple[int, int]


@dataclass(frozen=True)
class Candidate:
    """A layout with scheduling settings.

    ratio:    prefill and decode replicas of a group; None if unified
    memory:   memory plan of one replica's devices
    prefill:  the prefill replicas if they differ; all other fields are then of the decode replicas
    encoders: encode replicas of a group; None where images are encoded in the steps that read them"""

    layout: Layout
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    ratio: tuple[int, int] | None
    memory: MemoryPlan
    prefill: PrefillEngine | None = None
    encoders: Encoders | None = None

    @property
    def prefill_layout(self) -> Layout:
        """Layout of the prefill engines."""
        return self.layout if self.prefill is None else self.prefill.layout

    @property
    def counts(self) -> tuple[tuple[Layout, int], ...]:
        """(layout, number of replicas) of a replica or group."""
        pairs = [(self.layout, 1)]
        if self.ratio is not None:
            pairs = [(self.prefill_layout, self.ratio[0]), (self.layout, self.ratio[1])]
        if self.encoders is None:
            return tuple(pairs)
        count, others = self.encoders.ratio
        return ((self.encoders.layout, count), *((layout, others * number) for layout, number in pairs))

    @property
    def num_behind_encoders(self) -> int:
        """Replicas, or groups of prefill and decode ones, of a group with encode replicas; else 1."""
        return 1 if self.encoders is None else self.encoders.ratio[1]

    @property
    def split(self) -> str:
        """`1 encode to 3, 1 prefill to 2 decode`; empty for replicas that do all."""
        parts = [] if self.encoders is None else ["{} encode to {}".format(*self.encoders.ratio)]
        parts += [] if self.ratio is None else ["{} prefill to {} decode".format(*self.ratio)]
        return ", ".join(parts)

    @property
    def num_devices(self) -> int:
        """Devices of one replica or group."""
        return sum(layout.scenario.engine.num_devices * count for layout, count in self.counts)

    @cached_property
    def usd_per_hour(self) -> float | None:
        """USD per hour of all its devices; None without a price."""
        total = 0.0
        for layout, count in self.counts:
            price = usd_per_hour(layout.scenario.hardware, layout.scenario.price)
            if price is None:
                return None
            total += price * count * layout.scenario.engine.num_devices
        return total

    @property
    def tdp_w(self) -> float:
        """TDP of all its devices."""
        return sum(
            tdp_w(layout.scenario.hardware) * layout.scenario.engine.num_devices * n for layout, n in self.counts
        )

    @property
    def has_unconfirmed_price(self) -> bool:
        """Whether the price of one of its devices lacks a list or quote."""
        prices = [price_in_use(layout.scenario.hardware, layout.scenario.price) for layout, _ in self.counts]
        return any(price is not None and price.is_unconfirmed for price in prices)

    @property
    def num_engines(self) -> int:
        """Decode engines: data-parallel ranks of a replica or group, each with its own batch."""
        decodes = self.ratio[1] if self.ratio else 1
        return decodes * self.num_behind_encoders * self.layout.scenario.engine.data_parallel_size

    @property
    def kind(self) -> Hashable:
        """Equal for candidates that differ only in scheduling."""
        return id(self.layout), id(self.prefill_layout), self.ratio, self.encoders and self.encoders.ratio

    @property
    def devices(self) -> str:
        """Device names: one, or those of prefill and decode engines."""
        return " and ".join(dict.fromkeys(layout.device for layout, _ in self.counts))

    @property
    def label(self) -> str:
        """`h200-sxm TP4, 1 prefill to 2 decode, up to 64 requests, 2,048 tokens a step (prefill: h100-sxm-80gb TP2)`"""
        parts = [self.layout.label, *([self.split] if self.split else [])]
        parts += [f"up to {self.max_num_seqs:,} requests", f"{self.max_num_batched_tokens:,} tokens a step"]
        if not self.enable_chunked_prefill:
            parts.append("whole prompts")
        label, prefill = ", ".join(parts), self.prefill
        if prefill is None:
            return label
        decode, layout = self.layout, prefill.layout
        parts = [trait for trait in layout.traits if trait not in decode.traits]
        if layout.device != decode.device or (not parts and layout.label != decode.label):
            parts = [layout.label]
        if prefill.max_num_seqs != self.max_num_seqs:
            parts.append(f"up to {prefill.max_num_seqs:,} requests")
        if prefill.max_num_batched_tokens != self.max_num_batched_tokens:
            parts.append(f"{prefill.max_num_batched_tokens:,} tokens a step")
        return f"{label} (prefill: {', '.join(parts)})"

    def choices(self, replicas: int) -> dict[str, Any]:
        """Scenario fields for so many replicas or groups."""
        return {
            **self.layout.choices,
            "engine.max_num_seqs": self.max_num_seqs,
            "engine.max_num_batched_tokens": self.max_num_batched_tokens,
            "engine.enable_chunked_prefill": self.enable_chunked_prefill,
            "cluster": self._cluster(replicas),
        }

    def overrides(self, replicas: int) -> tuple[str, ...]:
        """`choices` as `--set` takes them."""
        return as_overrides(self.choices(replicas))

    def _cluster(self, replicas: int) -> dict[str, Any]:
        kept, behind = dict(self.layout.cluster), replicas * self.num_behind_encoders
        links = {"kv_transfer": self.ratio, "ec_transfer": self.encoders}
        moved = {name: kept.pop(name) for name in links if name in kept}
        moved = {name: link for name, link in moved.items() if links[name] is not None}
        if self.ratio is None and self.encoders is None:
            return {**kept, "replicas": replicas}
        pools: list[dict[str, Any]] = [
            {"role": role, "replicas": count * behind}
            for role, count in zip(("prefill", "decode"), self.ratio or (), strict=False)
        ]
        if self.prefill is not None:  # what the pool of prefill replicas has of its own
            shared, own = self.layout.choices, self.prefill.layout.choices
            changed = {field: value for field, value in own.items() if shared.get(field) != value}
            engine = {field.removeprefix("engine."): changed[field] for field in changed if field != "hardware"}
            for name in ("max_num_seqs", "max_num_batched_tokens"):
                if getattr(self.prefill, name) != getattr(self, name):
                    engine[name] = getattr(self.prefill, name)
            if own.get("hardware") != shared.get("hardware"):
                pools[0]["hardware"] = own["hardware"]
            pools[0] |= {"engine": engine} if engine else {}
        if self.encoders is not None:
            encode = {**self.encoders.pool, "replicas": self.encoders.ratio[0] * replicas}
            pools = [encode, *(pools or [{"replicas": behind}])]
        return {**kept, "pools": pools, **moved}


T = TypeVar("T")
NO_PRICE = "no price known"  # the reason for candidates that cannot be compared by price
# Choices that the times of steps depend on, and the fields of a scenario that they set.
_ENGINE_CHOICES = (
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel"),
    *("quantization", "kv_cache_dtype", "prefill_context_parallel_size", "all2all_backend", "enable_dbo"),
)
_AFD = "afd_config"
_LAYOUT_FIELDS = {
    "hardware": "hardware",
    **{name: f"engine.{name}" for name in _ENGINE_CHOICES},
    "speculation": "engine.speculative_config",
    _AFD: f"engine.{_AFD}",  # of decode engines alone
}


@dataclass(frozen=True)
class Space:
    """Candidates that can serve, and the number ruled out by reason. by_device: `ruled_out` for each device of the
    space; searched: choices with several values -> the values, in words"""

    candidates: tuple[Candidate, ...]
    ruled_out: Mapping[str, int]
    by_device: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    searched: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_all(self) -> int:
        return len(self.candidates) + sum(self.ruled_out.values())


class _RefusedError(Exception):
    """A layout or candidate that cannot serve, with the reason in short."""


def enumerate_space(base: Base, spec: PlanSpec) -> Space:
    """The candidates of `spec` for the scenario `base`. Raises SpecError for an invalid scenario or value of `spec`."""
    candidates = _Candidates(base, spec)
    own_engine, space = candidates.scenario.engine, _widened(spec, candidates.scenario)
    is_unequal = space.prefill is not None or space.decode is not None
    ratios = [ratio_of(text) for text in space.disaggregation] or [None]
    own = [ratio for ratio in ratios if ratio is None or not is_unequal]
    # Unless the space has values of either, data-parallel attention goes with expert parallelism.
    has_own_ranks = bool(spec.space.model_fields_set & {"data_parallel_size", "enable_expert_parallel"})
    for choices in _layout_choices(space):
        ranks = choices.get("engine.data_parallel_size", 1)
        is_usual = ranks in (1, own_engine.data_parallel_size) or choices.get("engine.enable_expert_parallel")
        if has_own_ranks or is_usual:
            candidates.add(choices, space, own)
    if is_unequal:
        changed = [text for text in base.overrides if text.startswith("hardware.")]
        if changed and any(pool is not None and pool.hardware for pool in (space.prefill, space.decode)):
            raise SpecError(
                f"--set {changed[0]}: changes one device, and prefill and decode engines may have two; copy the "
                f"device's file, change it there and name the copy in the space."
            )
        decode = space.model_copy(update={name: values for name, values in space.decode or () if values})
        for choices in _layout_choices(decode):
            candidates.add(choices, decode, [ratio for ratio in ratios if ratio is not None], space.prefill)
    axes = {title: getattr(space, name) for name, title in _AXES.items()}
    searched = {title: ", ".join(map(_in_words, values)) for title, values in axes.items() if len(values) > 1}
    ruled_out = dict(candidates.ruled_out.most_common())
    return Space(tuple(candidates.accepted), ruled_out, candidates.by_device, searched)


_Ratio = tuple[int, int] | None
# Of prefill engines that differ: choices, max_num_seqs, max_num_batched_tokens.
_Prefill = tuple[dict[str, Any], int, int]


def _layout_choices(space: PlanSpace | PoolSpace) -> Iterator[dict[str, Any]]:
    axes = {field: getattr(space, name, ()) for name, field in _LAYOUT_FIELDS.items() if getattr(space, name, ())}
    for values in product(*axes.values()):
        yield {field: value for field, value in zip(axes, values, strict=True) if value is not _OWN_DRAFTS}


def _prefills(choices: dict[str, Any], space: PoolSpace | None, seqs: int, tokens: int) -> Iterator[_Prefill | None]:
    """Prefill engines that `space` offers beside such decode engines; None for equal ones."""
    shared = {field: None if field == _LAYOUT_FIELDS[_AFD] else value for field, value in choices.items()}
    if space is None and shared == choices:
        yield None
        return
    space = space or PoolSpace()
    for own in _layout_choices(space):
        whole = {**shared, **own}
        for schedule in product(space.max_num_seqs or (seqs,), space.max_num_batched_tokens or (tokens,)):
            yield None if (whole, *schedule) == (choices, seqs, tokens) else (whole, *schedule)


# Tried where the scenario has an encode pool.
_ENCODERS = (UNIFIED, "1:1", "1:2", "1:3", "1:4", "1:6", "1:8", "2:1")
# Tried of mixtures of experts by default, besides expert parallelism: data-parallel attention, prefill and decode
# apart, and drafts that need no other model.
_DATA_PARALLEL = (1, 2, 4, 8, 16)
_RATIOS = (UNIFIED, "1:1", "1:2", "2:1")
_MTP = {"method": "mtp", "num_speculative_tokens": 1, "acceptance": {"rate": RIGHT_OF_MTP}}
_NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "acceptance": {"rate": RIGHT_OF_NGRAMS}}
_OWN_DRAFTS: dict[str, Any] = {}  # stands for those of the scenario
_CUTS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def _widened(spec: PlanSpec, scenario: Scenario) -> PlanSpace:
    """The space of `spec`, with the scenario's own parallelism added to defaults. Open choices of a mixture of experts
    get more values, up to `MAX_CANDIDATES`."""
    space, given = spec.space, spec.space.model_fields_set
    if "encoders" not in given and encode_pool(scenario) is not None:
        space = space.model_copy(update={"encoders": _ENCODERS})
    if has_experts(scenario.model):
        drafts: tuple[dict[str, Any] | None, ...] = (None, _MTP if scenario.model.num_prediction_layers else _NGRAMS)
        if scenario.engine.speculative_config is not None:
            drafts = (_OWN_DRAFTS, None)
        wider = {
            "enable_expert_parallel": (False, True),
            "data_parallel_size": _DATA_PARALLEL,
            "disaggregation": space.disaggregation if spec.is_offline else _RATIOS,
            "speculation": drafts,
        }
        for name, values in wider.items():
            wider_space = space.model_copy(update={name: values})
            if name not in given and wider_space.num_candidates <= MAX_CANDIDATES:
                space = wider_space
    open_cuts = [name for name in _CUTS if name not in space.model_fields_set]
    own = {name: (getattr(space, name), getattr(scenario.engine, name)) for name in open_cuts}
    return space.model_copy(update={name: (*values, cut) for name, (values, cut) in own.items() if cut not in values})


# Fields of a space, as answers name them.
_AXES = {
    "hardware": "devices",
    "tensor_parallel_size": "TP",
    "pipeline_parallel_size": "PP",
    "data_parallel_size": "attention DP",
    "enable_expert_parallel": "EP",
    "quantization": "weights",
    "kv_cache_dtype": "KV cache",
    "prefill_context_parallel_size": "PCP",
    "all2all_backend": "exchange",
    "enable_dbo": "two-batch overlap",
    "disaggregation": "prefill:decode",
    "encoders": "encode:others",
    "speculation": "speculation",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "enable_chunked_prefill": "chunked prefill",
}


def _in_words(value: Any) -> str:
    if value is _OWN_DRAFTS:
        return "the scenario's"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        acceptance = value.get("acceptance")
        rate = acceptance.get("rate") if isinstance(acceptance, dict) else None
        right = f" with {rate:.0%} of drafted tokens right" if isinstance(rate, int | float) else ""
        return f"{value.get('method', 'no method')}{right}"
    return f"{value:,}" if isinstance(value, int) else str(value or UNIFIED)


_SCHEDULE = {"max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill"}
_KEPT = {"router", "kv_transfer", "ec_transfer", "network", "host"}  # of the cluster, whatever the plan makes of it


class _Candidates:
    """Collects candidates and rejections; caches layouts and memory plans. Methods raise _RefusedError."""

    def __init__(self, base: Base, spec: PlanSpec) -> None:
        self._base, self._spec, self.scenario = base, spec, base.load()
        self._cluster = self.scenario.cluster.model_dump(mode="json", include=_KEPT, exclude_unset=True)
        fixed = {name.removeprefix("engine.") for name in _LAYOUT_FIELDS.values()} | _SCHEDULE
        self._encode_pool = pool_fields(encode_pool(self.scenario) or PoolSpec(role="encode"), fixed)
        self._known: dict[Hashable, Any] = {}
        self.accepted: list[Candidate] = []
        self.ruled_out: Counter[str] = Counter()
        self.by_device: dict[str, Counter[str]] = {}

    def _once(self, key: Hashable, work: Callable[[], T]) -> T:
        if key not in self._known:
            try:
                self._known[key] = work()
            except _RefusedError as error:
                self._known[key] = error
        if isinstance(self._known[key], _RefusedError):
            raise self._known[key]
        result: T = self._known[key]
        return result

    def layout(self, choices: dict[str, Any]) -> Layout:
        """Refuses choices that cannot serve under any schedule."""
        return self._once(tuple(sorted(as_overrides(choices))), lambda: self._layout(choices))

    def add(
        self, choices: dict[str, Any], space: PlanSpace, ratios: Sequence[_Ratio], prefill: PoolSpace | None = None
    ) -> None:
        """The candidates of a layout: each schedule of `space` with each ratio, and each of the prefill engines."""
        layout: Layout | _RefusedError
        try:
            layout = self.layout(choices)
        except _RefusedError as error:
            layout = error
        # A layout's engine has its version's defaults on its devices.
        engine = layout.scenario.engine if isinstance(layout, Layout) else self.scenario.engine
        budgets = space.max_num_batched_tokens or (engine.max_num_batched_tokens,)
        chunks = space.enable_chunked_prefill or (engine.enable_chunked_prefill,)
        encoders = [ratio_of(text) for text in space.encoders] or [None]
        schedules = product(space.max_num_seqs or (engine.max_num_seqs,), budgets, chunks, ratios, encoders)
        for seqs, tokens, chunked, ratio, encode in schedules:
            for own in _prefills(choices, prefill, seqs, tokens):
                try:
                    if isinstance(layout, _RefusedError):
                        raise layout
                    candidate = self._candidate(layout, seqs, tokens, chunked, ratio, own, encode)
                    self.accepted.append(candidate)
                except _RefusedError as error:
                    self.ruled_out[str(error)] += 1
                    if "hardware" in choices:
                        self.by_device.setdefault(choices["hardware"], Counter())[str(error)] += 1

    def _candidate(
        self, layout: Layout, seqs: int, tokens: int, chunked: bool, ratio: _Ratio, own: _Prefill | None, encode: _Ratio
    ) -> Candidate:
        _check_steps(layout, seqs, tokens, chunked)
        prefill = None if own is None else PrefillEngine(self.layout(own[0]), own[1], own[2])
        if prefill is not None:
            _check_steps(prefill.layout, prefill.max_num_seqs, prefill.max_num_batched_tokens, chunked)
        memory = self._memory(layout, seqs, tokens)
        if prefill is not None:
            self._memory(prefill.layout, prefill.max_num_seqs, prefill.max_num_batched_tokens)
        encoders = None
        if encode is not None:
            of_images = self._once((id(layout), "encode"), lambda: self._encode_layout(layout))
            encoders = Encoders(of_images, self._encode_pool, encode)
        candidate, spec = Candidate(layout, seqs, tokens, chunked, ratio, memory, prefill, encoders), self._spec
        if candidate.num_devices > spec.max_gpus:
            raise _RefusedError("more devices than max_gpus")
        if spec.budget_usd_per_hour is not None and (candidate.usd_per_hour or 0.0) > spec.budget_usd_per_hour:
            raise _RefusedError("beyond budget_usd_per_hour")
        if ratio is not None and layout.scenario.engine.speculative_config is not None:
            raise _RefusedError("speculation beside prefill and decode pools")
        if ratio is not None:
            self._once((id(layout), "apart"), lambda: self._check_apart(candidate))
        return candidate

    def _encode_layout(self, layout: Layout) -> Layout:
        """One encode replica on the devices of `layout`, unless its pool has others."""
        pools = {"cluster": {"pools": [self._encode_pool, {}]}}
        try:
            scenario = self._base.load(as_overrides({**layout.choices, **pools}))
            own = scenario.of_pool(scenario.pools[0])
            plan_memory(own.model, own.hardware, own.engine)
        except DoesNotFitError:
            raise _RefusedError("encoders do not fit in memory") from None
        except SpecError as error:
            raise _RefusedError(f"encode pools: {_sentence(error)}") from None
        return Layout(layout.choices, own, {})

    def _check_apart(self, candidate: Candidate) -> None:
        """Refuses engines that do not serve as prefill and decode replicas, as with LoRA adapters."""
        try:
            self._base.load(replace(candidate, ratio=(1, 1), prefill=None, encoders=None).overrides(1))
        except SpecError as error:
            raise _RefusedError(f"prefill and decode pools: {_sentence(error)}") from None

    def _layout(self, choices: dict[str, Any]) -> Layout:
        around = {name: value for name, value in self._cluster.items() if not name.endswith("_transfer")}
        try:
            scenario = self._base.load(as_overrides({**choices, "cluster": around}))
        except UnsupportedError as error:
            raise _RefusedError(error.reason) from None
        except SpecError as error:
            # A value of the space, or a field in it, that can be no candidate's is a mistake, and none ruled out.
            places = [f"--set {text}: {text.partition('=')[0]}" for text in as_overrides(choices)]
            if any(f"{place}{end}" in str(error) for place in places for end in (": ", ".")):
                raise
            raise _RefusedError(f"the scenario refuses it: {_sentence(error)}") from None
        engine, spec, is_mixture = scenario.engine, self._spec, has_experts(scenario.model)
        tp, dp = engine.tensor_parallel_size, engine.data_parallel_size
        if engine.num_devices > spec.max_gpus:
            raise _RefusedError("more devices than max_gpus")
        if tp > (spec.link_domain or scenario.hardware.devices_per_node):
            raise _RefusedError("tensor parallelism beyond the link domain")
        if dp > 1 and not is_mixture:
            raise _RefusedError("data-parallel ranks of a dense model are replicas")
        if engine.enable_expert_parallel and not (is_mixture and tp * dp > 1):
            raise _RefusedError("expert parallelism without experts to share out")
        needs_price = spec.objective == "cheapest" or spec.budget_usd_per_hour is not None
        if needs_price and usd_per_hour(scenario.hardware, scenario.price) is None:
            raise _RefusedError(NO_PRICE)
        return Layout(choices, scenario, self._cluster)

    def _memory(self, layout: Layout, seqs: int, tokens: int) -> MemoryPlan:
        """Refuses a layout that does not hold the model, or leaves room for too few tokens."""

        def plan() -> MemoryPlan:
            scenario = layout.scenario
            engine = scenario.engine.model_copy(update={"max_num_seqs": seqs, "max_num_batched_tokens": tokens})
            try:
                plan = plan_memory(scenario.model, scenario.hardware, engine)
            except DoesNotFitError:
                raise _RefusedError("does not fit in memory") from None
            if plan.max_context() < (engine.max_model_len or 0):  # vLLM refuses to start
                raise _RefusedError("KV cache holds less than max_model_len")
            return plan

        return self._once((id(layout), seqs, tokens), plan)


def _sentence(error: SpecError) -> str:
    """What `error` says, without the place in the file."""
    text = str(error).rstrip(".")
    return text[max(text.find("got "), 0) :]


def has_experts(model: ModelSpec) -> bool:
    """Whether the model is a mixture of experts."""
    return any(isinstance(layer.ffn, MoEFFN) for layer, _ in model.layers)


def _check_steps(layout: Layout, seqs: int, tokens: int, chunked: bool) -> None:
    engine = layout.scenario.engine
    if tokens < seqs and engine.batching == "continuous":
        raise _RefusedError("max_num_batched_tokens below max_num_seqs")
    if not chunked and tokens < (engine.max_model_len or 0):
        # As vLLM: a prompt that is computed at once has to fit.
        raise _RefusedError("unchunked prompts of max_model_len exceed max_num_batched_tokens")
