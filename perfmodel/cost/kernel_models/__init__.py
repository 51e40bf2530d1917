"""Physical forms: the time of a kernel family as a function of its sizes, the device and a few fitted numbers.

One file per family: a `...Fit` (parameters with meaning and plausible range), the sizes it reads, and one function from
(sizes, fit, device) to seconds, shared by the simulator (one operator), the fit (thousands of measured rows) and
validation. A form never knows the name of a device or a model, or a row of a table."""

__all__ = ["DeviceFacts"]

from perfmodel.cost.kernel_models.device import DeviceFacts
