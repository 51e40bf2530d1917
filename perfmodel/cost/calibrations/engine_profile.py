"""`EngineProfile`: what an engine adds to its kernels: host time per step, and the server around it.

It is independent of the device: `hardware_specs/calibrations/engine@<profile>.yaml`, fitted to whole serving runs by
`perfmodel calibrate`, never by hand. An engine without a fit adds nothing, and results say so."""

import datetime
from pathlib import Path
from typing import Any

from pydantic import Field

from perfmodel.cost.calibrations.calibration import Calibration, HostFit
from perfmodel.cost.kernel_models.experts import GroupedExpertsFit
from perfmodel.cost.kernel_models.fits import Residuals
from perfmodel.cost.kernel_models.overheads import load_overheads
from perfmodel.files.base import Spec
from perfmodel.files.catalog import data_dir
from perfmodel.files.fitted import load_fitted
from perfmodel.models.spec import ModelSpec
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.engine.versions import parse_version

# Tables of experts whose kernels Python launched one by one while they were timed: OpenAI's Triton kernels, which have
# 64 to 100 us beside their work, where all others, replayed from CUDA graphs, have 18 to 43 for as many kernels.
_TIMED_ONE_BY_ONE = ("moe/mxfp4_wo",)


class ServerFit(Spec):
    """What a request pays outside the engine's steps; shows in TTFT and end-to-end latency, never in a step.

    in_s:                   HTTP, validation and hand-over to the engine, per request, in parallel
    in_per_prompt_token_s:  tokenisation, one request after another
    in_serial_s:            of the same work, what a process does for one request after another; counted where answers
                            come whole, so that nothing is known of it from streams
    beam_s:                 of a token of a beam behind the first, there and back, one after another
    out_s:                  detokenisation and hand-over of a token
    out_per_sequence_s:     streaming: a token leaves after those of the sequences sampled with it"""

    in_s: float = Field(default=0.0, ge=0, le=0.1)
    in_per_prompt_token_s: float = Field(default=0.0, ge=0, le=1e-4)
    out_s: float = Field(default=0.0, ge=0, le=0.1)
    out_per_sequence_s: float = Field(default=0.0, ge=0, le=1e-3)
    in_serial_s: float = Field(default=0.0, ge=0, le=0.1)
    beam_s: float = Field(default=0.0, ge=0, le=0.1)

    def answering_whole(self, serial_s: float) -> "ServerFit":
        """For answers that come whole, of which a process has `serial_s` of work for each."""
        return self.model_copy(update={"in_s": max(self.in_s - serial_s, 0.0), "in_serial_s": serial_s})

    def times(self, factor: float) -> "ServerFit":
        return self.model_copy(update={name: factor * value for name, value in self})


class EngineProfile(Spec):
    """Host and server of one engine, or as they are on somebody's own servers.

    name:                     of the latter, "" of an engine's own
    graph_kernel_s:           of a kernel of the experts that a CUDA graph replays, beside its work; tables that timed
                              them launch by launch have several times as much
    kernel_factor:            how many times as long kernels take on somebody's own servers as on those measured
    sampling_bytes_per_logit: memory traffic of sampling beyond greedy (sort, softmax, cumulative sum), per logit
    latency_residuals:        spread of log(measured / simulated) of mean latencies over whole serving runs, in units of
                              the calibration's `spread` on the run's device and of how much longer steps would lengthen
                              them (under open-loop load by more than the steps)
    tpot_residuals, ttft_residuals: the same of means at fixed concurrencies, where steps lengthen them as they are;
                              those of TTFT without any units
    tpot_residuals_elsewhere, ttft_residuals_elsewhere: the same on devices that are none of `devices`
    devices:                  those of the runs at fixed concurrencies
    older:                    hosts of versions before the one named, where the engine was another program"""

    engine: str
    name: str = ""
    source: str = ""
    date: datetime.date | None = None
    command: str = ""
    host: HostFit = HostFit()
    server: ServerFit = ServerFit()
    graph_kernel_s: float | None = Field(default=None, ge=3e-7, le=1e-5)
    kernel_factor: float = Field(default=1.0, ge=0.2, le=5)
    sampling_bytes_per_logit: float | None = Field(default=None, ge=0, le=2000)
    latency_residuals: Residuals = Residuals()
    tpot_residuals: Residuals = Residuals()
    ttft_residuals: Residuals = Residuals()
    tpot_residuals_elsewhere: Residuals = Residuals()
    ttft_residuals_elsewhere: Residuals = Residuals()
    devices: tuple[str, ...] = ()
    older: dict[str, HostFit] = Field(default_factory=dict)

    def at(self, version: str | None) -> "EngineProfile":
        """The profile with the host of `version`, as its `--version` prints it; None: the newest."""
        number = parse_version(version)[0] if version else ()
        hosts = [(first, host) for text, host in self.older.items() if () < number < (first := parse_version(text)[0])]
        return self.model_copy(update={"host": min(hosts, key=lambda item: item[0])[1]}) if hosts else self

    def on(self, device: str) -> "EngineProfile":
        """The profile with the fixed-concurrency residuals that apply to `device`.

        If all runs were on one other device, the spread between devices is unknown: twice as much [assumed]."""
        if device in self.devices or not self.devices:
            return self
        pairs = (("tpot_residuals", self.tpot_residuals_elsewhere), ("ttft_residuals", self.ttft_residuals_elsewhere))
        update = {name: others if others.num_rows else getattr(self, name).widened(2.0) for name, others in pairs}
        return self.model_copy(update=update)

    def applied_to(self, calibration: Calibration, *, is_eager: bool = False) -> Calibration:
        """The device's calibration with this engine's host time and launches (`is_eager`: one by one)."""
        update: dict[str, Any] = {} if self.host == HostFit() else {"host": self.host}
        if self.kernel_factor != 1.0:
            update["kernel_factor"] = self.kernel_factor
        if self.graph_kernel_s is not None and not is_eager:
            update["families"] = {
                key: fit.model_copy(update={"kernel_s": self.graph_kernel_s})
                if isinstance(fit, GroupedExpertsFit) and key in _TIMED_ONE_BY_ONE
                else fit
                for key, fit in calibration.families.items()
            }
        return calibration.model_copy(update=update) if update else calibration

    def bytes_per_logit(self, sampling: str, model: ModelSpec) -> float | None:
        """Fitted traffic of the sampling method, the engine's or any's; None: the operator's count."""
        method = model.sampling if sampling == "default" else sampling
        if method not in ("top_p", "top_k"):
            return None
        own = self.sampling_bytes_per_logit
        return load_overheads().sampling_bytes_per_logit if own is None else own


def profile_of(engine: EngineSpec) -> EngineProfile:
    """The profile of a scenario's engine: of the user's own server, or the engine's fit."""
    if engine.calibration is None:
        return load_engine_profile(engine.profile).at(engine.version)
    return load_fitted(EngineProfile, Path(engine.calibration))


def load_engine_profile(engine: str) -> EngineProfile:
    """The fitted profile of `engine`, or one that adds nothing."""
    file = data_dir("calibrations") / f"engine@{engine}.yaml"
    return load_fitted(EngineProfile, file) if file.is_file() else EngineProfile(engine=engine)
