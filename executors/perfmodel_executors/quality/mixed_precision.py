"""Mixed precision from measured sensitivity: which blocks go to the smaller format, for a budget of bits per weight.

Greedy: the blocks that lose least per bit saved first, until the mean over all weights is within the budget.

    loss of a block = log(perplexity with only this block in the smaller format / perplexity without)

Losses of blocks are taken to add up. Source: Dong et al. 2019 (HAWQ) order layers by sensitivity too, from the Hessian;
here it is measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from perfmodel.errors import SpecError
from perfmodel.models.layer_formats import BLOCKS, LayerQuantization

Unit = tuple[int, str | None]  # a layer, and one of its blocks; None: all of them


@dataclass(frozen=True)
class BlockLoss:
    """What a block loses of log perplexity in the smaller format, and the bits that all its weights save."""

    unit: Unit
    loss: float
    bits_saved: float

    @property
    def loss_per_bit(self) -> float:
        return self.loss / self.bits_saved


def choose_blocks(losses: Sequence[BlockLoss], bits: float, num_weights: float, budget: float) -> tuple[Unit, ...]:
    """The blocks that go to the smaller format, in order, where all `num_weights` weights take `bits` each before.
    losses: what each block loses there, and the bits it saves; budget: bits per weight, on average. Raises SpecError
    for a budget below what the smaller format takes."""
    chosen: list[Unit] = []
    for block in sorted(losses, key=lambda block: block.loss_per_bit):
        if bits <= budget * (1 + 1e-9):
            return tuple(chosen)
        chosen.append(block.unit)
        bits -= block.bits_saved / num_weights
    if bits > budget * (1 + 1e-9):
        raise SpecError(
            f"--bits: found {budget:g}, but all blocks in the smaller format take {bits:.3f} bits a weight; raise it, "
            f"or choose a smaller format or larger groups (--group-size)."
        )
    return tuple(chosen)


def rules_of(units: Sequence[Unit], method: str, group_size: int | None) -> list[LayerQuantization]:
    rules = []
    for component in (None, *BLOCKS):
        layers = tuple(sorted(layer for layer, name in units if name == component))
        if layers:
            components = () if component is None else (component,)
            rules.append(
                LayerQuantization(layers=layers, components=components, quantization=method, group_size=group_size)
            )
    return rules
