"""Device architectures (`hardware_specs/architectures/<name>.yaml`): kernel features beyond declared peaks, lineage.

An architecture without a file has no relatives and default features."""

from collections.abc import Collection
from functools import cache
from typing import Annotated

from pydantic import Field

from perfmodel.files.base import Spec
from perfmodel.files.catalog import data_dir
from perfmodel.files.units import PositiveInt
from perfmodel.files.validation import load_spec


class Architecture(Spec):
    """What is known of the devices that declare this `architecture`.

    supported_as:   the architecture whose rows of an engine's formats count where no row names this one
    mma_sync_share: of the tensor peak that products of one warp (`mma.sync`) reach
    switch_ranks:   devices over which its switches add in the network; None: no such switches"""

    name: str
    source: str = ""
    after: tuple[str, ...] = ()  # the architectures before it in its line: kernels are ported from one to the next
    contemporaries: tuple[str, ...] = ()  # of other designs, compiled for by the same software with the same tiles
    supported_as: str | None = None
    has_wgmma: bool = False  # asynchronous products of a group of warps, from shared memory (PTX: `wgmma`)
    mma_sync_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    switch_ranks: PositiveInt | None = None

    def steps_from(self, ancestor: str) -> int | None:
        """Generations since `ancestor`; None if it does not precede this one."""
        if ancestor == self.name:
            return 0
        steps = [step for name in self.after if (step := find_architecture(name).steps_from(ancestor)) is not None]
        return 1 + min(steps) if steps else None


@cache
def find_architecture(name: str | None) -> Architecture:
    """An architecture by name; defaults if it has no file. Raises SpecError for a malformed file."""
    file = data_dir("architectures") / f"{name}.yaml"
    return Architecture(name=name or "") if name is None or not file.is_file() else load_spec(Architecture, file)


def generations_between(one: str | None, other: str | None) -> int | None:
    """Generations between two architectures of one line; None without a common line."""
    if one is None or other is None:
        return None
    first, second = find_architecture(one), find_architecture(other)
    if other in first.contemporaries or one in second.contemporaries:
        return 1
    return next((step for step in (first.steps_from(other), second.steps_from(one)) if step is not None), None)


def name_in_tables(architecture: str | None, named: Collection[str]) -> str | None:
    """Name of `architecture` in an engine's table that has `named`: its own, else the one whose support it shares."""
    return architecture if architecture in named else find_architecture(architecture).supported_as or architecture
