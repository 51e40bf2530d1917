"""What a calibration says of its origin: who published the measurements, and the command that fitted them.

No file names and no models: a calibration must hold for whatever runs on the device, and says nothing of a single run.
"""

__all__ = ["KERNEL_TABLES", "LAYER_PROFILE", "SERVING_RUNS", "STEADY_STATES", "Origin"]

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Origin:
    """A kind of recorded measurements: what they are, and their publisher with the licence."""

    kind: str
    publisher: str

    def source(self, what: str) -> str:
        """`what`, such as "1,000 kernel times", and who measured it."""
        return f"{what} published by {self.publisher}"

    def command(self, engine: str) -> str:
        """The command that fits measurements of this kind."""
        return f"perfmodel calibrate --from <{self.kind}> --engine {engine}"


KERNEL_TABLES = Origin("kernel tables", "ai-dynamo/aiconfigurator (Apache-2.0)")
LAYER_PROFILE = Origin("layer profile", "casys-kaist/LLMServingSim (MIT)")
SERVING_RUNS = Origin("serving runs", "inference-sim/sim-to-real-accuracy-validation")
STEADY_STATES = Origin("steady states", "ai-dynamo/aiconfigurator, silicon samples (Apache-2.0)")
