"""What tokens of an executed run are drawn from: a scenario's settings, with the defaults of its method. No torch."""

__all__ = ["SamplingSettings", "settings_of"]

from typing import NamedTuple

from perfmodel.models.spec import ModelSpec
from perfmodel.specs.traffic import Sampling

_TOP_K = 50  # Hugging Face's GenerationConfig
_TOP_P = 0.9  # Llama 3's generation_config.json


class SamplingSettings(NamedTuple):
    """What is drawn from. `top_k` 0, `top_p` 1 and `min_p` 0 leave everything; probabilities, but for top_k."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __str__(self) -> str:
        limits = {"top_k": self.top_k, "top_p": self.top_p if self.top_p < 1 else 0, "min_p": self.min_p}
        said = [f"temperature {self.temperature:g}", *(f"{name} {value:g}" for name, value in limits.items() if value)]
        return ", ".join(said)


def settings_of(sampling: Sampling, model: ModelSpec) -> SamplingSettings | None:
    """What the scenario says, with the defaults of its method; None where tokens are chosen greedily."""
    method = model.sampling if sampling.method == "default" else sampling.method
    if method == "greedy":
        return None
    top_k = sampling.top_k or (_TOP_K if method == "top_k" else 0)
    top_p = sampling.top_p or (_TOP_P if method == "top_p" else 1.0)
    return SamplingSettings(sampling.temperature, top_k, top_p, sampling.min_p)
