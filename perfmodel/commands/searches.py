"""Many scenarios at once: `whatif`, `plan`, `study`."""

import shlex
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from perfmodel.commands import request as req
from perfmodel.commands.request import QUIET, REPORT_HELP, SHORT_FORMS, Answer, Console, ScenarioRequest, flag, view
from perfmodel.errors import SpecError

if TYPE_CHECKING:
    from perfmodel.planning.finalist import Preliminary
    from perfmodel.planning.result import PlanResult
    from perfmodel.planning.study import Answers, StudyFile, StudyPart, StudyPoints

_ENGINE_HELP = "Where points are worked on: local, ray, ray:HOST:PORT or ray://HOST:PORT (extra ray)."


@dataclass(frozen=True)
class WhatIfRequest(ScenarioRequest):
    """Vary a scenario one value at a time: sensitivities, elasticities, where bounds change, where an alternative pays.

    Without --vary: the resources that could be bought (peak FLOPs, bandwidths, capacity, overheads), and the load. All
    points see the same requests. `--set step.batch=64` gives the step of metrics like step_ms, else it is the typical
    one."""

    command = "whatif"
    examples = (
        "whatif llama-3.1-8b-a100 --vary hardware.hbm.bandwidth=0.5x..2x",
        "whatif --model llama-3.1-8b --hardware h100 --vary traffic.arrivals.rate=1..16 "
        "--against engine.quantization=int8",
        "whatif --model llama-3.1-8b --hardware h100 --speculation",
    )
    has_details = True
    short_forms = tuple(SHORT_FORMS)

    vary: tuple[str, ...] = flag(
        "--vary",
        "Vary one value, over a range or PATH=A,B,C; 0.5x..2x are multiples. May be given several times.",
        (),
        "PATH=LO..HI[:N]",
    )
    metric: tuple[str, ...] = flag("--metric", "Of a run, a step or memory. May be given several times.", (), "NAME")
    grid: bool = flag("--grid", "Both varied values in all their combinations.", False)
    against: str | None = flag("--against", "An alternative: where does it begin to pay?", metavar="'KEY=VALUE ...'")
    intervals: bool = flag(
        "--intervals", "Also the 80 % intervals of means; each point is simulated several times.", False
    )
    speculation: bool = flag("--speculation", "Does speculation pay, and until which concurrency?", False)
    report: Path | None = flag("--report", REPORT_HELP, metavar="FILE")
    engine: str = flag("--engine", _ENGINE_HELP, "local", "ENGINE", shows_default=True, is_in_line=False)
    workers: int | None = None

    def answer(self, console: Console = QUIET) -> Answer:
        """As of a request; `result` is the WhatIfResult, or with `--speculation` the SpeculationAdvice."""
        if self.speculation:
            return self._speculation()
        from perfmodel.planning.whatif import ask_whatif
        from perfmodel.report.views.whatif import whatif_json

        try:
            against = shlex.split(self.against or "")
        except ValueError as error:
            raise SpecError(f"--against {self.against}: {error}; quote it as in --against 'a=1 b=2'.") from None
        places = (self.source(), self.vary, self.overrides, self.metric, self.grid, against, self.workers, self.engine)
        result = ask_whatif(*places, console.watch, self.intervals)
        result = replace(result, assumed=self.assumed(result.answers.scenario))
        document, brief = view("whatif:whatif_view", result, self.line), view("whatif:whatif_brief", result)
        return Answer(lambda: whatif_json(result), document, result, brief)

    def _speculation(self) -> Answer:
        """Raises SpecError beside flags of what is varied."""
        from perfmodel.planning.speculation import ask_speculation
        from perfmodel.report.views.whatif import speculation_json

        for name in ("vary", "metric", "grid", "against", "intervals"):
            if getattr(self, name):
                raise SpecError(
                    f"--speculation beside --{name}: it varies drafts and concurrency itself; leave one out."
                )
        result = ask_speculation(scenario := self.load())
        assumed = self.assumed(scenario)
        views = (view("whatif:speculation_view", result, self.line, assumed, is_brief) for is_brief in (False, True))
        document, brief = views
        return Answer(lambda: speculation_json(result, assumed), document, result, brief)


