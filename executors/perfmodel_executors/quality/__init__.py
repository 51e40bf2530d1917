"""What a technique costs in quality: perplexity of a real model on real text, and outputs that stay the same."""

from perfmodel_executors.quality.measure import measure_quality, perplexity
from perfmodel_executors.quality.sensitivity import measure_sensitivity
from perfmodel_executors.quality.tokenizer import read_text

__all__ = ["measure_quality", "measure_sensitivity", "perplexity", "read_text"]
