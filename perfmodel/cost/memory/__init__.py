"""Device memory: model, drafter, KV cache, memory plan, and KV offloading."""

__all__: list[str] = []
