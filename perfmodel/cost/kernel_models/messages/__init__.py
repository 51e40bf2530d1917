"""Forms of messages: within and between nodes, NCCL's and engines' own."""

__all__: list[str] = []
