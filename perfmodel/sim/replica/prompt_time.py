"""`PromptTime`: how much of the time of a pool's steps its prompts cost, which a bill is split by.

A step that only computes prompts is theirs, one that only decodes is the answers'. A step of both is shared in the
proportion of what its prompts would take as a step of their own, and its decodes as another: what both need once
(weights read, launches, the host) counts on either side, so neither rides for nothing. Steps whose sizes agree to a
sixteenth or so are shared alike: the first of them is priced. Tokens that are computed again after a preemption are
prompts here, as they are to the engine. What idle devices cost follows the busy time.
"""

__all__ = ["PromptTime"]

from collections.abc import Callable

from perfmodel.ops.work import BatchShape

Apart = Callable[[BatchShape], tuple[int, int]]


class PromptTime:
    """Ticks of the steps of one pool, and those of them that prompts cost.

    apart: what the prompts of a step would take alone, and its decodes alone, in ticks; None: nothing is counted
    """

    __slots__ = ("_apart", "_parts", "_prompt_ticks", "_ticks")

    def __init__(self, apart: Apart | None) -> None:
        self._apart = apart
        self._parts: dict[tuple[int, ...], tuple[int, int]] = {}  # what `apart` said, by the sizes of steps
        self._ticks = self._prompt_ticks = 0

    @property
    def share(self) -> float | None:
        """Prompts' share of the time of all steps; None before the first, or where nothing is counted."""
        return self._prompt_ticks / self._ticks if self._ticks else None

    def add(self, shape: BatchShape, duration: int) -> None:
        """The step of `shape` took `duration`."""
        if self._apart is None:
            return
        self._ticks += duration
        if not shape.prefills:
            return
        if shape.num_decodes:
            prompts, decodes = self._parts_of(shape, self._apart)
            duration = duration * prompts // (prompts + decodes)
        self._prompt_ticks += duration

    def _parts_of(self, shape: BatchShape, apart: Apart) -> tuple[int, int]:
        num_decodes, prefills = shape.num_decodes, shape.prefills
        tokens = _rounded(shape.num_tokens - num_decodes)
        seen = sum([computed for _, computed in prefills])
        key = (len(prefills), tokens, _rounded(seen), _rounded(num_decodes), _rounded(shape.decode_context))
        parts = self._parts.get(key)
        if parts is None:
            parts = self._parts[key] = apart(shape._replace(num_tokens=tokens + num_decodes))
        return parts

    def add_decoding(self, duration: int) -> None:
        """Steps that only decoded took `duration` together."""
        if self._apart is not None:
            self._ticks += duration


def _rounded(count: int) -> int:
    """`count` to its leading four bits."""
    shift = max(count.bit_length() - 4, 0)
    return (count + (1 << shift >> 1)) >> shift << shift
