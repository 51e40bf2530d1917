"""Which number formats an engine's version takes on a generation of devices: native, emulated, weight-only, refused."""

__all__ = ["FormatUse", "format_use"]

from dataclasses import dataclass
from typing import Literal

from perfmodel.specs.engine.description import FormatSupport
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.hardware import HardwareSpec


@dataclass(frozen=True, slots=True)
class FormatUse:
    """support: None where the engine's description does not say; kernel: which one, where it is known."""

    support: FormatSupport | None
    kernel: str = ""


def format_use(
    engine: EngineSpec, hardware: HardwareSpec, form: str, of: Literal["weights", "kv_cache"] = "weights"
) -> FormatUse:
    """What becomes of a number format under `engine` on `hardware`.

    form: of the tables of measured kernels: fp8 (a scale per tensor, channel or token), fp8_block (a scale per block of
          weights), int8, int4, mxfp4, nvfp4, nf4
    of:   the weights, or cached keys and values

    The description is silent on formats that it does not list, and on devices without a declared generation.
    """
    rows = getattr(engine.described.facts, of).get(form)
    generation = hardware.declared.architecture
    if rows is None or generation is None:
        return FormatUse(None)
    row = next((row for row in rows if generation in row.on), None)
    return FormatUse("refused") if row is None else FormatUse(row.support, row.kernel)
