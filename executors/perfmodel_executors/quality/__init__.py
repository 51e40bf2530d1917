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

from perfmodel_executors.quality.measure import Quality, measure_quality
from perfmodel_executors.quality.outputs import greedy_outputs
from perfmodel_executors.quality.perplexity import perplexity
from perfmodel_executors.quality.sensitivity import LayerSensitivity, measure_sensitivity
from perfmodel_executors.quality.text import read_text
from perfmodel_executors.quality.tokenizer import load_tokenizer
