"""Forms of attention kernels: decode, prefill, mixed, latent."""

__all__: list[str] = []