@dataclass(frozen=True)
class PlanRequest(ScenarioRequest):
    """Find the deployment that serves a scenario's rate within its SLO: cheapest, fewest GPUs, most goodput per GPU, or
    lowest latency; or that does its offline job: at the lowest cost before a deadline, or first.

    The scenario's `plan` block says what to look for, and where (`--set plan.objective=fewest_gpus`,
    `--set plan.space.hardware=[a100-sxm-80gb, h100-sxm-80gb]`). Candidates are screened in closed form, the best are
    simulated. Every simulated point is stored: a plan that was stopped resumes where it was. Exit status: 0 with a
    deployment, 1 where none serves what is asked for, 2 for what cannot be read."""

    command = "plan"
    examples = (
        "plan --model llama-3.1-70b --hardware h100,h200 --rate 20 --ttft 1s --tpot 40ms --traffic chat",
        "plan llama-3.1-8b-a100 --set plan.objective=fewest_gpus --report plan.html --export out/",
    )
    has_details = True
    is_long = True
    short_forms = tuple(SHORT_FORMS)

    report: Path | None = flag("--report", REPORT_HELP, metavar="FILE")
    export: Path | None = flag(
        *(
            "--export",
            "Write the choice: a scenario, serve.sh, files of Kubernetes, Dynamo, llm-d, Grafana.",
            None,
            "DIR",
        ),
        is_in_line=False,
    )
    store: Path | None = flag(
        *("--store", "Where evaluated points are stored; by default in the user's cache folder.", None, "FILE"),
        is_in_line=False,
    )
    engine: str = flag("--engine", _ENGINE_HELP, "local", "ENGINE", shows_default=True, is_in_line=False)
    workers: int | None = None

    def answer(self, console: Console = QUIET) -> Answer:
        """As of a request; `result` is a PlanResult or, of an offline objective, a JobPlan, whose `winner` is None
        where nothing does what is asked for. What the screen has found is said before anything is simulated."""
        from perfmodel.planning.result import PlanResult
        from perfmodel.planning.search import make_plan

        if self.export is not None and self.export.exists() and not self.export.is_dir():
            raise SpecError(f"--export {self.export}: is a file; expected a folder, which may be new.")
        source = self.source(req.MAX_KINDS)
        assumed = self.assumed(req.load(source, self.overrides), {"engine.tensor_parallel_size"})
        for sentence in assumed:
            console.say(sentence)
        planned = make_plan(
            *(source, self.overrides, self.store, self.workers, self.engine, console.watch),
            lambda preliminary: console.say(self._preliminary(preliminary)),
        )
        result = replace(planned, notes=[*assumed, *planned.notes])
        status = 0 if result.winner is not None else 1
        if isinstance(result, PlanResult):
            from perfmodel.report.views.plan import plan_json, plan_question

            document = view("plan:plan_view", result, self.line)
            brief = view("plan:brief_view", result, plan_question(result))
            after = partial(self._export, result, console)
            return Answer(lambda: plan_json(result), document, result, brief, exit_status=status, after=after)
        from perfmodel.report.views.plan import job_json

        return Answer(lambda: job_json(result), view("plan:job_view", result, self.line), result, exit_status=status)

    def _preliminary(self, preliminary: "Preliminary") -> str:
        """What the screen has found, in a sentence. Raises SpecError for a job that is to be exported."""
        from perfmodel.report.views.plan import preliminary_sentence

        if self.export is not None and preliminary.spec.is_offline:
            raise SpecError(f"--export {self.export}: writes what serves a rate; of a job the answer has the command.")

        return preliminary_sentence(preliminary)

    def _export(self, result: "PlanResult", console: Console) -> None:
        if self.export is None:
            return
        from perfmodel.planning.export import export_plan

        if result.winner is None:
            console.say(f"--export {self.export}: nothing was written, since nothing serves what was asked for.")
            return
        for written in export_plan(result, self.export):
            console.say(f"Written to {written}")

    def files(self, answer: Answer) -> dict[str, str]:
        """What `--export` writes, and the report."""
        from perfmodel.planning.export import plan_files
        from perfmodel.planning.result import PlanResult
        from perfmodel.report.pages import render_page

        starts = plan_files(answer.result) if isinstance(answer.result, PlanResult) else {}
        return {**starts, "report.html": render_page(answer.document)}


