"""Rotary tables of a model's layers, and `Rotations`: the rows that a step needs, looked up once for all layers. A
table has a row for each position and a column for each pair of elements, (i, i + H/2) of a head, cosines before sines;
elements that do not rotate have the frequency 0."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from perfmodel.errors import PerfmodelError
from perfmodel.models.architecture import Rope, RopeScaling

Tables = Mapping[tuple[Rope, int], Tensor]


def _dynamic(inverse: Tensor, rope: Rope, scaling: RopeScaling, trained: int, num_positions: int) -> Tensor:
    """As trained within the trained context; beyond it the base would depend on each sequence's length."""
    if num_positions > trained:
        raise PerfmodelError(
            f"dynamic scaling of rotary frequencies is executed within the trained context of {trained} tokens, and "
            f"the engine serves {num_positions}; set engine.max_model_len to {trained}."
        )
    return inverse


def _llama3(inverse: Tensor, rope: Rope, scaling: RopeScaling, trained: int, num_positions: int) -> Tensor:
    """Long wavelengths divided by the factor, short ones as they are, those in between blended (Llama 3.1)."""
    rotations = inverse * (trained / (2 * math.pi))  # within the trained context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - share) * inverse / (scaling.factor or 1) + share * inverse


def _yarn(inverse: Tensor, rope: Rope, scaling: RopeScaling, trained: int, num_positions: int) -> Tensor:
    """As trained above `beta_fast` rotations, divided by the factor below `beta_slow` (Peng et al. 2023, 3.2)."""
    dim = 2 * len(inverse)

    def element(rotations: float) -> float:
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = element(scaling.beta_fast), element(scaling.beta_slow)
    if scaling.truncates:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(len(inverse)) - low) / max(high - low, 0.001)).clamp(0, 1)
    return inverse / (scaling.factor or 1) * ramp + inverse * (1 - ramp)


def _longrope(inverse: Tensor, rope: Rope, scaling: RopeScaling, trained: int, num_positions: int) -> Tensor:
    """The long divisors where the engine serves more than the trained context, as vLLM decides it."""
    divisors = scaling.long_factors if num_positions > trained else scaling.short_factors
    if len(divisors) != len(inverse):
        raise PerfmodelError(
            f"longrope has {len(divisors)} divisors for {len(inverse)} rotary frequencies; mend rope_scaling in the "
            f"model's config.json."
        )
    return inverse / torch.tensor(divisors)


# (trained frequencies, layer's rope, its scaling, tokens of the trained context and of the longest sequence) ->
# frequencies. A factor or a context that a kind needs and a file lacks has been refused before.
SCALINGS: Mapping[str, Callable[[Tensor, Rope, RopeScaling, int, int], Tensor]] = {
    "linear": lambda inverse, rope, scaling, *_: inverse / (scaling.factor or 1),
    **{"dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope},
}

SCALED_BY_LENGTH = ("dynamic", "longrope")  # by the longest sequence that is served


def rotary_table(rope: Rope, head_dim: int, num_positions: int, dtype: torch.dtype) -> Tensor:
    """cos and sin of position * frequency, [num_positions, H], times the amplitude where something rotates. Frequencies
    are in fp32, [H / 2]: those that rotate, then zeros. num_positions: tokens of the longest sequence that is served.
    Raises PerfmodelError for what is known only sequence by sequence."""
    dim = head_dim if rope.dim is None else rope.dim
    inverse = rope.theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.scaling is not None:
        trained = rope.scaling.original_positions or num_positions
        inverse = SCALINGS[rope.scaling.kind](inverse, rope, rope.scaling, trained, num_positions)
    inverse = torch.cat((inverse, torch.zeros(head_dim // 2 - len(inverse))))
    angle = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse)
    table = torch.cat((angle.cos(), angle.sin()), dim=-1)
    if rope.scaling is not None and rope.scaling.amplitude != 1:
        table *= torch.where(inverse > 0, rope.scaling.amplitude, 1.0).repeat(2)
    return table.to(dtype)


class Rotations:
    """Rotations of tokens at `positions`, by the tables [positions, H] of each kind of rope and size of a head."""

    def __init__(self, tables: Tables, positions_T: Tensor) -> None:
        self.tables, self._positions_T = tables, positions_T
        self._rows: dict[tuple[Rope, int, int | None], Tensor] = {}

    def rows(self, rope: Rope, dim: int, last: int | None = None) -> Tensor:
        key = (rope, dim, last)
        if key not in self._rows:
            positions_T = self._positions_T if last is None else self._positions_T.clamp(max=last)
            self._rows[key] = self.tables[rope, dim][positions_T]
        return self._rows[key]
