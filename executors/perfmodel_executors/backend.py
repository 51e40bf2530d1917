"""`ExecutedBackend`: plans of the engine run on real tensors, timed by the device's clock: the forward pass, building
index tensors and sampling included, scheduling not. A step whose shape was not seen before is first run once untimed:
the BLAS compiles kernels for each new matrix shape (0.2 to 10 ms measured, as much as a whole step), which a serving
engine does when it starts. Running a step twice writes the same keys and values to the same slots."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from perfmodel.cost import StageTicks
from perfmodel.engine import Outcome, Request, RequestStatus, StepPlan
from perfmodel_executors.clocks import PS_PER_NS
from perfmodel_executors.measure.protocol import DriftMeter, uninterrupted
from perfmodel_executors.models.batch import TokenSegment
from perfmodel_executors.models.exits import DrawnExits
from perfmodel_executors.parallel.ranks import RunnersTogether
from perfmodel_executors.runner import StepTaker
from perfmodel_executors.sampling import Draws
from perfmodel_executors.speculation.proposer import Drafting
from perfmodel_executors.speculation.speculator import Speculator, Verified
from perfmodel_executors.tokens import TokenStore

Result = TypeVar("Result")


class Begun(NamedTuple):
    """A plan on its way: its tokens, (request, position) of each to be sampled, ticks that copies of blocks took."""

    plan: StepPlan
    segments: list[TokenSegment]
    sampled: list[tuple[Request, int]]
    copying: int

    @property
    def shape(self) -> tuple[Hashable, ...]:
        return (*_shape(self.plan), *sorted(segment.num_layers or 0 for segment in self.segments))


class StepStopwatch:
    """What steps take, in ticks. drift: restated at its own speed; warms_up: a new shape is run once untimed."""

    def __init__(self, clock_ns: Callable[[], int], drift: DriftMeter | None = None, warms_up: bool = True) -> None:
        self.warms_up, self.drift, self._clock_ns = warms_up, drift, clock_ns
        self._seen: set[Hashable] = set()

    def timed(
        self, run: Callable[..., Result], shape: Hashable | None = None, finalize: Callable[[Result], int] | None = None
    ) -> tuple[int, Result]:
        """What `run` takes and returns. finalize: timed, too; returns nanoseconds that the clock does not see."""
        if self.warms_up and shape is not None and shape not in self._seen:
            self._seen.add(shape)
            run(is_warm_up=True)
        with uninterrupted():
            factor = self.drift.measure() if self.drift is not None else 1.0
            start = self._clock_ns()
            result = run()
            unseen = finalize(result) if finalize is not None else 0
            duration = self._clock_ns() - start + unseen
        return max(1, round(duration * PS_PER_NS * factor)), result


class ExecutedBackend:
    """Executes plans with `runner`; they need `SchedulerConfig.record_positions`. clock_ns, drift, warms_up: as of
    `StepStopwatch`; tokens: of all requests, shared by engines that pass them on; stage_ticks: of the last plan."""

    def __init__(
        self,
        runner: StepTaker,
        seed: int = 0,
        clock_ns: Callable[[], int] | None = None,
        warms_up: bool = True,
        drift: DriftMeter | None = None,
        speculator: Speculator | None = None,
        tokens: TokenStore | None = None,
        draws: Draws | None = None,
    ) -> None:
        self.runner, self._draws, model = runner, draws, runner.model
        self.tokens = tokens or TokenStore(model.vocab_size, runner.block_size, seed)
        self.speculator = speculator
        self.acceptance = None if speculator is None else speculator.new_counts()
        self.timer = StepStopwatch(clock_ns or runner.new_clock(), drift, warms_up)
        self.exits = None if model.exits is None else DrawnExits(model.exits, seed)
        self.stage_ticks = StageTicks(0, 0, ())
        self._first_blocks: dict[int, int] = {}  # of requests, by which runners know their sequences

    def execute(self, plan: StepPlan) -> Outcome:
        """Run the plan's tokens; the outcome has the sampled ones in the order of `decodes`, then `samples`."""
        begun = self.begin(plan)
        if self.speculator is not None:
            return self._speculate(self.speculator, begun)
        duration, tokens = self.timer.timed(partial(self.runner.run, begun.segments), begun.shape)
        return self.end(begun, duration, tokens)

    def begin(self, plan: StepPlan) -> Begun:
        """Make room for the plan's tokens, and copy what it copies."""
        for request in plan.preempted:
            self._lose_blocks(request)
        self._first_blocks.update({key: table[0] for key, table in plan.block_tables.items() if table})
        segments, sampled = self._segments(plan)
        self.runner.reserve_for(segments)
        copying = 0
        if plan.copied_out or plan.copied_back:
            # Before the step and only once: its warm-up writes blocks whose old contents have to be there by then.
            copying, _ = self.timer.timed(partial(self.runner.copy_blocks, plan.copied_out, plan.copied_back))
        return Begun(plan, segments, sampled, copying)

    def end(self, begun: Begun, duration: int, tokens: Sequence[int]) -> Outcome:
        """The step took `duration` beside its copies, and sampled `tokens`."""
        copying = begun.copying
        for (request, position), token in zip(begun.sampled, tokens, strict=True):
            self.tokens.put(request, position, token)
        spent = self.runner.stage_ns
        if spent:  # the first stage waits for copies, too
            first, *rest = [round(duration * own / sum(spent)) for own in spent]
            self.stage_ticks = StageTicks(0, 0, (copying + first, *rest))
        return Outcome(duration + copying, tokens)

    def _speculate(self, speculator: Speculator, begun: Begun) -> Outcome:
        plan, chunks = begun.plan, begun.segments[len(begun.plan.decodes) :]
        proposer, drafting = speculator.proposer, self._drafting(plan)
        proposer.reserve_for(list(plan.block_tables.values()))
        shape = (*_shape(plan), *(speculator.shape(drafting, chunks) if self.timer.warms_up else ()))

        def finalize(verified: Verified) -> int:
            speculator.finalize(drafting, verified)
            return verified.waited_ns

        duration, verified = self.timer.timed(partial(speculator.run, drafting, chunks), shape, finalize)
        for (request, position), tokens in zip(begun.sampled, verified.tokens, strict=True):
            for place, token in enumerate(tokens, start=position):
                self.tokens.put(request, place, token)
        for grant in plan.chunks:
            proposer.release(grant.request.request_id)
        assert self.acceptance is not None
        guessed = verified.guessed or [None] * len(drafting)
        judged = zip(plan.decodes, drafting, verified.paths, verified.num_drafted, guessed, strict=True)
        for request, sequence, path, count, guess in judged:
            if request.status is not RequestStatus.FINISHED:  # since the plan was made
                self.acceptance.add(sequence.depth, path, count, guess)
        return Outcome(duration, [token for tokens in verified.tokens for token in tokens], verified.num_accepted)

    def release(self, request: Request) -> None:
        self.tokens.release(request)
        self.forget(request)

    def forget(self, request: Request) -> None:
        """What this engine alone knows of a request that another goes on with."""
        self._lose_blocks(request)
        if self._draws is not None:
            self._draws.release(request)
        if self.exits is not None:
            self.exits.release(request)
        if self.speculator is not None:
            self.speculator.proposer.release(request.request_id)

    def _lose_blocks(self, request: Request) -> None:
        first = self._first_blocks.pop(request.request_id, None)
        if first is not None:
            self.runner.release(first)

    def _drafting(self, plan: StepPlan) -> list[Drafting]:
        depths = plan.draft_depths or [0] * len(plan.decodes)
        ahead = self.speculator.ahead if self.speculator is not None and plan.draft_depths else 0
        return [
            Drafting(
                request.request_id,
                self.tokens.of(request)[: position + 1],
                plan.block_tables[request.request_id],
                depth,
                is_prompt=position < request.num_prompt_tokens,
                draws=self._drawn(request, position + 1, depth + 1),
                ahead=ahead,
            )
            for request, position, depth in zip(plan.decodes, plan.positions, depths, strict=True)
        ]

    def _drawn(self, request: Request, position: int, count: int = 1) -> list[int]:
        return [] if self._draws is None else self._draws.of(request.request_id, position, count)

    def _segments(self, plan: StepPlan) -> tuple[list[TokenSegment], list[tuple[Request, int]]]:
        """The plan's grants with their token values, and (request, position) of each token to be sampled."""
        segments: list[TokenSegment] = []
        sampled: list[tuple[Request, int]] = []
        for request, position in zip(plan.decodes, plan.positions, strict=True):
            table = plan.block_tables[request.request_id]
            passed = None if self.exits is None else self.exits.pass_layers(request, position)
            tokens = self.tokens.of(request)[position : position + 1]
            draws = self._drawn(request, position + 1)
            adapter = request.adapter
            segments.append(TokenSegment(tokens, position, table, num_layers=passed, draws=draws, adapter=adapter))
            sampled.append((request, position + 1))
        sampling = {request.request_id for request in plan.samples}
        for request, computed, new in plan.chunks:
            is_sampled = request.request_id in sampling
            tokens = self.tokens.of(request)[computed : computed + new]
            draws = self._drawn(request, computed + new) if is_sampled else []
            table = plan.block_tables[request.request_id]
            segments.append(TokenSegment(tokens, computed, table, is_sampled, draws=draws, adapter=request.adapter))
            if is_sampled:
                sampled.append((request, computed + new))
        return segments, sampled


def _shape(plan: StepPlan) -> tuple[Hashable, ...]:
    return plan.num_tokens, plan.num_samples, plan.num_adapters, tuple(plan.chunk_lengths)


class ExecutedGroup:
    """Executes the plans of data-parallel ranks in one step. backends: in the order of their engines and ranks."""

    def __init__(self, backends: Sequence[ExecutedBackend], runners: RunnersTogether, timer: StepStopwatch) -> None:
        self._backends, self._runners, self._timer = backends, runners, timer

    def execute_together(self, plans: Mapping[int, StepPlan]) -> list[Outcome]:
        begun = {rank: self._backends[rank].begin(plan) for rank, plan in plans.items()}
        segments = {rank: own.segments for rank, own in begun.items()}
        shape = tuple((rank, own.shape) for rank, own in begun.items())
        duration, tokens = self._timer.timed(partial(self._runners.run, segments), shape)
        return [self._backends[rank].end(own, duration, tokens[rank]) for rank, own in begun.items()]
