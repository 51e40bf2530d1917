"""`EmulatorServer`: a scenario as a server that real clients reach: its emulator, what it tells beside, its ports."""

import asyncio
import gc
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from perfmodel.errors import MissingExtraError, PerfmodelError, SpecError
from perfmodel.listening import Listening
from perfmodel.serve.emulator import Emulator
from perfmodel.serve.http import build_app, serve
from perfmodel.serve.metrics import Metrics
from perfmodel.serve.settings import ServerSettings
from perfmodel.sim import simulate
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.traffic import Arrivals, Lengths, Traffic

if TYPE_CHECKING:
    from perfmodel.serve.kv_events import KvEvents

_NUM_REQUESTS = 24
_NUM_TOKENS = 24
_LONGEST_PROMPT = 1024


def warm_up(scenario: Scenario) -> None:
    """Price the steps of a little traffic: the tables of step costs, which all engines of a process share, begin to
    fill, and what they import is there. Then the garbage collector need not look at any of it again."""
    longest = scenario.engine.max_model_len or scenario.model.max_position_embeddings
    traffic = Traffic(
        arrivals=Arrivals(process="constant", rate=20.0),
        num_requests=_NUM_REQUESTS,
        input_tokens=Lengths(distribution="uniform", low=1, high=max(min(_LONGEST_PROMPT, longest // 2), 1)),
        output_tokens=Lengths(distribution="fixed", value=_NUM_TOKENS),
    )
    with suppress(PerfmodelError):  # what is wrong with the scenario is said to those who send it something
        simulate(scenario.model_copy(update={"traffic": traffic}), keep_steps=False, can_leap=False)
    gc.collect()
    gc.freeze()


MetricNames = Literal["vllm", "sglang"]
_log = logging.getLogger("perfmodel.serve")
_SAY_EVERY_S = 5.0  # of a clock that is slowed


@dataclass(frozen=True)
class Telemetry:
    """What the deployment tells beside its answers.

    metrics: whose names /metrics has; None: those of the scenario's engine profile
    legacy:  with the names that vLLM has given up and autoscalers still read
    kv_events, kv_replay, kv_topic: endpoints of ZeroMQ, and the topic, as of `KvEvents`; None: it is not there
    kv_arrays: events are arrays, as before vLLM 0.24"""

    metrics: MetricNames | None = None
    legacy: bool = False
    kv_events: str | None = None
    kv_replay: str | None = None
    kv_topic: str = "kv-events"
    kv_arrays: bool = False

    def __post_init__(self) -> None:
        if self.kv_replay is not None and self.kv_events is None:
            raise SpecError(f"kv_replay: got {self.kv_replay} without kv_events; there is nothing to replay")
        if self.kv_arrays and self.kv_events is None:
            raise SpecError("kv_arrays: is set without kv_events, of which there are none; say where to publish them")


class Ended(NamedTuple):
    """What became of the requests that were sent: `slowed_s` are the seconds by which the clock had to be slowed."""

    sent: int
    finished: int
    failed: int
    timed_out: int
    aborted: int
    slowed_s: float


class EmulatorServer:
    """`scenario` on the wall clock, to be run within an event loop.

    settings, telemetry: how it answers; what it tells beside
    speed:     simulated seconds per second
    own_ports: each replica has a port of its own, from `settings.port` on, in place of the scenario's router
    cold_start: it answers 503 for as long as it would load its weights

    Raises DoesNotFitError for a model too large for the devices, SpecError for what has no server, MissingExtraError
    where KV events are asked for and their packages are not installed."""

    def __init__(
        self,
        scenario: Scenario,
        settings: ServerSettings,
        telemetry: Telemetry = Telemetry(),
        speed: float = 1.0,
        own_ports: bool = False,
        cold_start: bool = False,
    ) -> None:
        self._error: asyncio.Future[None] | None = None
        self._lost_s, self._warned_at = 0.0, float("-inf")  # what the log has not said yet; when it last said so
        self.emulator = Emulator(
            scenario,
            speed=speed,
            own_ports=own_ports,
            loras=settings.lora_names,
            on_late=lambda seconds: self.metrics.add_late(seconds),
            on_slowed=self._on_slowed,
            on_error=self._on_error,
        )
        names = telemetry.metrics or ("sglang" if scenario.engine.profile == "sglang" else "vllm")
        served = settings.served_names or (scenario.model.name,)
        cold_start_s = self.emulator.cold_start_s() if cold_start else settings.cold_start_s
        self.settings = replace(settings, served_names=served, cold_start_s=cold_start_s)
        self.metrics = Metrics(self.emulator, served[0], names, telemetry.legacy, loras=settings.lora_names)
        self._own_ports = own_ports
        self.kv_events: KvEvents | None = None
        if telemetry.kv_events is not None:
            try:
                from perfmodel.serve import kv_events as publisher
            except ImportError as error:
                raise MissingExtraError(
                    f"KV events need {error.name}, which is not installed: pip install '.[kv-events]' in the checkout."
                ) from None
            ways = telemetry.kv_replay, telemetry.kv_topic, telemetry.kv_arrays
            self.kv_events = publisher.KvEvents(self.emulator, telemetry.kv_events, *ways)

    async def run(self, on_ready: Callable[[list[int]], None] = lambda _: None) -> Ended:
        """Serve until SIGTERM or SIGINT. on_ready: called with the ports, once all listen

        Raises SpecError for an address that cannot be had."""
        apps = self._apps()
        warm_up(self.emulator.scenario)
        self._error = asyncio.get_running_loop().create_future()
        self.emulator.start()
        if self.kv_events is not None:
            self.kv_events.start()
        serving = asyncio.ensure_future(serve(apps, self.settings, on_ready, self.metrics.add_stalled))
        try:
            await asyncio.wait((serving, self._error), return_when=asyncio.FIRST_COMPLETED)
            if self._error.done():
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)
                self._error.result()
            await serving
        finally:
            self._error.cancel()
            self.emulator.stop()
            if self.kv_events is not None:
                self.kv_events.close()
        counts = {name: getattr(self.emulator, f"num_{name}") for name in Ended._fields[:-1]}
        return Ended(**counts, slowed_s=self.emulator.clock.slowed_s)

    def _apps(self) -> list[Listening]:
        emulator, settings, metrics, port = self.emulator, self.settings, self.metrics, self.settings.port
        if not self._own_ports:
            return [Listening(build_app(emulator, settings, metrics), port)]
        count = len(emulator.replicas)
        if port and port + count > 65_536:
            raise SpecError(f"port: got {port} for the first of {count} replicas; choose at most {65_536 - count}")
        apps = [build_app(emulator, settings, metrics.of_replica(number), number) for number in range(count)]
        return [Listening(app, port and port + number) for number, app in enumerate(apps)]

    def _on_slowed(self, seconds: float) -> None:
        """Say in the log that the clock was slowed: at once, and then now and then."""
        self._lost_s += seconds
        now = asyncio.get_running_loop().time()
        if now - self._warned_at >= _SAY_EVERY_S:
            text = "this machine does not keep up: the clock was slowed by %.3f s; send less, or lower --speed"
            _log.warning(text, self._lost_s)
            self._lost_s, self._warned_at = 0.0, now

    def _on_error(self, error: Exception) -> None:
        if self._error is not None and not self._error.done():
            self._error.set_exception(error)