@dataclass(frozen=True)
class StudyRequest(req.CommandRequest):
    """Ask one question of many scenarios: variants of a base scenario along axes, simulated in parallel processes.

    The shipped ones lie in workloads/scenarios/studies. `--execute` runs the small form that the study describes on
    this machine and compares it with its simulation, calibrated here and now (needs the executor extra). `--set`
    changes the study's base scenario. `--quality` writes the file of perplexities that the study's `quality` names."""

    command = "study"
    examples = ("study autoscaling --quick", "study nodes --report nodes.html")

    name: str = req.argument("STUDY", "A study's name, or a path to a study file.", completes="studies")
    execute: bool = flag("--execute", "Also run the study's executed part on this machine.", False)
    quick: bool = flag("--quick", "A few values of each axis and fewer requests.", False)
    overrides: tuple[str, ...] = flag(*("--set", req.OVERRIDES_HELP, ()), metavar="KEY=VALUE")
    quality_model: str | None = flag(
        *("--quality", "First measure the study's perplexities anew.", None, "MODEL.gguf"), is_in_line=False
    )
    report: Path | None = flag("--report", REPORT_HELP, metavar="FILE")
    engine: str = flag("--engine", _ENGINE_HELP, "local", "ENGINE", shows_default=True, is_in_line=False)
    workers: int | None = None

    def answer(self, console: Console = QUIET) -> Answer:
        """As of a request; `result` is the StudyResult. Raises SpecError for points that cannot be read, and for a
        study without the part that is to be executed."""
        from perfmodel.planning.study import StudyResult, executed_points, load_study, simulated_points
        from perfmodel.planning.study import quick as quickened
        from perfmodel.report.views.study import study_json

        file = load_study(self.name, self.overrides)
        if self.quality_model is not None:
            from perfmodel.evidence.executed.study import measure_study_quality

            with console.watch("measuring perplexity") as progress:
                written = measure_study_quality(file, self.quality_model, progress)
            console.say(f"Written to {written}")
        points = quickened(simulated_points(file)) if self.quick else simulated_points(file)
        points.check()
        executed = [executed_points(file)] if self.execute else []
        if self.quick:  # what is executed is small to begin with
            executed = [quickened(part, changes=False) for part in executed]
        for part in executed:
            part.check()
        parts = [self._simulated(file, points, console), *(_executed(part, console) for part in executed)]
        result = StudyResult(file.study, parts, self._notes(file), self.quick)
        return Answer(lambda: study_json(result), view("study:study_view", result, self.line), result)

    def _simulated(self, file: "StudyFile", points: "StudyPoints", console: Console) -> "StudyPart":
        from perfmodel.planning.study import StudyPart, with_quality
        from perfmodel.planning.sweep import sweep

        scenario, all_points = points.check(), list(points.points.values())
        with console.watch("simulating") as progress:
            records = points.located(lambda: sweep(all_points, progress, self.workers, self.engine))
        return StudyPart(scenario, {"simulated": with_quality(points.answered(records), file)})

    def _notes(self, file: "StudyFile") -> list[str]:
        from perfmodel.planning.study import quality_note

        of_quality = [note] if (note := quality_note(file)) else []
        if file.study.executed is None or not self.execute:
            return of_quality
        apart = (
            "Executed points share one drift meter; the simulations beside them come from one calibration for each "
            "model and format, minutes apart, so that the machine's drift between calibrations is in the simulated "
            "gains."
        )
        left_out = (f"Not executed: {label}: {why}" for label, why in file.study.executed.leave_out.items())
        return [*of_quality, apart, *left_out]


def _executed(points: "StudyPoints", console: Console) -> "StudyPart":
    from perfmodel.evidence.executed.study import execute_study
    from perfmodel.planning.study import StudyPart, with_quality

    scenario = points.check()
    with console.watch("executing") as progress:
        answers: dict[str, Answers] = execute_study(points, progress)
    return StudyPart(scenario, {clock: with_quality(of_clock, points.file) for clock, of_clock in answers.items()})
