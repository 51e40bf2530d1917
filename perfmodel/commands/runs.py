"""What lies in memory, what a step takes, what a run gives: `memory`, `simulate`, `execute`, `explain`, `roofline`,
`compare`."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.commands import request as req
from perfmodel.commands.request import QUIET, SEED_HELP, Answer, Console, Progress, ScenarioRequest, flag, load, view
from perfmodel.errors import DoesNotFitError, PerfmodelError, SpecError

if TYPE_CHECKING:
    from perfmodel.cost.memory.file_types import TypeFit
    from perfmodel.cost.memory.plan import MemoryPlan
    from perfmodel.evidence.executed.compare import RunComparison
    from perfmodel.planning.typical_step import StepReport
    from perfmodel.sim.records.result import RunResult
    from perfmodel.specs.scenario import Scenario

_MAX_BYTES_READ = 100_000_000  # of a steps.csv: about a million records
_LOOK_S, _LONG_S, _SHORT_S = 5.0, 300.0, 60.0  # after which a run is judged; what is long; what a shorter one takes
_OTHER_FORMATS = (".csv", ".htm", ".jpeg", ".jpg", ".json", ".md", ".pdf", ".png", ".svg", ".txt")
_OUT_HELP = "Write records, report.html and timeline.json to this folder."


@dataclass(frozen=True)
class MemoryRequest(ScenarioRequest):
    """Show weights, KV cache and activations per device, and the largest batch and context that fit.

    Of an engine that keeps layers with the CPU (llama.cpp), also which GGUF types fit: how many layers on the device.
    """

    command = "memory"
    examples = ("memory llama-3.1-70b-h100-tp4", "memory --model qwen3-30b-a3b --hardware h100")
    scenario_flags = req.MEMORY_FLAGS
    short_forms = req.PARALLELISM

    def answer(self, console: Console = QUIET) -> Answer:
        """As of a request; `result` is the MemoryPlan. Raises DoesNotFitError for a model too large for the devices."""
        scenario = self.load()
        from perfmodel.cost.memory.file_types import fits_of_types
        from perfmodel.specs.engine.formats import serving_notes
        from perfmodel.trust import trust_of

        types = fits_of_types(scenario.model, scenario.hardware, scenario.engine)
        plan = _planned(scenario, types)
        notes = [*self.assumed(scenario), *serving_notes(scenario.model, scenario.engine, scenario.hardware)]
        document = view("memory:memory_view", plan, notes, types, trust_of(scenario))
        return Answer(lambda: _memory_json(scenario, plan, types, notes), document, plan)


def _planned(scenario: "Scenario", types: "Sequence[TypeFit]") -> "MemoryPlan":
    """The plan. Raises DoesNotFitError that names the layers and the file type that fit, where there are any."""
    from perfmodel.cost import plan_memory

    try:
        return plan_memory(scenario.model, scenario.hardware, scenario.engine)
    except DoesNotFitError as error:
        text = str(error)
        part = next((fit for fit in types if fit.file_type == scenario.engine.quantization and fit.layers), None)
        if part is not None:
            text += f" {part.layers} of {part.num_layers} layers fit: engine.n_gpu_layers={part.layers} and engine.cpu."
        whole = next((fit for fit in types if fit.fits), None)
        if whole is not None:
            text += f" All layers fit with engine.quantization={whole.file_type}."
        raise DoesNotFitError(text) from None


def _memory_json(
    scenario: "Scenario", plan: "MemoryPlan", types: "Sequence[TypeFit]", notes: list[str]
) -> dict[str, Any]:
    from perfmodel.cost.calibrations.provenance import provenance_of, resolved
    from perfmodel.trust import trust_of

    planned = asdict(plan)
    groups = planned.pop("kv_groups")
    fits = [{**(fields := asdict(fit)).pop("asked"), **fields, "fits": fit.fits} for fit in types]
    return {
        "scenario": scenario.name,
        **planned,
        **({"kv_groups": groups} if groups else {}),
        "weight_bytes": plan.weight_bytes,
        "kv_bytes": plan.kv_bytes,
        "max_tokens": plan.max_tokens,
        "max_batch_at_2048_tokens": plan.max_batch(2048),
        "max_context": plan.max_context(),
        **({"file_types": fits} if fits else {}),
        "notes": notes,
        "trust": trust_of(scenario).to_json(),
        "provenance": provenance_of([scenario]).to_json("memory", {"scenario": resolved(scenario)}),
    }


# ---------------------------------------------------------------- runs


@dataclass(frozen=True)
class SimulateRequest(ScenarioRequest):
    """Simulate a scenario: latencies, throughput, goodput, cost, and what bounds them."""

    command = "simulate"
    examples = (
        "simulate llama-3.1-8b-a100 --set engine.max_num_seqs=64 --out out/",
        "simulate --model llama-3.1-8b --hardware h100 --rate '20 req/s' --ttft 1s --tpot '40 ms'",
    )
    has_details = True
    scenario_flags = req.RUN_FLAGS
    short_forms = tuple(req.SHORT_FORMS)

    out: Path | None = flag("--out", _OUT_HELP, metavar="DIR", is_in_line=False)
    seed: int | None = flag("--seed", SEED_HELP)

    def answer(self, console: Console = QUIET) -> Answer:
        """As of a request; `result` is the RunResult."""
        scenario = self.load(self.seed)
        notes = self.assumed(scenario)

        return _run_to_folder(lambda folder: simulated(scenario, notes, console, folder), self.out)


@dataclass(frozen=True)
class ExecuteRequest(ScenarioRequest):
    """Execute a scenario: the same engine, with every step run for real on this machine and timed, and its prediction.

    Needs the executor extra (torch), and the GPU that the scenario names if it names one. Weights are those of the
    files where the model is a .gguf file or a folder with safetensors, else random; the clock advances by each step's
    measured time, so queueing replays as if the machine did nothing else.

    With --on, on vLLM itself: its own scheduler and kernels, arrivals at their times, records of the same form. Needs
    no torch here; real weights where `model:` is a folder that has them, else dummy ones. `compare` and `validate
    executor --measured` set the prediction against it."""

    command = "execute"
    examples = ("execute tiny-llama-cpu", "execute tiny-llama-cpu --max-seconds 10 --out out/")
    has_details = True
    is_long = True
    scenario_flags = ()
    short_forms = tuple(req.SHORT_FORMS)

    scenario: str = req.argument("SCENARIO", req.SCENARIO_HELP, completes="scenarios")
    out: Path | None = flag("--out", _OUT_HELP, metavar="DIR", is_in_line=False)
    seed: int | None = flag("--seed", SEED_HELP)
    kernels: str | None = flag(
        "--kernels", "torch or triton; by default triton on a GPU, torch on a CPU.", None, "NAME"
    )
    on: str | None = flag(
        "--on",
        "vllm: the one of this environment; vllm:PATH: of another one's bin/python; vllm:http://HOST:PORT: a server "
        "that runs.",
        metavar="ENGINE",
    )
    max_seconds: float | None = flag(
        "--max-seconds", "End the run after so many seconds of the wall's time, with what was answered.", None, "S"
    )
    print_text: bool = flag("--print-text", "Print what was asked and answered; needs a model with weights.", False)

    def answer(self, console: Console = QUIET) -> Answer:
        """As of a request; `result` is the RunResult."""
        source = self.source()
        scenario = load(source, self.overrides, self.seed)
        return self._on_other(console, source, scenario) if self.on is not None else self._here(console, scenario)

    def _here(self, console: Console, scenario: "Scenario") -> Answer:
        from perfmodel.evidence.executed.bridge import load_executor
        from perfmodel.evidence.executed.compare import RunPrediction

        if self.max_seconds is not None and not self.max_seconds > 0:
            raise SpecError(f"--max-seconds: got {self.max_seconds:g}; expected a positive number of seconds.")
        executor, prediction, texts = load_executor(), RunPrediction(scenario), list[tuple[int, str, str]]()

        def run(folder: Path | None) -> "RunResult":
            with console.watch("executing tokens") as progress:
                return executor.execute_scenario(
                    scenario,
                    progress=warn_when_long(progress, console.say, counted="tokens"),
                    out=folder,
                    kernels=self.kernels,
                    wrap=prediction.around,
                    max_seconds=self.max_seconds,
                    on_text=(lambda *text: texts.append(text)) if self.print_text else None,
                )

        answer = _run_to_folder(run, self.out, prediction.compare)
        if not texts:
            return answer
        shown = [f"request {number}\n> {asked.strip()}\n{answered.strip()}" for number, asked, answered in texts]
        more = [{"request_id": number, "prompt": asked, "answer": answered} for number, asked, answered in texts]
        make_data = answer.make_data
        return replace(answer, closing=(*answer.closing, *shown), make_data=lambda: {**make_data(), "texts": more})

    def _on_other(self, console: Console, source: str, scenario: "Scenario") -> Answer:
        from perfmodel.evidence.executed.bridge import load_executor
        from perfmodel.specs.scenario_file import named_model

        for name, is_given in (("--kernels", self.kernels), ("--max-seconds", self.max_seconds)):
            if is_given is not None:
                raise SpecError(f"{name} with --on: it is of runs by this package's own executor; leave it out.")
        if self.print_text:
            raise SpecError("--print-text with --on: the other engine's texts are not kept; leave it out.")
        model = named_model(source, self.overrides)

        def run(folder: Path | None) -> "RunResult":
            assert self.on is not None
            with console.watch("executing") as progress:
                watched = warn_when_long(progress, console.say)
                return load_executor(needs_torch=False).execute_on(self.on, scenario, model, watched, folder)

        return _run_to_folder(run, self.out)


def simulated(
    scenario: "Scenario", notes: Sequence[str] = (), console: Console = QUIET, out: Path | None = None
) -> "RunResult":
    """The run of `perfmodel simulate`.

    scenario, console: as of the request; notes: of the answer, before the run's own
    out:   folder to stream records to; without it no step records are kept"""
    from perfmodel import sim

    keep_steps = None if out else False
    with console.watch_both("simulating", "computing intervals") as (progress, on_draw):
        watched = warn_when_long(progress, console.say)
        result = sim.simulate(
            scenario, progress=watched, out=out, keep_steps=keep_steps, intervals=True, on_draw=on_draw
        )
    return replace(result, notes=(*notes, *result.notes))


def _run_to_folder(
    run: "Callable[[Path | None], RunResult]",
    out: Path | None,
    predict: "Callable[[RunResult], RunComparison] | None" = None,
) -> Answer:
    """Run, and write files if there is a folder for them; ctrl-C leaves the records written so far.
    predict: compares an executed run with its prediction"""
    import perfmodel.sim  # noqa: F401 - from the start of the run on, what is loaded counts as there to stay

    folder, closing, comparison = None, tuple[str, ...](), None
    if out is not None:
        from perfmodel.report.runs import RunFolder

        folder = RunFolder(out)
    try:
        result = run(folder.work if folder is not None else None)
        if predict is not None:
            try:
                comparison = predict(result)
            except PerfmodelError as error:  # the run itself succeeded, and must not be lost
                result = replace(result, notes=(*result.notes, f"There is no prediction to compare with: {error}"))
        if folder is not None:
            _write_files(result, folder.work, comparison)
            folder.finish()
            closing = (
                f"Report: {folder.path / 'report.html'}",
                f"Timeline for ui.perfetto.dev: {folder.path / 'timeline.json'}",
                f"Records: {folder.path / 'requests.csv'}, {folder.path / 'steps.csv'}",
            )
    except KeyboardInterrupt:
        records = f"the finished requests are in {folder.work / 'requests.csv'}" if folder else None
        raise KeyboardInterrupt(records or "nothing was saved (no --out)") from None
    except (PerfmodelError, OSError) as error:
        if folder is None:
            raise
        folder.give_up()
        if isinstance(error, OSError):  # a disk that is full has no name
            raise SpecError(f"--out {out}: cannot be written: {error.strerror or error}.") from None
        raise
    document, brief = view("run:run_view", result, None, comparison), view("run:run_brief", result, comparison)
    status = 1 if result.cut_short else 0
    return Answer(lambda: _run_json(result, comparison), document, result, brief, closing=closing, exit_status=status)


def _run_json(result: "RunResult", comparison: "RunComparison | None") -> dict[str, Any]:
    return result.to_json() | ({} if comparison is None else {"prediction": comparison.to_json()})


def warn_when_long(
    progress: Progress | None,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    counted: str = "requests",
) -> Progress:
    """`progress`, with one sentence about a run that will take more than five minutes, and a shorter one.

    clock: seconds, from anywhere; counted: what progress counts, requests | tokens"""
    pace, is_said = req.Pace(), False

    def report(done: int, total: int | None) -> None:
        nonlocal is_said
        if progress is not None:
            progress(done, total)
        since, passed = pace.since_first(done, now := clock())
        if is_said or total is None or passed < _LOOK_S:
            return
        left = pace.left_s(done, total, now)
        is_said = left is not None
        if left is not None and left > _LONG_S:
            shown = f"{left / 3600:,.1f} hours" if left >= 3600 else f"{left / 60:,.0f} minutes"
            fewer = f"--set traffic.num_requests={max(int(since / passed * _SHORT_S), 1)} takes a minute."
            if counted == "tokens":
                fewer = f"--max-seconds {_SHORT_S:g} ends with what is answered by then."
            say(
                f"{done:,} of {total:,} {counted}, {since:,} in the last {passed:.0f} s: about {shown} left. Fewer "
                f"show the same: {fewer} Ctrl-C ends it."
            )

    return report


def _write_files(result: "RunResult", folder: Path, comparison: "RunComparison | None" = None) -> None:
    import json

    from perfmodel.files.atomic_write import atomic_write
    from perfmodel.planning.typical_step import estimate_mean_step
    from perfmodel.renderable import to_jsonable
    from perfmodel.report.pages import render_page
    from perfmodel.report.runs import read_steps, write_timeline
    from perfmodel.report.views.run import run_view

    streamed = folder / "steps.csv"
    if result.steps is None and streamed.exists():
        size = streamed.stat().st_size
        if size > _MAX_BYTES_READ:
            note = f"The {size / 1e6:,.0f} MB of step records are in steps.csv; they are too many to be drawn here."
            result = replace(result, notes=(*result.notes, note))
        else:
            result = replace(result, steps=read_steps(streamed))
    atomic_write(folder / "result.json", json.dumps(to_jsonable(_run_json(result, comparison)), indent=2) + "\n")
    try:
        step = estimate_mean_step(result)
    except PerfmodelError:  # the run itself succeeded: its report must not fail for an illustration
        step = None
    atomic_write(folder / "report.html", render_page(run_view(result, step, comparison)))
    write_timeline(folder / "timeline.json", result, None if comparison is None else comparison.simulated)


# ---------------------------------------------------------------- steps


@dataclass(frozen=True)
class _StepRequest(ScenarioRequest):
    """Which step: of a batch that decodes, or of a prompt; without any of them it is the typical decode step."""

    scenario_flags = req.STEP_FLAGS
    short_forms = req.STEP_FORMS

    batch: int | None = flag("--batch", "Decode this many sequences.", metavar="N", is_count=True)
    context: int | None = flag(
        *("--context", "Tokens in each sequence's KV cache; 8k is 8,000, 8K is 8,192.", None, "N"), is_count=True
    )
    prefill: int | None = flag("--prefill", "Prefill a prompt of this many tokens.", metavar="N", is_count=True)

    def report(self, seed: int | None = None) -> "StepReport":
        """The step. Raises SpecError for what cannot be read, DoesNotFitError for one too large for the devices."""
        scenario = self.load(seed)
        from perfmodel.planning.typical_step import estimate_choice

        report = estimate_choice(scenario, self.batch, self.context, self.prefill)
        return replace(report, assumed=self.assumed(scenario))


@dataclass(frozen=True)
class ExplainRequest(_StepRequest):
    """Show one step operator by operator: FLOPs, bytes, intensity, time, bound.

    Without a batch, a context or a prefill it is the scenario's typical decode step: the batch to expect at the
    arrival rate (Little's law; `simulate` has a run's mean batch), each sequence with its prompt and half of its
    answer.
    `--occupancy` compiles the step's Triton kernels ahead of time, no GPU needed: registers, SRAM, spills, thread
    blocks, waves."""

    command = "explain"
    examples = (
        "explain llama-3.1-8b-a100 --batch 32 --context 2048",
        "explain --model llama-3.1-70b --hardware h200 --prefill 4096",
    )
    has_details = True

    whole_run: bool = flag("--run", "Simulate, and show what the whole run's time went to.", False)
    occupancy: bool = flag(
        "--occupancy", "Compile the executor's kernels for this GPU; show what they take of it.", False
    )
    seed: int | None = flag("--seed", SEED_HELP)

    def answer(self, console: Console = QUIET) -> Answer:
        """As of a request; `result` is the StepReport, of a whole run the RunResult."""
        if self.occupancy and self.whole_run:
            raise SpecError("--occupancy explains the kernels of one step; leave --run out.")
        if self.prefill is not None and (self.batch is not None or self.context is not None):
            raise SpecError("--prefill does not go with --batch and --context: one step prefills or decodes here.")
        if self.whole_run and (self.prefill or self.batch or self.context):
            raise SpecError("--run explains the whole run; leave --batch, --context and --prefill out.")
        if self.whole_run:
            from perfmodel import sim

            scenario = self.load(self.seed)
            from perfmodel.report.views.step import kinds_of_steps, kinds_view

            with console.watch("simulating") as progress:
                result = sim.simulate(scenario, progress=progress)
            result = replace(result, notes=(*self.assumed(scenario), *result.notes))
            kinds = kinds_of_steps(result.steps) if result.steps is not None else []
            shares = {key: result.summary.get(key) for key in ("bound_share", "mfu", "mbu", "duration", "origin")}
            data = {"scenario": scenario.name, **shares, "steps": [asdict(kind) for kind in kinds]}
            data |= {"notes": list(result.notes), "provenance": result.provenance("steps of a run")}
            return Answer(lambda: data, lambda: kinds_view(result, kinds), result)
        report = self.report(self.seed)
        if self.occupancy:
            from perfmodel.evidence.executed.bridge import explain_occupancy

            with console.watch("compiling") as progress:
                rows = explain_occupancy(report.scenario, report.shape, progress)
            step = {"scenario": report.scenario.name, "step": report.label, "kernels": rows}
            data = {**step, "notes": list(report.assumed), "provenance": report.provenance("kernels of a step")}
            return Answer(lambda: data, view("step:occupancy_view", report, rows), report)
        return Answer(report.to_json, view("step:step_view", report), report, view("step:step_brief", report))


@dataclass(frozen=True)
class RooflineRequest(_StepRequest):
    """Plot a step's operators on the roofline, with the ridge point of each dtype.

    Which step: as for `explain`."""

    command = "roofline"
    examples = ("roofline llama-3.1-8b-a100 --batch 64 --out out/", "roofline --model qwen3-30b-a3b --hardware h100")

    out: Path = flag(
        *("--out", "An .html file, or a folder to put roofline-SCENARIO.html in.", Path("out"), "PATH"),
        shows_default=True,
    )

    def answer(self, console: Console = QUIET) -> Answer:
        """As of a request; `result` is the StepReport."""
        from perfmodel.files.atomic_write import atomic_write
        from perfmodel.report.pages import render_page
        from perfmodel.report.views.step import ridge_points

        report = self.report()
        document, path = view("step:step_view", report, True)(), self._plot_path(report.scenario.name)
        atomic_write(path, render_page(document))
        more = {"ridge_flop_per_byte": ridge_points(report.scenario.hardware), "plot": str(path)}
        return Answer(lambda: {**report.to_json(), **more}, lambda: document, report, closing=(f"Plot: {path}",))

    def _plot_path(self, name: str) -> Path:
        if self.out.suffix == ".html":
            return self.out
        if self.out.suffix.lower() in _OTHER_FORMATS and not self.out.is_dir():
            raise SpecError(f"--out {self.out}: expected an .html file, or a folder to put roofline-{name}.html in.")
        return self.out / f"roofline-{name}.html"


# ---------------------------------------------------------------- two results


@dataclass(frozen=True)
class CompareRequest(req.CommandRequest):
    """Say what differs between two results: in inputs, field by field; in versions; in answers, the best first.

    Results are files that a command wrote with `--json` (`--out` and `--report` write them, too). Scenarios, by their
    names or files, are simulated and compared."""

    command = "compare"
    examples = ("compare llama-3.1-8b-a100 llama-3.1-8b-h100-2048-256", "compare before.json after.json")

    one: str = req.argument("A", "A file that a command wrote with --json, or a scenario.")
    other: str = req.argument("B", "Another of the same command.")

    def answer(self, console: Console = QUIET) -> Answer:
        """As of a request; `result` is the ResultComparison."""
        return compared(_result(self.one, console), _result(self.other, console), self.one, self.other)


def compared(one: Mapping[str, Any], other: Mapping[str, Any], name: str, other_name: str) -> Answer:
    """See `CompareRequest`: of two results as `--json` prints them, and what they are called."""
    from perfmodel.planning.comparison import compare_results

    comparison = compare_results(one, other, name, other_name)
    return Answer(comparison.to_json, view("catalog:comparison_view", comparison), comparison)


def _result(name: str, console: Console) -> dict[str, Any]:
    """The result in a file, or of a scenario that is simulated now."""
    if name.endswith(".json"):
        from perfmodel.planning.comparison import read_result

        return read_result(Path(name))
    return simulated(load(name), (), console).to_json()
