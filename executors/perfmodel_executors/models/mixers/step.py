"""`MixerStep`: what a mixer of any kind sees of a step, beside its own inputs, weights and cache."""

from typing import NamedTuple

from perfmodel_executors.kernels import Kernels
from perfmodel_executors.models.batch import StepBatch
from perfmodel_executors.models.rotations import Rotations
from perfmodel_executors.models.states import StateRows


class MixerStep(NamedTuple):
    """A step of all layers. state_rows: of the step's sequences, in the states of all recurrent layers; norm_eps: added
    to the mean square in norms; is_standard: attention keeps its scores in memory."""

    kernels: Kernels
    batch: StepBatch
    rotations: Rotations
    state_rows: StateRows
    norm_eps: float
    is_standard: bool = False
