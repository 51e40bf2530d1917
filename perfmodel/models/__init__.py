"""Models: what a decoder-only language model is made of, how it is read from files, and how big it is.

`load_model("llama-3.1-8b")` gives a frozen ModelSpec; `count_parameters` and `weight_bytes` say what it takes. Nothing
here knows time or hardware."""

__all__ = ["list_models", "load_model"]

from perfmodel.models.cards import list_models, load_model
