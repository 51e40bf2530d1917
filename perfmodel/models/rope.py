"""Rotary positions: the base of the frequencies, how much of a head rotates, how frequencies are stretched.

Facts of a checkpoint; what rotates by them is the executor's (`perfmodel_executors.models.rotations`).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How frequencies are stretched for contexts beyond the trained one. Names of kinds and fields are those of
    transformers' `rope_parameters` (modeling_rope_utils.py).

    kind:               linear | dynamic | llama3 | yarn | longrope; others are not executed
    factor:             by which the context grows; None where the file does not say
    original_positions: tokens of the trained context
    low_freq_factor, high_freq_factor: llama3: wavelengths beyond original / low are divided by `factor`, those below
                        original / high stay, and those in between are blended
    beta_fast, beta_slow, truncates: yarn: rotations within the trained context that bound the blend, in whole elements
    amplitude:          cos and sin are multiplied by it
    short_factors, long_factors: longrope: a divisor for each frequency, for contexts up to the trained one and beyond
    """

    kind: str
    factor: float | None = None
    original_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncates: bool = True
    amplitude: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions of a layer.

    theta: base of the frequencies; transformers' LlamaConfig has 10,000 where a file leaves it open
    dim:   the first elements of a head that rotate; None: all
    scaling: None where frequencies are as trained
    is_interleaved: the file pairs elements 2i and 2i + 1 instead of i and i + dim / 2 (DeepSeek, GLM-4)
    """

    theta: float = 10_000.0
    dim: int | None = None
    scaling: RopeScaling | None = None
    is_interleaved: bool = False


DEFAULT_ROPE = Rope()
