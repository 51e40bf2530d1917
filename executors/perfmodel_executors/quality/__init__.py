"""What a technique costs in quality: perplexity of a real model on real text, and outputs that stay the same."""

__all__ = [
    "LayerSensitivity",
    "Quality",
    "greedy_outputs",
    "load_tokenizer",
    "measure_quality",
    "measure_sensitivity",
    "perplexity",
    "read_text",
]

from perfmodel_executors.quality.measure import Quality, greedy_outputs, measure_quality, perplexity
from perfmodel_executors.quality.sensitivity import LayerSensitivity, measure_sensitivity
from perfmodel_executors.quality.tokenizer import load_tokenizer, read_text
