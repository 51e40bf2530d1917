"""Messages between devices. A message between one rank is none: no bytes, no launch.

The payload follows nccl-tests: the whole tensor of an all-reduce, the gathered result of an all-gather, the input of
a reduce-scatter, all that a rank sends in an all-to-all (its own share included), the message of a send.
"""

__all__ = ["all_gather", "all_reduce", "all_to_all", "reduce_scatter", "send_recv"]

from perfmodel.ops.work import Message, Work


def _collective(name: str, kind: str, payload_bytes: float, num_ranks: int, format: str = "") -> Work:
    extent = {"bytes": payload_bytes, "ranks": float(num_ranks)}
    if num_ranks <= 1 or payload_bytes == 0:
        return Work(name, "collective", num_kernels=0, extent=extent)
    return Work(name, "collective", message=Message(kind, payload_bytes, num_ranks), extent=extent, format=format)


def all_reduce(payload_bytes: float, num_ranks: int, name: str = "all_reduce") -> Work:
    """Every rank ends with the sum; at least 2 S (k-1)/k bytes leave each rank (Patarasuk and Yuan 2009)."""
    return _collective(name, "all_reduce", payload_bytes, num_ranks)


def all_gather(payload_bytes: float, num_ranks: int, name: str = "all_gather") -> Work:
    """Every rank ends with all S bytes; S (k-1)/k arrive at each."""
    return _collective(name, "all_gather", payload_bytes, num_ranks)


def reduce_scatter(payload_bytes: float, num_ranks: int, name: str = "reduce_scatter") -> Work:
    """Every rank ends with the sum of its k-th part; S (k-1)/k leave each."""
    return _collective(name, "reduce_scatter", payload_bytes, num_ranks)


def all_to_all(payload_bytes: float, num_ranks: int, name: str = "all_to_all", kernel: str = "") -> Work:
    """Every rank sends a k-th of its S bytes to each other rank; S (k-1)/k leave each.

    kernel: "dispatch" or "combine", where engines have one of their own for it
    """
    return _collective(name, "all_to_all", payload_bytes, num_ranks, kernel)


def send_recv(payload_bytes: float, num_ranks: int = 2, name: str = "send_recv") -> Work:
    """One message from a rank to the next."""
    return _collective(name, "send_recv", payload_bytes, num_ranks)
