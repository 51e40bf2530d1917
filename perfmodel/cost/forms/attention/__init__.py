"""Forms of attention kernels: decodes, prompts, both in one kernel, latents."""

__all__: list[str] = []
