"""One decoder, configured by a `ModelSpec`."""

from perfmodel_executors.models.batch import StepBatch, build_batch
from perfmodel_executors.models.decoder import Decoder, load_decoder
from perfmodel_executors.models.kv_cache import KVCache

__all__ = ["Decoder", "KVCache", "StepBatch", "build_batch", "load_decoder"]
