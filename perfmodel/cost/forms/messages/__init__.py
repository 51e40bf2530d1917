"""Forms of messages between devices: within a node and between nodes, NCCL's and the engines' own."""

__all__: list[str] = []
