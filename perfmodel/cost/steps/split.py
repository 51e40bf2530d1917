"""Layers split over several devices of one machine, which work one after another.

A step of n pieces (micro-batches of the engine's `ubatch_size`) passes g devices like a flow line with room for
`pieces_under_way`; with T what one device would take for all of it,

    t = T (n + g - 1) / (n g)        g = min(devices, pieces_under_way)

One piece, as of all steps that only decode, gains nothing. Source: GPipe (Huang et al. 2019); llama.cpp's
`llama_context::decode`, which hands over all pieces of a batch before it waits for the first.
"""

from math import ceil
from typing import NamedTuple

from perfmodel.cost.steps.curve import DecodeRun
from perfmodel.cost.steps.explain import StepEstimate
from perfmodel.cost.steps.pricer import StepPricer
from perfmodel.cost.steps.tables import Usage
from perfmodel.ops.work import BatchShape
from perfmodel.specs.engine.spec import EngineSpec


class LayerSplit(NamedTuple):
    """lanes: pieces that are computed at the same time; piece: its tokens, 0 where steps are computed whole"""

    lanes: int
    piece: int

    def share(self, num_tokens: int) -> float:
        """What a step of so many tokens takes, of what it would on one device."""
        pieces = ceil(num_tokens / self.piece) if self.piece else 1
        return (pieces + self.lanes - 1) / (pieces * self.lanes)


def layer_split_of(engine: EngineSpec) -> LayerSplit | None:
    """How the layers are split; None on one device."""
    if engine.layer_split == 1:
        return None
    return LayerSplit(min(engine.layer_split, engine.described.facts.pieces_under_way or 1), engine.ubatch_size)


class SplitPricer:
    """Prices the steps of `whole`, on one device, as those of devices that its layers are split over."""

    def __init__(self, whole: StepPricer, split: LayerSplit) -> None:
        self.has_runs = False
        self._whole, self._split = whole, split

    def price(self, shape: BatchShape) -> int:
        """Picoseconds of a step, which is counted as taken."""
        return round(self._whole.price(shape) * self._split.share(shape.num_tokens))

    def run(self, shape: BatchShape, growth: tuple[int, ...], num_steps: int) -> DecodeRun | None:
        """None: steps are priced one by one."""
        return None

    def explain(self, shape: BatchShape) -> StepEstimate:
        """The step operator by operator, in seconds, as if nothing overlapped."""
        return self._whole.explain(shape)

    def usage(self) -> Usage:
        """Totals over all steps so far, of all devices together."""
        return self._whole.usage()

    def fresh(self) -> "SplitPricer":
        """A pricer of the same steps that has counted nothing."""
        return SplitPricer(self._whole.fresh(), self._split)
