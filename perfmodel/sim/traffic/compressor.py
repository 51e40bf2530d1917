"""Prompts shortened before they are served, and what the model that shortens them takes.

    prompt = ceil(ratio x tokens)        TTFT += wait + t(tokens)        t: a prompt of all tokens on the compressor

The compressor has a device like one of the scenario's to itself and reads one prompt after the other, in order of
arrival. A shared prefix is shortened to the same beginning in every prompt that has it.
Source: Jiang et al. 2023 (LLMLingua); Pan et al. 2024 (LLMLingua-2: one pass of a small encoder).
"""

__all__ = ["Compressor"]

from collections.abc import Callable
from functools import cache

from perfmodel.cost import Calibration, EngineProfile, step_costs
from perfmodel.engine import Request
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.work import BatchShape
from perfmodel.sim.clock import ARRIVAL_PRIORITY, Alarm, TickEnvironment, to_ticks
from perfmodel.sim.traffic.clients import Server
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.scenario import Scenario


class Compressor:
    """Takes requests like a server does, and hands each to its server when its prompt is short."""

    def __init__(
        self, env: TickEnvironment, seconds_of: Callable[[int], float], route: Callable[[Request], Server]
    ) -> None:
        self._env, self._seconds_of, self._route = env, seconds_of, route
        self._free_at = 0

    def add(self, request: Request) -> None:
        """`request` arrives now, with its prompt in full."""
        tokens = request.num_source_tokens or request.num_prompt_tokens
        self._free_at = max(self._free_at, self._env.ticks) + to_ticks(self._seconds_of(tokens))
        Alarm(self._env, self._free_at - self._env.ticks, lambda _: self._hand_on(request), ARRIVAL_PRIORITY)

    def _hand_on(self, request: Request) -> None:
        self._route(request).add(request)

    @classmethod
    def of(
        cls,
        env: TickEnvironment,
        scenario: Scenario,
        model: ModelSpec,
        fits: tuple[Calibration, EngineProfile],
        route: Callable[[Request], Server],
    ) -> "Compressor":
        """One that runs `model` as the scenario's engine would, on one device, with nothing beside the prompt.

        fits:  calibration and profile of the device
        route: where the shortened request goes
        """
        engine = EngineSpec(profile=scenario.engine.profile, enforce_eager=scenario.engine.enforce_eager)
        costs = step_costs(scenario.model_copy(update={"model": model, "engine": engine}), *fits)

        @cache
        def seconds_of(tokens: int) -> float:
            return costs.estimate(BatchShape(tokens, 1, ((tokens, 0),))).duration_s

        return cls(env, seconds_of, route)
