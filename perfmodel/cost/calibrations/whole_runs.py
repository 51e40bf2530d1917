"""Devices without published kernel tables: a few numbers per architecture from whole serving runs.

One file, `hardware_specs/calibrations/whole_runs.yaml`, written by `perfmodel calibrate --whole-runs`. For makers
without kernel tables (AMD, Intel, Google, Tenstorrent) it has achieved fractions over all kernels, kernel overhead and
host time per step. It ranks between the datasheet and kernel tables of the device or a relation."""

from pydantic import Field

from perfmodel.cost.calibrations.calibration import LAUNCH_OVERHEAD_S, Calibration, HostFit
from perfmodel.cost.calibrations.engine_profile import load_engine_profile
from perfmodel.cost.kernel_models.fits import Residuals
from perfmodel.cost.kernel_models.roofline import FamilyFit
from perfmodel.files.base import Spec
from perfmodel.files.catalog import data_dir
from perfmodel.files.fitted import CommittedFits, load_fitted
from perfmodel.files.units import FittedSeconds
from perfmodel.specs.architectures import find_architecture, generations_between
from perfmodel.specs.engine.versions import parse_version
from perfmodel.specs.hardware import HardwareSpec

_SPREAD_PER_GENERATION = 1.5
OTHERS = {"gpu": "others", "npu": "others", "tpu": "others", "fpga": "others", "cpu": "other-cpus"}  # by kind of device
_SPREAD_OTHERS = 2.0
# Releases before an engine had kernels of other makers' own: vLLM 0.6.2 is the first with AMD's decode attention (pull
# request 8310). Makers' builds of still older ones had kernels of their own, and planned several steps at once.
_BEFORE_KERNELS = {"vllm": ("0.6", "0.6.2")}
_NO_SERVERS = ("datasheet", "perfmodel")  # engines that no such run was of, nor any like it


class ArchitectureFit(Spec):
    """What whole runs on the devices of one architecture say.

    compute_fraction: of the peak that the device's power sustains (`WholeRunFits.operation_j`), over all kernels
    memory_fraction:  of the declared bandwidth, over all kernels
    link_fraction:    of the declared bandwidth between devices
    launch_s, step_s: of a kernel; of the host in each step
    kind:             of its devices; a program that was compiled whole has cheaper kernels (`LAUNCH_OVERHEAD_S`)
    rows:             that it was fitted to
    residuals:        spread of log(measured / predicted) of seconds over those rows"""

    compute_fraction: float = Field(default=1.0, gt=0, le=1)
    memory_fraction: float = Field(default=1.0, gt=0, le=1)
    link_fraction: float = Field(default=1.0, gt=0, le=1)
    launch_s: FittedSeconds = 0.0
    step_s: FittedSeconds = 0.0
    kind: str = "gpu"
    rows: int = 0
    residuals: Residuals = Residuals()


class WholeRunFits(CommittedFits):
    """The fits by architecture, and the means of all for architectures that nobody has recorded (`OTHERS`).

    operation_j: joules of an operation of matrix units at the full clock (`sustained_share`), by kernels of measured
                 makers
    older: by architecture, of releases before an engine had kernels for it (`is_older`); of no related architecture
    widths: spread of log(measured / predicted) of published results by metric, each device left out of what it was
            predicted with"""

    architectures: dict[str, ArchitectureFit] = Field(default_factory=dict)
    older: dict[str, ArchitectureFit] = Field(default_factory=dict)
    operation_j: float = Field(default=0.0, ge=0, le=1e-9)
    widths: dict[str, Residuals] = Field(default_factory=dict)


def load_whole_runs() -> WholeRunFits:
    """The committed fits, or none."""
    file = data_dir("calibrations") / "whole_runs.yaml"
    return load_fitted(WholeRunFits, file) if file.is_file() else WholeRunFits()


def is_older(engine: str, version: str | None) -> bool:
    """Whether the engine's version is one of those before its kernels for other makers' devices."""
    if version is None or engine not in _BEFORE_KERNELS:
        return False
    first, end = (parse_version(text)[0] for text in _BEFORE_KERNELS[engine])
    return first <= parse_version(version)[0] < end


def whole_run_calibration(
    hardware: HardwareSpec,
    engine: str,
    fits: WholeRunFits | None = None,
    *,
    or_others: bool = False,
    version: str | None = None,
) -> Calibration | None:
    """The calibration by whole runs on the device's architecture or the nearest of its line; None without any.

    hardware, engine: device and engine name; fits: instead of the committed ones; or_others: fall back to the means of
    all; version: of the engine, None: the newest"""
    if engine in _NO_SERVERS:
        return None
    fits = fits or load_whole_runs()
    near = _nearest(hardware.declared.architecture, fits)
    if near is None and or_others and OTHERS[hardware.kind] in fits.architectures:
        near = OTHERS[hardware.kind], _SPREAD_OTHERS
    if near is None:
        return None
    architecture, spread = near
    fit = fits.architectures[architecture]
    host = HostFit()
    if is_older(engine, version):
        host = load_engine_profile(engine).at(version).host
        if hardware.declared.architecture in fits.older:
            fit, spread = fits.older[hardware.declared.architecture], 1.0
    whole = FamilyFit(
        compute_fraction=fit.compute_fraction,
        memory_fraction=fit.memory_fraction,
        overhead_s=fit.launch_s * LAUNCH_OVERHEAD_S[hardware.kind] / LAUNCH_OVERHEAD_S[fit.kind],
        operation_j=fits.operation_j,
        residuals=fit.residuals,
    )
    return Calibration(
        device=hardware.name,
        engine=engine,
        source=f"whole runs on {architecture}: {fits.source}",
        date=fits.date,
        command=fits.command,
        families={"collective": whole.model_copy(update={"memory_fraction": fit.link_fraction})},
        default=whole,
        host=HostFit(serial_step_s=fit.step_s, serial_per_sequence_s=host.serial_per_sequence_s, replays_graphs=True),
        step_residuals=fit.residuals,
        prompt_residuals=fit.residuals,
        spread=spread,
    )


def _nearest(architecture: str | None, fits: WholeRunFits) -> tuple[str, float] | None:
    """(nearest fitted architecture of its line, interval widening); of two the older."""
    near = [
        (steps, find_architecture(name).steps_from(architecture) is not None, name)
        for name in fits.architectures
        if architecture is not None and (steps := generations_between(architecture, name)) is not None
    ]
    if not near:
        return None
    steps, _, name = min(near)
    return name, _SPREAD_PER_GENERATION**steps
