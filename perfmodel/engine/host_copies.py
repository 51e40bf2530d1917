"""`HostCopies`: which blocks each plan copies to the second tier and back, for a backend with real tensors.

Within a plan all copies out come before all copies in, both before its tokens are computed: a block that leaves the
device is read before its new owner writes it. A slot of the tier whose content leaves is used again from the next plan
on, so what a plan pushes out it can still bring back.
"""

from collections.abc import Hashable


class HostCopies:
    """Gives each block in the tier a slot: numbers from 0 on, as few as are in use at once and by one plan.

    out: (block, slot) of each copy to the tier since `take`; back: (slot, block) of each copy to the device
    """

    def __init__(self) -> None:
        self.out: list[tuple[int, int]] = []
        self.back: list[tuple[int, int]] = []
        self._slot_of: dict[Hashable, int] = {}
        self._leaving: dict[Hashable, int] = {}  # pushed out since `take`
        self._free: list[int] = []
        self._num_slots = 0

    def store(self, content: Hashable, block: int) -> None:
        """`content`, in `block` of the device, comes to the tier."""
        if self._free:
            slot = self._free.pop()
        else:
            slot, self._num_slots = self._num_slots, self._num_slots + 1
        self._slot_of[content] = slot
        self.out.append((block, slot))

    def restore(self, content: Hashable, block: int) -> None:
        """`block` of the device gets `content`, which is in the tier, or was when this plan was begun."""
        slot = self._slot_of.get(content)
        self.back.append((self._leaving[content] if slot is None else slot, block))

    def drop(self, content: Hashable) -> None:
        """`content` leaves the tier."""
        slot = self._slot_of.pop(content)
        if content in self._leaving:  # twice within a plan
            self._free.append(slot)
        else:
            self._leaving[content] = slot

    def take(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The copies (out, back) of the plan that has just been made."""
        copies = self.out, self.back
        self.out, self.back = [], []
        self._free += self._leaving.values()
        self._leaving.clear()
        return copies
