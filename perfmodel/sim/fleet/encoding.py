"""`EncodingServer`: encode pools in front of those that read prompts (vLLM's `--ec-transfer-config`).

1. A request's images go to the encode replicas at once, each as a request of its own, as vLLM's proxy sends them. One
   without images passes by.
2. An encode engine takes an image's tokens into its steps under the limits of any engine, and encodes the image unless
   its encoder cache has it. No layer of the text model is computed, and no token is sampled.
3. The features leave over the engine's link, one image at a time:

       t = latency + T b / W,    b = hidden size x vectors of a token x bytes of the dtype

4. Once all features of a request are there, it goes on as in a cluster without encode pools. Its images take room in
   the encoder cache there, and none of the budget of a step.

Source: vLLM 0.30.0, v1/core/sched/scheduler.py (`external_load_encoder_input`), v1/worker/mm_encoder_model_runner.py;
its post of 2025-12-15 on encoder disaggregation (what the proxy does). Not modelled: the receiver's link, features that
it still has."""

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING

from perfmodel.engine import Request
from perfmodel.models.number_formats import bytes_per_weight
from perfmodel.models.spec import ModelSpec
from perfmodel.sim.clock import ARRIVAL_PRIORITY, TICKS_PER_S, Alarm, TickEnvironment, to_ticks
from perfmodel.sim.fleet.pool import FleetRouter, Pool
from perfmodel.sim.replica.replica import EngineRank
from perfmodel.specs.scenario import Scenario

if TYPE_CHECKING:
    from perfmodel.sim.fleet.gateway import RequestServer


class EncodingServer:
    """Accepts requests of `scenario` and passes each on to its server of `route` once its images are encoded."""

    def __init__(self, env: TickEnvironment, scenario: Scenario, route: "Callable[[Request], RequestServer]") -> None:
        self._env, self._scenario, self._route = env, scenario, route
        self._link = scenario.cluster.ec_transfer.link_of(scenario.hardware)
        self._token_bytes = feature_bytes(scenario.model)
        self._pools: list[Pool] = []
        self._router: FleetRouter | None = None
        self._numbers = count()
        self._waiting: dict[Request, tuple[Request, int]] = {}  # an image's request -> the client's, bytes
        self._num_left: dict[Request, int] = {}  # images of a client's request
        self._free_at: dict[int, int] = {}  # tick, of an engine's link
        self._num_transfers = self._num_bytes = self._ticks = 0

    def join(self, pool: Pool) -> None:
        """Send images to the replicas of `pool`, too."""
        self._pools.append(pool)
        self._router = FleetRouter.over(self._pools, self._scenario)

    @property
    def moved(self) -> dict[str, float]:
        """Transfers so far, their bytes, and the mean time from the end of the step to the last byte."""
        mean_ms = self._ticks * 1e3 / TICKS_PER_S / max(self._num_transfers, 1)
        return {"transfers": self._num_transfers, "bytes": self._num_bytes, "mean_ms": mean_ms}

    def add(self, request: Request) -> None:
        """`request` arrives now."""
        inputs, router = request.encoder_inputs, self._router
        if not inputs or router is None:
            self._route(request).add(request)
            return
        request.encoder_inputs = tuple([item._replace(is_external=True) for item in inputs])
        self._num_left[request] = len(inputs)
        for item in inputs:
            image = Request(next(self._numbers), request.arrival, item.num_tokens, 1, priority=request.priority)
            image.encoder_inputs = (item._replace(offset=0),)
            self._waiting[image] = request, item.num_tokens * self._token_bytes
            router(image).add(image)

    def on_encoded(self, engine: EngineRank, image: Request) -> None:
        """`engine` has the features of `image`."""
        (request, num_bytes), now = self._waiting.pop(image), self._env.ticks
        seconds = self._link.latency_s + num_bytes / self._link.bandwidth_bytes_per_s
        done_at = self._free_at[engine.index] = max(now, self._free_at.get(engine.index, 0)) + to_ticks(seconds)
        self._num_transfers += 1
        self._num_bytes += num_bytes
        self._ticks += done_at - now
        Alarm(self._env, done_at - now, lambda _: self._arrived(request), ARRIVAL_PRIORITY)

    def _arrived(self, request: Request) -> None:
        self._num_left[request] -= 1
        if not self._num_left[request]:
            del self._num_left[request]
            self._route(request).add(request)


def feature_bytes(model: ModelSpec) -> int:
    """Bytes of an image token's features: a vector, with DeepStack one of each merger, of two products each."""
    assert model.vision is not None
    num_vectors = max(1, len(model.vision.projections) // 2)
    return round(num_vectors * model.hidden_size * bytes_per_weight(model.dtype))
