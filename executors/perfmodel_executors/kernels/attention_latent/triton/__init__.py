"""Attention over latents on a GPU: absorbed (`decode`) for new tokens, expanded (`expand`, `prefill`) for prompts."""

from perfmodel_executors.kernels.attention_latent.triton.decode import attention_latent_decode, latent_shared_bytes
from perfmodel_executors.kernels.attention_latent.triton.prefill import attention_latent_prefill

__all__ = ["attention_latent_decode", "attention_latent_prefill", "latent_shared_bytes"]
