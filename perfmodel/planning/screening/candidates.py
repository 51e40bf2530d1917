"""What a plan chooses between: layouts of a model on devices, and ways to schedule requests on each.

A candidate is one replica (disaggregated: one group of prefill and decode replicas); how many of them is found from
the rate. It is text that `--set` takes, so that it can be simulated, stored and written down as a scenario.
"""

__all__ = ["Base", "Candidate", "Layout", "PrefillEngine"]

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from perfmodel.cost import MemoryPlan, usd_per_hour
from perfmodel.specs import load_scenario
from perfmodel.specs.cluster import KvTransferSpec
from perfmodel.specs.overrides import as_overrides
from perfmodel.specs.scenario import Scenario, price_in_use


@dataclass(frozen=True)
class Base:
    """The scenario that is planned for: a file's path or name, with overrides as `--set` takes them."""

    path: str
    overrides: tuple[str, ...] = ()

    def load(self, more: tuple[str, ...] = ()) -> Scenario:
        """The scenario with `more` overrides; its own pools make room for the plan's."""
        return load_scenario(self.path, (*self.overrides, *more))


@dataclass(frozen=True)
class Layout:
    """What the times of steps depend on: devices, how the model is cut over them, number formats, drafts.

    choices:  the fields that the plan has set, as `--set` names them
    scenario: the base scenario with them, one unified replica
    cluster:  what stays of the base scenario's cluster: its router, its network, and how KV is moved
    """

    choices: Mapping[str, Any]
    scenario: Scenario
    cluster: Mapping[str, Any]

    @property
    def kv_transfer(self) -> KvTransferSpec:
        """The link between prefill and decode replicas."""
        return KvTransferSpec.model_validate(self.cluster.get("kv_transfer") or {})

    @property
    def devices_per_replica(self) -> int:
        return self.scenario.engine.num_devices

    @property
    def label(self) -> str:
        """`h100-sxm-80gb TP4, FP8 weights`"""
        return f"{self.device} {', '.join(self.traits)}"

    @property
    def device(self) -> str:
        return self.scenario.hardware.name

    @property
    def traits(self) -> list[str]:
        """How the model is cut, and in which formats."""
        engine = self.scenario.engine
        parts = [f"TP{engine.tensor_parallel_size}"]
        if engine.pipeline_parallel_size > 1:
            parts.append(f"PP{engine.pipeline_parallel_size}")
        if engine.data_parallel_size > 1:
            parts.append(f"DP{engine.data_parallel_size}")
        if engine.enable_expert_parallel:
            parts.append("EP")
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
    """A prefill replica that is not as the decode replicas are. It has their formats and drafts."""

    layout: Layout
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True)
class Candidate:
    """A layout, and how requests are scheduled on each replica.

    ratio:   prefill and decode replicas of a group, None where replicas do both
    memory:  the plan of one replica's devices
    prefill: the prefill replicas, where they differ from the decode replicas; all else is then of the decode replicas
    """

    layout: Layout
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    ratio: tuple[int, int] | None
    memory: MemoryPlan
    prefill: PrefillEngine | None = None

    @property
    def prefill_layout(self) -> Layout:
        """Layout of the engines that compute prompts."""
        return self.layout if self.prefill is None else self.prefill.layout

    @property
    def counts(self) -> tuple[tuple[Layout, int], ...]:
        """The layouts of a replica or group, and how many replicas it has of each."""
        if self.ratio is None:
            return ((self.layout, 1),)
        return ((self.prefill_layout, self.ratio[0]), (self.layout, self.ratio[1]))

    @property
    def num_devices(self) -> int:
        """Devices of one replica, or of one group of prefill and decode replicas."""
        return sum(layout.devices_per_replica * count for layout, count in self.counts)

    @property
    def usd_per_hour(self) -> float | None:
        """USD per hour of all its devices; None without a price."""
        found = 0.0
        for layout, count in self.counts:
            price = usd_per_hour(layout.scenario.hardware, layout.scenario.price)
            if price is None:
                return None
            found += price * count * layout.devices_per_replica
        return found

    @property
    def has_unconfirmed_price(self) -> bool:
        """Whether no list or quote stands behind the price of one of its devices."""
        scenarios = [layout.scenario for layout, _ in self.counts]
        prices = [price_in_use(scenario.hardware, scenario.price) for scenario in scenarios]
        return any(price is not None and price.is_unconfirmed for price in prices)

    @property
    def num_engines(self) -> int:
        """Engines that decode: data-parallel ranks of a replica or group, each with a batch of its own."""
        return (self.ratio[1] if self.ratio else 1) * self.layout.scenario.engine.data_parallel_size

    @property
    def kind(self) -> Hashable:
        """Equal for candidates that differ in how requests are scheduled only."""
        return id(self.layout), id(self.prefill_layout), self.ratio

    @property
    def devices(self) -> str:
        """The names of what it runs on: one, or those of its prefill and decode engines."""
        return " and ".join(dict.fromkeys(layout.scenario.hardware.name for layout, _ in self.counts))

    @property
    def label(self) -> str:
        parts = [self.layout.label]
        if self.ratio is not None:
            parts.append(f"{self.ratio[0]} prefill to {self.ratio[1]} decode")
        parts += [f"up to {self.max_num_seqs:,} requests", f"{self.max_num_batched_tokens:,} tokens a step"]
        if not self.enable_chunked_prefill:
            parts.append("whole prompts")
        label = ", ".join(parts)
        return label if self.prefill is None else f"{label} (prefill: {self._prefill_label(self.prefill)})"

    def _prefill_label(self, own: PrefillEngine) -> str:
        """What it has of its own: `h200-sxm TP2, 16,384 tokens a step`."""
        mine, its = self.layout, own.layout
        parts = [trait for trait in its.traits if trait not in mine.traits]
        if its.device != mine.device or (not parts and its.label != mine.label):
            parts = [its.label]
        if own.max_num_seqs != self.max_num_seqs:
            parts.append(f"up to {own.max_num_seqs:,} requests")
        if own.max_num_batched_tokens != self.max_num_batched_tokens:
            parts.append(f"{own.max_num_batched_tokens:,} tokens a step")
        return ", ".join(parts)

    def choices(self, replicas: int) -> dict[str, Any]:
        """The fields of the scenario that serves with so many of it."""
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
        kept = dict(self.layout.cluster)
        transfer = kept.pop("kv_transfer", None)
        if self.ratio is None:
            return {**kept, "replicas": replicas}
        pools: list[dict[str, Any]] = [
            {"role": role, "replicas": count * replicas}
            for role, count in zip(("prefill", "decode"), self.ratio, strict=True)
        ]
        pools[0] |= self._prefill_fields()
        return {**kept, "pools": pools, **({"kv_transfer": transfer} if transfer else {})}

    def _prefill_fields(self) -> dict[str, Any]:
        """What a pool of prefill replicas has of its own."""
        if self.prefill is None:
            return {}
        mine, own = self.layout.choices, self.prefill.layout.choices
        engine = {
            field.removeprefix("engine."): value
            for field, value in own.items()
            if field.startswith("engine.") and mine.get(field) != value
        }
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(self.prefill, name) != getattr(self, name):
                engine[name] = getattr(self.prefill, name)
        hardware = {"hardware": own["hardware"]} if own.get("hardware") != mine.get("hardware") else {}
        return {**hardware, **({"engine": engine} if engine else {})}
