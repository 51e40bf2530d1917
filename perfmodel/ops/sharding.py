"""Sharding: tensor, pipeline, data and expert parallelism, as in vLLM.

Sizes that do not divide are rounded up: the largest share sets the time."""

from dataclasses import dataclass
from math import ceil
from typing import Literal

from perfmodel.ops.messages import RankAxis, RankGroup, Route
from perfmodel.specs.engine.spec import EngineSpec

# How tokens reach their experts. DeepEP (README, "normal" and "low-latency" kernels): the first sends a token once to
# each node and hands it on over NVLink, the second to each expert's rank over the network; pplx-kernels as the second.
# FlashInfer's all-to-all (of TensorRT-LLM): once to each rank.
_ROUTES: dict[str, Route | Literal["auto"]] = {
    "deepep_auto": "auto",
    "deepep_high_throughput": "node",
    "deepep_low_latency": "expert",
    "pplx": "expert",
    "flashinfer_all2allv": "rank",
}


@dataclass(frozen=True, slots=True)
class Sharding:
    """tp, pp, dp: degrees of tensor, pipeline and data parallelism; ep: ranks that share out whole experts; dcp: of a
    tensor-parallel group, ranks that share out the tokens of their KV heads; pcp: groups that share out the tokens of
    prompts. These are counted in dp, since they differ in tokens as data-parallel ranks do, and are numbered alike.
    gathers_tokens: see `EngineSpec`. num_redundant_experts: over all ranks. route: of tokens to remote experts; auto:
    DeepEP's normal kernels in steps with prompts, its low-latency ones in others; None: fastest

    Without expert parallelism the experts are cut along their intermediate size over all tp * dp ranks (vLLM flattens
    the two for mixture-of-experts layers), so that `moe_tp * ep == tp * dp` always."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    is_expert_parallel: bool = False
    gathers_tokens: bool = True
    num_redundant_experts: int = 0
    route: Route | Literal["auto"] | None = None
    dcp: int = 1
    pcp: int = 1

    @classmethod
    def of(cls, engine: EngineSpec) -> "Sharding":
        return cls(
            tp=engine.tensor_parallel_size,
            pp=engine.pipeline_parallel_size,
            dp=engine.data_parallel_size * engine.prefill_context_parallel_size,
            is_expert_parallel=engine.enable_expert_parallel,
            gathers_tokens=engine.gathers_tokens or not engine.enable_expert_parallel,
            num_redundant_experts=engine.eplb_config.num_redundant_experts,
            route=_ROUTES.get(engine.all2all_backend or ""),
            dcp=engine.decode_context_parallel_size,
            pcp=engine.prefill_context_parallel_size,
        )

    def group(self, axis: RankAxis, stage: int | None = None) -> RankGroup:
        """Ranks that share out what is cut along `axis`; "pipeline": peers in `stage` and the next, or in any two."""
        return RankGroup(axis, self.tp, self.pp, self.dp, stage, self.dcp)

    @property
    def ep(self) -> int:
        return self.tp * self.dp if self.is_expert_parallel else 1

    @property
    def moe_tp(self) -> int:
        return 1 if self.is_expert_parallel else self.tp * self.dp

    def route_of(self, has_prompts: bool) -> Route | None:
        """The route in a step with prompts, or without."""
        return ("node" if has_prompts else "expert") if self.route == "auto" else self.route

    def local_experts(self, num_experts: int) -> int:
        """Experts per rank, copies included."""
        return ceil((num_experts + self.num_redundant_experts) / self.ep)

    def columns(self, size: int) -> int:
        """A dimension cut over tensor-parallel ranks."""
        return ceil(size / self.tp)

    def expert_columns(self, size: int) -> int:
        """Columns of an expert on a rank; all, under expert parallelism."""
        return ceil(size / self.moe_tp)

    def kv_heads(self, num_kv_heads: int) -> int:
        """KV heads per device; replicated if fewer than ranks."""
        return max(1, ceil(num_kv_heads / self.tp))


def stages(num_layers: int, num_stages: int) -> list[range]:
    """Layers of each pipeline stage, as vLLM splits them: the remainder goes to stages before the last."""
    base, rest = divmod(num_layers, num_stages)
    sizes = [base] * num_stages
    for i in range(rest):
        sizes[-2 - i] += 1
    starts = [sum(sizes[:i]) for i in range(num_stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
