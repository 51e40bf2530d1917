"""What mixes tokens in a layer, one module for each kind: softmax attention, latents, scans, delta nets."""

from perfmodel_executors.models.mixers.kinds import MIXERS
from perfmodel_executors.models.mixers.step import MixerStep

__all__ = ["MIXERS", "MixerStep"]
