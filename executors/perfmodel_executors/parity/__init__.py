"""The executed decoder beside Hugging Face's `transformers`: tiny random models of all families, and their logits."""
