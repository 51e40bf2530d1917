"""Step times of a layout on a grid of batches and prompt tokens, from the simulator's cost model, interpolated.

Also under common draws of the calibration error (`perfmodel.cost.calibrations.draws`), so that candidates are compared
under equal errors. Two devices

    one device, one engine profile      share all scores
    of one architecture                 share the fits' own errors; a transfer to a sibling adds errors of its own, for
                                        the total spread s of a sibling:
                                        score = (z_fit + sqrt(s^2 - 1) z_device) / s
    of two architectures                share nothing (which overstates uncertainty: the engine is the same)

Draws are antithetic, so their mean is the model's."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import cycle, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost import SpeculativeCostModel, StepCosts, scenario_fits
from perfmodel.cost.calibrations.draws import NUM_SCORES, Draw, Uncertainty
from perfmodel.cost.calibrations.files import SPREAD_SIBLING
from perfmodel.cost.steps.host import Host
from perfmodel.cost.steps.stages import step_cost_model
from perfmodel.ops.work import BatchShape, windowed_contexts
from perfmodel.sim.replica.step_costs import shared_step_costs
from perfmodel.sim.traffic.workload import ImagePlan
from perfmodel.specs.scenario import Scenario

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

BATCHES = np.array(
    [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048], np.float64
)
_BESIDE = np.array([0, 8, 64, 512, 2048], np.float64)  # decodes beside prompts
CHUNKS = np.array([1, 64, 128, 256, 384, 512, 768, 1024, 2048, 4096, 8192, 16384, 32768], np.float64)
_PS = 1e-12


@dataclass(frozen=True)
class StepSurface:
    """Step times of one layout, in seconds.

    decode:   steps with BATCHES decoding sequences, at the workload's mean context
    tokens:   tokens per sequence of such a step (above 1 with speculation)
    mixed_step_time: steps with _BESIDE decodes and CHUNKS prompt tokens, without `jump`
    cached:   extra per cached token, by prompt tokens (CHUNKS)
    jump:     extra of prompt steps with more tokens than `captured`, which have no CUDA graph
    launched: launch time of such a step's kernels: a lower bound on `mixed_step_time`, to which `jump` is added"""

    decode: Floats
    tokens: Floats
    mixed_step_time: Floats
    cached: Floats
    jump: float
    launched: float
    captured: int
    origin: str


