"""Hashes that do not change from run to run: they say what becomes of a request by its number, and need no table."""

__all__ = ["hashed"]

_MASK = (1 << 64) - 1


def hashed(seed: int, number: int) -> int:
    """64 bits of (`seed`, `number`): the output function of SplitMix64 (Steele, Lea and Flood 2014), applied twice."""
    return _mixed(_mixed(seed & _MASK) + number)


def _mixed(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
