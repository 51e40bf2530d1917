"""What becomes of keys and values beyond a paged cache: evicted, kept in several precisions, moved off the device."""

__all__ = ["KvEviction", "KvOffload", "KvTier", "PromptCompression"]

from typing import Annotated, Literal

from pydantic import Field

from perfmodel.files.base import Resolved, Spec
from perfmodel.files.units import Bytes, PositiveInt
from perfmodel.models.spec import ModelSpec
from perfmodel.specs.networks import GivenLink


class KvEviction(Spec):
    """Keeps the `heavy_tokens` of a sequence with the highest accumulated scores and its `recent_tokens` newest."""

    method: Literal["h2o"] = "h2o"
    heavy_tokens: PositiveInt
    recent_tokens: PositiveInt

    @property
    def num_tokens(self) -> int:
        """The most that a sequence keeps."""
        return self.heavy_tokens + self.recent_tokens


class KvTier(Spec):
    """The precision of the next older `tokens` of a sequence (None: all that are older), newest tier first."""

    tokens: PositiveInt | None = None
    dtype: str = "auto"


class KvOffload(GivenLink):
    """A second tier for KV blocks, in the host's memory or on a disk, behind a link of each device.

    capacity_bytes: of the tier, per device
    link, bandwidth_bytes_per_s, latency_s: the link to it; the latency is that of one block's copy
    rule:           KV of a preempted request, or of a prefix that left the device: copied back (restore), computed
                    again (recompute), or what the cost model says is quicker (faster)
    overlap:        blocks come layer by layer while earlier layers compute; else the step waits for all of them
    """

    link: str | None = "pcie"
    capacity_bytes: Annotated[Bytes, Field(gt=0)]
    rule: Literal["restore", "recompute", "faster"] = "faster"
    overlap: bool = True


class PromptCompression(Spec):
    """Prompts are shortened to the share `ratio` of their tokens before they are computed.

    model: reads each prompt in full to do so, on a device like the scenario's; None: shortening costs nothing
    """

    ratio: Annotated[float, Field(gt=0, le=1)]
    model: Annotated[ModelSpec, Resolved("A name in workloads/models, or a path")] | None = None
