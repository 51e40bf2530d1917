"""Physical forms: how long a family of kernels takes as a function of its sizes, the device and a few fitted numbers.

One file per family. Each has a `...Fit` (the parameters, each with its meaning and its plausible range), the sizes it
reads, and one function from (sizes, fit, device) to seconds. That function serves three callers: the simulator (one
operator at a time), the fit (thousands of measured rows), and validation. A form knows physics, never a device's name,
a model's, or a row of a table.
"""

__all__ = ["DeviceFacts"]

from perfmodel.cost.forms.device import DeviceFacts
