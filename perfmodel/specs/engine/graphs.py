"""For which steps an engine captures CUDA graphs: facts of its code, a block of its file."""

__all__ = ["CaptureRange", "GraphObstacle", "GraphRules"]

from collections.abc import Collection
from typing import Literal

from perfmodel.files.base import Spec
from perfmodel.files.units import NonNegativeInt, PositiveInt

GraphObstacle = Literal["encoder", "indexer", "data_parallel", "pipeline_parallel", "all2all", "speculation"]


class CaptureRange(Spec):
    """Sizes from `first` on, every `step`, up to where the next range begins."""

    first: PositiveInt
    step: PositiveInt


class GraphRules(Spec):
    """For which steps CUDA graphs are captured, by their tokens; one of another size runs the graph of the next larger.

    sizes, ranges:     the smallest sizes one by one, then in ranges
    most_tokens:       the largest size; 0: no graphs
    per_sequence:      largest size for each of max_num_seqs, up to most_tokens; 0: it does not limit it
    per_drafted_token: times one and the tokens drafted for a sequence
    with_prompts:      steps with prompts are captured, too (in pieces around attention); else those that only decode
    prompts_up_to_budget: those of up to max_num_batched_tokens tokens; else of up to as many as the others
    most_with_latents: tokens of the largest step with prompts of models that cache latents; 0: as of others
    prompts_without:   what no step with prompts is captured with
    inside_memory_share: their memory counts inside gpu_memory_utilization; else it comes on top
    """

    sizes: tuple[PositiveInt, ...] = ()
    ranges: tuple[CaptureRange, ...] = ()
    most_tokens: NonNegativeInt = 0
    per_sequence: NonNegativeInt = 0
    per_drafted_token: bool = False
    with_prompts: bool = False
    prompts_up_to_budget: bool = False
    most_with_latents: NonNegativeInt = 0
    prompts_without: tuple[GraphObstacle, ...] = ()
    inside_memory_share: bool = False

    def most(self, max_num_seqs: int, max_num_batched_tokens: int, drafted: int = 0) -> int:
        """Tokens of the largest step that is captured; `drafted`: tokens drafted for a sequence."""
        most = min(self.most_tokens, max_num_batched_tokens)
        if not self.per_sequence:
            return most
        return min(most, self.per_sequence * max_num_seqs * (1 + (drafted if self.per_drafted_token else 0)))

    def sizes_up_to(self, most: int) -> tuple[int, ...]:
        """All sizes of up to `most` tokens, ascending."""
        found = [size for size in self.sizes if size <= most]
        ends = [*(each.first for each in self.ranges[1:]), most + 1]
        for each, end in zip(self.ranges, ends, strict=True):
            found += range(each.first, min(end, most + 1), each.step)
        return tuple(found)

    def most_with_prompts(
        self, most: int, max_num_batched_tokens: int, has_latents: bool, obstacles: Collection[GraphObstacle]
    ) -> int:
        """Tokens of the largest step with prompts that is captured; 0: none is.

        most: of steps that decode; max_num_batched_tokens: of any step; has_latents: whether the model caches latents
        obstacles: what the deployment has of `GraphObstacle`
        """
        if not self.with_prompts or not most or not set(self.prompts_without).isdisjoint(obstacles):
            return 0
        if not self.prompts_up_to_budget:
            return most
        limit = self.most_with_latents if has_latents else 0
        return min(max_num_batched_tokens, limit or max_num_batched_tokens)
