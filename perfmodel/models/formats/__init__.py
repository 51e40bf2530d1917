"""The number formats that a model is served in: of its weights, of single layers, of its KV cache."""
