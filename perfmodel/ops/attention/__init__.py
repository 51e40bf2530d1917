"""Softmax attention: prompts, decodes, both in one kernel, latents; and the layers made of them."""

__all__: list[str] = []
