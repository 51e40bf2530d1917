"""What a calibration says of its origin, who published the measurements, and which engine they ran.

No file names and no models: a calibration must hold for whatever runs on the device, and says nothing of a single run.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from perfmodel.cores import num_processes
from perfmodel.errors import SpecError
from perfmodel.specs import EngineSpec, HardwareSpec
from perfmodel.specs.engine.devices import with_defaults
from perfmodel.specs.engine.versions import parse_version

# What comes of reading an entry as what it should be, where it is something else.
MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def incomplete(error: Exception) -> str:
    """One sentence for a row that could not be read because of `error`, one of `MALFORMED`."""
    if isinstance(error, KeyError):
        return f"its description is incomplete: {error.args[0]!r} is missing, or is none of the known values."
    return f"its description is incomplete: {error}"


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
PUBLISHED_RESULTS = Origin("serving results", "MLCommons (Apache-2.0), ROCm/vllm (Apache-2.0), Intel and others")
STEADY_STATES = Origin("steady states", "ai-dynamo/aiconfigurator, silicon samples (Apache-2.0)")


# Records without a version, or with the name of a build alone, are of the first half of 2026: what was current then.
_CURRENT = {"vllm": "0.19.0", "sglang": "0.5.9", "trtllm": "1.2.0"}


def recorded_engine(profile: str, version: str, hardware: HardwareSpec, arguments: Mapping[str, Any]) -> EngineSpec:
    """The engine as it ran.

    profile:   its name in hardware_specs/engines
    version:   as the record states it, or ""; one older or newer than any described has the facts of the nearest, and
               wider intervals (`perfmodel.cost.scenario_fits`)
    hardware:  the devices that it ran on
    arguments: those of `EngineSpec` that the record gives
    """
    try:
        is_numbered = bool(parse_version(version)[0])
    except SpecError:
        is_numbered = False
    stated = version if is_numbered else _CURRENT.get(profile)
    return with_defaults(EngineSpec(**{**arguments, "profile": profile, "version": stated}), hardware)


RowT = TypeVar("RowT")
PairT = TypeVar("PairT")

_LONGEST_CHUNK = 48


def over_cores(
    work: Callable[[RowT], PairT],
    rows: Sequence[RowT],
    alike: Callable[[RowT], Any],
    progress: Callable[[int, int], None] | None = None,
) -> list[PairT]:
    """`work` of each row, in order; it must be picklable.

    alike: a key; rows of one key run the same steps as often as can be, and share what these cost as neighbours
    """
    order = sorted(range(len(rows)), key=lambda i: alike(rows[i]))
    found: dict[int, PairT] = {}
    with ProcessPoolExecutor(num_processes(len(rows))) as pool:
        chunk = min(_LONGEST_CHUNK, max(len(rows) // 32, 1))
        pairs = pool.map(work, [rows[i] for i in order], chunksize=chunk)
        for done, (i, pair) in enumerate(zip(order, pairs, strict=True), 1):
            found[i] = pair
            if progress is not None:
                progress(done, len(rows))
    return [found[i] for i in range(len(rows))]