def step_surface(
    scenario: Scenario,
    context: float,
    prompt: float,
    batches: int,
    chunk: int,
    plan_tokens: int = 0,
    encodes: bool = True,
    draw: Draw | None = None,
    costs: StepCosts | None = None,
) -> StepSurface:
    """The surface of a scenario with one replica.

    context, prompt: mean KV length of a decoding sequence, and mean prompt length
    batches, chunk: largest batch and most prompt tokens per step that will be read
    plan_tokens: token limit per plan with several plans in flight; prompt chunks leave room for decodes
    encodes: images of prompts are encoded in the steps that read them
    draw, costs: factors on the calibration; step costs of the scenario, if known"""
    costs = costs or shared_step_costs(scenario)
    cost_model, drafts = step_cost_model(costs.tables, draw), costs.drafts
    spans, num_stages = scenario.model.attention_spans, scenario.engine.pipeline_parallel_size

    images = ImagePlan(scenario) if encodes and scenario.traffic.images is not None else None

    def step(batch: float, tokens: float = 0, cached: int = 0) -> float:
        """Seconds of a step with `batch` decodes and `tokens` tokens of prompts of about mean length."""
        part, most = prompt, num_stages * plan_tokens - batch
        if 0 < most < tokens:  # never requested, only interpolated to: in proportion
            return step(batch, most, cached) * tokens / most
        if plan_tokens:
            part = max(min(prompt, most / num_stages), 1.0)
        decodes, whole = int(batch), int(tokens)
        count = 0 if not whole else 1 if cached else max(1, round(whole / part))
        sizes = [whole // count + (index < whole % count) for index in range(count)]
        prefills = tuple((max(size, 2), cached) for size in sizes)
        summed = round(decodes * context)
        windowed = windowed_contexts(decodes, summed, spans) if decodes else ()
        shape = BatchShape(decodes + whole, decodes + len(prefills), prefills, decodes, summed, windowed)
        duration = cost_model.duration_ps(shape)
        if images is None or cached or not whole:
            return _PS * duration
        share = len(images.grids) * whole / prompt  # images of so many tokens of prompts
        grids = tuple(islice(cycle(images.grids), max(1, round(share))))
        return _PS * (duration + (cost_model.duration_ps(shape._replace(images=grids)) - duration) * share / len(grids))

    host = Host(costs.graph, costs.timer, draw)
    # Shared out to plans that follow each other, it is in the curves.
    jump = launched = 0.0
    if not costs.graph.stages:
        jump, launched = host.prompt_s, host.launched_s
    captured, used = host.fit.captured_tokens, _up_to(BATCHES, batches)
    plain = _filled(np.array([step(batch) for batch in used]), BATCHES)
    rows, columns = _up_to(_BESIDE, batches), _up_to(CHUNKS, chunk)
    mixed = np.array([[step(batch, new) - jump * (batch + new > captured) for new in columns] for batch in rows])
    mixed = np.pad(mixed, ((0, len(_BESIDE) - len(rows)), (0, len(CHUNKS) - len(columns))), mode="edge")
    far = int(max(2 * prompt, 1024))
    cached = np.array([(step(0, tokens, far) - step(0, tokens)) / far for tokens in columns])
    decode, brought = plain, np.ones(len(BATCHES))
    if drafts is not None:
        rounds = costs.speculative_cost_model(draw)
        drafted = [_drafted(rounds, int(batch), int(context)) for batch in used]
        decode = _filled(np.array([time for time, _ in drafted]), BATCHES)
        brought = _filled(np.array([tokens for _, tokens in drafted]), BATCHES)
        # What prompts add to a step is taken to be the same beside decodes that are verified.
        mixed = mixed + np.interp(_BESIDE, BATCHES, decode - plain, left=0.0)[:, None]
    per_token, origin = _filled(np.maximum(cached, 0.0), CHUNKS), costs.calibration.origin
    return StepSurface(decode, brought, mixed, per_token, jump, launched, captured, origin)


def _drafted(cost_model: SpeculativeCostModel, batch: int, context: int) -> tuple[float, float]:
    """Seconds and tokens of a draft round, at the depth configured for this batch."""
    config = cost_model.drafts.config
    longest = config.typical_depth
    depths = range(longest + 1) if config.adaptive else range(longest, longest + 1)
    if config.disable_by_batch_size is not None and batch > config.disable_by_batch_size:
        depths = range(1)
    time, tokens = cost_model.expected_time, config.expected_tokens
    drafted = [(time(batch, depth, context) * _PS, tokens(depth)) for depth in depths]
    return max(drafted, key=lambda item: item[1] / item[0])


def _up_to(knots: Floats, most: int) -> Floats:
    """Knots below `most`, and the next one."""
    return knots[: int(np.searchsorted(knots, most)) + 1]


def _filled(values: Floats, knots: Floats) -> Floats:
    return np.pad(values, (0, len(knots) - len(values)), mode="edge")


class Surfaces:
    """Surfaces of several layouts, evaluated for many candidates at once. which: the surface of each candidate.
    Arguments have a row per candidate, any number of columns."""

    def __init__(self, surfaces: Sequence[StepSurface], which: Ints) -> None:
        self._decode = np.array([surface.decode for surface in surfaces])
        self._tokens = np.array([surface.tokens for surface in surfaces])
        self._beside = np.array([surface.mixed_step_time for surface in surfaces])
        self._cached = np.array([surface.cached for surface in surfaces])
        self._jump = np.array([surface.jump for surface in surfaces])[which][:, None]
        self._launched = np.array([surface.launched for surface in surfaces])[which][:, None]
        self._captured = np.array([surface.captured for surface in surfaces])[which][:, None]
        self._which = which[:, None]

    def decode(self, batch: Floats) -> Floats:
        """Seconds of a step with only `batch` decodes."""
        return read_between(self._decode, self._which, *between(BATCHES, batch))

    @property
    def at_batches(self) -> tuple[Floats, Floats]:
        """`decode` and `tokens` at each of BATCHES, without interpolation."""
        which = self._which[:, 0]
        return self._decode[which], self._tokens[which]

    def tokens(self, batch: Floats) -> Floats:
        """Tokens per sequence of a step with `batch` decodes."""
        return read_between(self._tokens, self._which, *between(BATCHES, batch))

    def mixed_step_time(self, batch: Floats, prompt_tokens: Floats) -> Floats:
        """Seconds of a step with `batch` decodes and `prompt_tokens` prompt tokens."""
        row, up = between(_BESIDE, batch)
        column, right = between(CHUNKS, prompt_tokens)
        table, which = self._beside, self._which
        low = table[which, row, column] * (1 - right) + table[which, row, column + 1] * right
        high = table[which, row + 1, column] * (1 - right) + table[which, row + 1, column + 1] * right
        bare = low * (1 - up) + high * up
        is_launched = batch + prompt_tokens > self._captured
        return np.where(is_launched, np.maximum(bare, self._launched) + self._jump, bare)

    def cached(self, prompt_tokens: Floats) -> Floats:
        """Extra seconds per cached token, of a step with so many tokens of one prompt."""
        return read_between(self._cached, self._which, *between(CHUNKS, prompt_tokens))


def between(knots: Floats, values: Floats) -> tuple[Ints, Floats]:
    """Index of the knot below each value, and the fraction (0 to 1) of the way to the next."""
    index = np.clip(np.searchsorted(knots, values, side="right") - 1, 0, len(knots) - 2)
    low = knots[index]
    return index, np.clip((values - low) / (knots[index + 1] - low), 0.0, 1.0)


def read_between(table: Floats, which: Ints, index: Ints, share: Floats) -> Floats:
    """Rows `which` of a table, interpolated from column `index` to the next by `share`."""
    low = table[which, index]
    return low + share * (table[which, index + 1] - low)


Engine = tuple[Scenario, int, bool]  # of a layout, with the tokens of its plans, and whether it encodes images
Grid = tuple[float, float, int, int, int, bool]  # the arguments of `step_surface` beside the scenario

NUM_DRAWS = 256


@dataclass(frozen=True)
class Drawn:
    """Factors of a candidate under each draw; equal indices are equal draws for all candidates. By default none: 1.
    rate: on its highest rate under the SLO; latencies: metric -> factors on the latency at the required share"""

    rate: Floats = field(default_factory=lambda: np.ones(NUM_DRAWS))
    latencies: Mapping[str, Floats] = field(
        default_factory=lambda: dict.fromkeys(("ttft", "tpot", "itl", "e2el"), np.ones(NUM_DRAWS))
    )


def shared_scores(scenario: Scenario) -> Floats:
    """Standard scores of a scenario's device and engine, a row for each draw: equal for equal devices, correlated
    within an architecture."""
    calibration, _ = scenario_fits(scenario)
    declared, profile = scenario.hardware.declared, scenario.engine.profile
    if declared.architecture is None:
        return _normal(f"device {declared!r} {profile}")
    shared = _normal(f"architecture {declared.architecture} {profile}")
    if not calibration.is_passed_on:
        return shared
    own = _normal(f"device {declared!r} {profile}")
    scores: Floats = (shared + (SPREAD_SIBLING**2 - 1) ** 0.5 * own) / SPREAD_SIBLING
    return scores


@lru_cache(maxsize=64)
def _normal(name: str) -> Floats:
    """Standard normal scores seeded by `name`; for devices, a hash of their facts."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    half = np.random.default_rng(seed).standard_normal((NUM_DRAWS // 2, NUM_SCORES))
    return np.concatenate([half, -half])


def drawn_surfaces(
    scenario: Scenario, grid: Grid, scores: Floats, is_disaggregated: bool
) -> tuple[list[StepSurface], Floats]:
    """The step surface of `scenario` on `grid` under each row of `scores`, and factors on the front end.

    is_disaggregated: its engines either prefill or decode

    Times come from the simulator at one standard deviation of each score; their logarithms are linear in each score, up
    and down apart: exact for errors common to a whole step."""
    costs = shared_step_costs(scenario)
    uncertainty = Uncertainty.of(costs.calibration, costs.profile, is_disaggregated=is_disaggregated)

    def at(place: int, score: float) -> StepSurface:
        one = tuple(score if index == place else 0.0 for index in range(NUM_SCORES))
        return step_surface(scenario, *grid, draw=uncertainty.draw(one), costs=costs)

    centre = at(0, 0.0)
    plain = _flat(centre)

    def log_ratios(surface: StepSurface) -> Floats:
        flat = _flat(surface)
        is_there = (flat > 0) & (plain > 0)  # 0 where there is no time
        return np.where(is_there, np.log(np.where(is_there, flat, 1.0) / np.where(is_there, plain, 1.0)), 0.0)

    up, down = ([log_ratios(at(place, end)) for place in range(NUM_SCORES)] for end in (1.0, -1.0))
    factors = np.exp(np.maximum(scores, 0.0) @ np.array(up) + np.maximum(-scores, 0.0) @ np.array(down))
    server = np.array([uncertainty.draw(tuple(row)).server for row in scores])
    ends = np.cumsum([centre.decode.size, centre.mixed_step_time.size, centre.cached.size])
    surfaces = [
        replace(
            centre,
            decode=centre.decode * row[: ends[0]],
            mixed_step_time=centre.mixed_step_time * row[ends[0] : ends[1]].reshape(centre.mixed_step_time.shape),
            cached=centre.cached * row[ends[1] : ends[2]],
            jump=centre.jump * float(row[-2]),
            launched=centre.launched * float(row[-1]),
        )
        for row in factors
    ]
    return surfaces, server


def _flat(one: StepSurface) -> Floats:
    return np.concatenate([one.decode, one.mixed_step_time.ravel(), one.cached, [one.jump, one.launched]])


class EngineSurfaces:
    """Cached surfaces of engines (a layout's scenario, tokens of its plans). A plan's size matters only with pipeline
    stages. limits: context, prompt, batches and chunk of `step_surface`, for all"""

    def __init__(self, engines: Iterable[Engine], *limits: Any) -> None:
        self._limits = limits
        by_layout: dict[int, dict[tuple[int, int, bool], Engine]] = {}
        for engine in engines:
            by_layout.setdefault(id(engine[0]), {})[self._key(engine)] = engine
        self._known: dict[tuple[int, int, bool], StepSurface] = {}
        for same in by_layout.values():
            costs = shared_step_costs(next(iter(same.values()))[0])
            self._known |= {key: step_surface(one[0], *self._grid(one), costs=costs) for key, one in same.items()}

    def _grid(self, engine: Engine) -> Grid:
        return (*self._limits, engine[1] if engine[0].engine.pipeline_parallel_size > 1 else 0, engine[2])

    def _key(self, engine: Engine) -> tuple[int, int, bool]:
        return id(engine[0]), *self._grid(engine)[-2:]

    def read(self, engines: Sequence[Engine]) -> Surfaces:
        """The surfaces of the candidates' engines."""
        keys = [self._key(engine) for engine in engines]
        place = {key: index for index, key in enumerate(dict.fromkeys(keys))}
        return Surfaces([self._known[key] for key in place], np.array([place[key] for key in keys], np.intp))

    def drawn(self, engine: Engine, is_disaggregated: bool = False) -> tuple[Surfaces, Floats]:
        """`drawn_surfaces` of the engine, under the common draws."""
        surfaces, server = drawn_surfaces(engine[0], self._grid(engine), shared_scores(engine[0]), is_disaggregated)
        return Surfaces(surfaces, np.arange(NUM_DRAWS)), server

    def origin(self, *engines: Engine) -> str:
        """Origin of the engines' step times: datasheet if any is."""
        origins = [self._known[self._key(engine)].origin for engine in engines]
        return "datasheet" if "datasheet" in origins else origins[0]
