"""Memory of a device: what the model, its drafter and its cache hold, the plan, and KV beyond the device."""

__all__: list[str] = []
