"""Models: what a decoder-only language model is made of, how it is read from files, and how big it is.

`load_model("llama-3.1-8b")` gives a frozen ModelSpec; `count_parameters` and `weight_bytes` say what it takes. Nothing
here knows time or hardware."""

__all__ = [
    "BITS_PER_WEIGHT",
    "COMPONENTS",
    "Attention",
    "DenseFFN",
    "FeedForward",
    "GatedDeltaNet",
    "Indexer",
    "LatentAttention",
    "Layer",
    "Mamba",
    "Mixer",
    "MoEFFN",
    "ModelSpec",
    "ParameterCount",
    "QuantizationSpec",
    "bytes_per_weight",
    "count_parameters",
    "layer_parameters",
    "list_models",
    "load_config",
    "load_model",
    "matmul_rate",
    "model_from_config",
    "weight_bytes",
    "with_dtype",
    "with_quantization",
]

from perfmodel.models.architecture import (
    Attention,
    DenseFFN,
    FeedForward,
    GatedDeltaNet,
    Indexer,
    LatentAttention,
    Layer,
    Mamba,
    Mixer,
    MoEFFN,
    QuantizationSpec,
)
from perfmodel.models.cards import list_models, load_model
from perfmodel.models.hf.config import load_config, model_from_config
from perfmodel.models.number_formats import (
    BITS_PER_WEIGHT,
    bytes_per_weight,
    matmul_rate,
    with_dtype,
    with_quantization,
)
from perfmodel.models.params import ParameterCount, count_parameters, layer_parameters, weight_bytes
from perfmodel.models.spec import COMPONENTS, ModelSpec
