"""`perfmodel execute --on vllm...`: a scenario on vLLM itself, its records in the form of our own executed runs: vllm,
the one of this environment; vllm:PATH, that of another one, its interpreter or its folder; vllm:http://HOST:PORT, a
server that runs already (`perfmodel_executors.engines.server`), which has no step records."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory, TemporaryFile
from textwrap import shorten
from typing import IO, Any, NamedTuple

from perfmodel.cost import Calibration
from perfmodel.engine import Request
from perfmodel.errors import MissingExtraError, PerfmodelError, SpecError
from perfmodel.evidence.fit.whole_steps import EngineSteps, fit_engine_steps, read_chunks
from perfmodel.sim import RunResult, Workload
from perfmodel.specs.scenario import Scenario
from perfmodel_executors.clocks import PS_PER_NS
from perfmodel_executors.engines import arguments as vllm_arguments
from perfmodel_executors.engines import vllm_process
from perfmodel_executors.engines.results import CHUNKS, Progress, collected, described
from perfmodel_executors.tokens import TokenStore

_END_S = 20.0
_LOG_TAIL = 400  # characters of what vLLM printed last


class OnEngine(NamedTuple):
    """A scenario to run on an engine, its model as the scenario names it; out: folder to stream its CSV files to."""

    scenario: Scenario
    model: str
    out: Path | None = None


def execute_on(
    target: str, scenario: Scenario, model: str, progress: Progress | None = None, out: Path | None = None
) -> RunResult:
    """Serve the scenario's traffic on the vLLM that `target` names, arrivals at their times; progress: called with
    (requests finished, in all if known). Raises MissingExtraError without vLLM, UnsupportedError for what it has no
    argument for, PerfmodelError where it refuses or fails; WorkloadError for traffic without requests."""
    return execute_all_on(target, [OnEngine(scenario, model, out)], progress)[0]


def execute_all_on(target: str, runs: Sequence[OnEngine], progress: Progress | None = None) -> list[RunResult]:
    """The same of several scenarios, one after another: those with equal arguments on one engine, started once."""
    _, _, place = target.partition(":")
    is_running = place.startswith(("http://", "https://"))
    for run in runs:
        vllm_arguments.refuse_unserved(run.scenario, is_running)
    if is_running:
        from perfmodel_executors.engines.server import execute_on_server

        return [execute_on_server(place, run.scenario, progress, run.out) for run in runs]
    python = interpreter_of(target)
    groups: dict[str, list[int]] = {}
    for number, run in enumerate(runs):
        setup = [run.model, vllm_arguments.engine_arguments(run.scenario, "", True), run.scenario.hardware.kind]
        groups.setdefault(json.dumps([*setup, run.scenario.engine.version]), []).append(number)
    results: dict[int, RunResult] = {}
    for numbers in groups.values():
        results |= zip(numbers, _on_one_engine(python, [runs[number] for number in numbers], progress), strict=True)
    return [results[number] for number in range(len(runs))]


def calibrate_on(
    target: str, scenarios: Sequence[tuple[Scenario, str]], progress: Progress | None = None
) -> Calibration:
    """Whole steps of this device under vLLM: run (scenario, its model's name) one after another on the engine that
    `target` names, and fit their steps. progress: called with (requests of the current run finished, in all if known).
    Raises SpecError for several models or devices, PerfmodelError for a server, which records no steps, and what
    `execute_on` raises."""
    first, name = scenarios[0]
    for scenario, model in scenarios[1:]:
        if (model, scenario.hardware) != (name, first.hardware):
            raise SpecError(
                f"got {scenario.name} of {model} on {scenario.hardware.name} beside {first.name} of {name} on "
                f"{first.hardware.name}; a calibration of whole steps is of one model on one device: fit each alone."
            )
    if target.partition(":")[2].startswith("http"):
        raise PerfmodelError(
            f"--on {target}: a server records no steps to fit to; name the vLLM that is installed here, or fit load "
            f"tests of the server: perfmodel calibrate --from FILE... --name NAME."
        )
    with TemporaryDirectory(prefix="perfmodel-calibrate-") as folder:
        outs = [Path(folder, str(number)) for number in range(len(scenarios))]
        runs = [OnEngine(*pair, out) for pair, out in zip(scenarios, outs, strict=True)]
        results = execute_all_on(target, runs, progress)
        chunks = [read_chunks(out / CHUNKS) for out in outs]
    steps = [result.steps for result in results if result.steps is not None]
    fit = fit_engine_steps([EngineSteps(*item) for item in zip((s for s, _ in scenarios), steps, chunks, strict=True)])
    facts = results[0].measured_on or {}
    source = (
        f"{sum(map(len, steps)):,} whole steps of vLLM {facts['versions']['vllm']} ({facts['device']}, "
        f"{facts['num_threads']} threads) with {first.model.name}, in {len(runs)} runs: "
        f"{', '.join(scenario.name for scenario, _ in scenarios)}. Steps left out are predicted within "
        f"{fmean(map(abs, fit.errors)):.1%} on average; single fractions are not identified"
    )
    command = f"perfmodel calibrate --on {target.partition(':')[0]} {' '.join(s.name for s, _ in scenarios)}"
    return fit.calibration.model_copy(update={"source": source, "date": date.today(), "command": command})


def _on_one_engine(python: str, runs: Sequence[OnEngine], progress: Progress | None) -> list[RunResult]:
    first = runs[0].scenario
    with TemporaryDirectory(prefix="perfmodel-vllm-") as folder:
        name, has_weights = vllm_arguments.write_model(runs[0].model, Path(folder))
        job = _job([run.scenario for run in runs], vllm_arguments.engine_arguments(first, name, has_weights))
        file = Path(folder, "job.json")
        file.write_text(json.dumps(job), encoding="utf-8", newline="\n")
        environment = vllm_arguments.environment_of(first, is_local=Path(name).exists()) | os.environ
        with _engine(python, file, environment) as lines:
            facts: dict[str, Any] = next(lines)[1]
            results = [collected(run.scenario, lines, facts, progress, run.out) for run in runs]
    weights = "the weights of the checkpoint" if has_weights else "dummy weights"
    shown = {key: environment[key] for key in vllm_arguments.environment_of(first, is_local=True) if key in environment}
    return [described(result, weights, job["arguments"], shown) for result in results]


def interpreter_of(target: str) -> str:
    """The interpreter that runs vLLM: our own for `vllm`, else the one named behind it. Raises MissingExtraError where
    this environment has no vLLM, SpecError for what names no interpreter."""
    engine, _, place = target.partition(":")
    if engine != "vllm":
        raise SpecError(f"--on {target}: expected vllm, vllm:PATH of an interpreter, or vllm:http://HOST:PORT.")
    if not place:
        if find_spec("vllm") is None:
            raise MissingExtraError(_absent(sys.executable))
        return sys.executable
    path = Path(place).expanduser()
    path = path / "bin" / "python" if path.is_dir() else path
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise SpecError(f"--on {target}: {path} is no interpreter; give the bin/python of an environment with vLLM.")
    return str(path.absolute())


def _absent(python: str) -> str:
    return (
        f"vLLM is not installed for {python}; install it there, name the interpreter that has it (--on "
        f"vllm:PATH/bin/python), or a server that runs (--on vllm:http://127.0.0.1:8000)."
    )


def _job(scenarios: Sequence[Scenario], arguments: dict[str, Any]) -> dict[str, Any]:
    engine = scenarios[0].engine
    longest = min(Workload(scenarios[0]).max_model_len - 8, engine.max_num_batched_tokens)
    loads = []
    for scenario in scenarios:
        workload, sampling = Workload(scenario), vllm_arguments.sampling_arguments(scenario)
        chains = list(_chains(scenario, workload))
        loads.append({"sampling": sampling, "chains": chains, "concurrency": workload.concurrency})
    return {
        "arguments": arguments,
        "version": engine.version,
        "kind": scenarios[0].hardware.kind,
        "warm_up_tokens": max(1, min(longest, 64)),
        "loads": loads,
    }


def _chains(scenario: Scenario, workload: Workload) -> Iterator[list[list[Any]]]:
    store = TokenStore(scenario.model.vocab_size, scenario.engine.kv_block_tokens, scenario.seed)
    traffic = workload.traffic
    is_sampled_loop = traffic.samples_per_prompt > 1 and workload.concurrency is not None
    if traffic.has_sessions or traffic.rollouts is not None or is_sampled_loop:
        raise SpecError(
            "--on takes single requests, and conversations whose turns follow each other; got agents' sessions, "
            "rollouts, or a closed loop of prompts with several answers: execute it without --on, or simulate it."
        )

    def line_of(request: Request, pause: int, tokens: list[int]) -> list[Any]:
        number, think = request.request_id, workload.think_time(request.request_id) // PS_PER_NS
        return [number, pause // PS_PER_NS, list(tokens), request.max_output_tokens, request.priority, think]

    if not workload.traffic.has_conversations:
        for request in workload.requests():
            if not workload.refuses(request):
                yield [line_of(request, request.arrival, store.of(request))]
                store.release(request)
        return
    for turns in workload.conversations():
        chain: list[list[Any]] = []
        num_known = 0
        for pause, request, _ in turns:
            prompt = store.of(request)
            chain.append(line_of(request, pause if chain else request.arrival, prompt[num_known:]))
            prompt += [0] * request.max_output_tokens  # the answer, which the engine will know
            num_known = len(prompt)
            store.finish(request)
            store.release(request)
        yield chain


@contextmanager
def _engine(python: str, job: Path, environment: Mapping[str, str]) -> Iterator[Iterator[list[Any]]]:
    reading, writing = os.pipe()
    with TemporaryFile(mode="w+b") as log:
        try:
            process = subprocess.Popen(
                # -P: the script's folder must not stand before vLLM's packages
                [python, "-P", vllm_process.__file__, job, str(writing)],
                env=environment,
                pass_fds=(writing,),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for us: we end it, and keep what it has told
            )
        except OSError as error:
            os.close(reading)
            raise SpecError(f"--on vllm:{python}: cannot be run ({error.strerror or error}).") from None
        finally:
            os.close(writing)
        try:
            yield _lines(reading, python, job, process, log)
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(_END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _lines(
    reading: int, python: str, job: Path, process: subprocess.Popen[bytes], log: IO[bytes]
) -> Iterator[list[Any]]:
    """What it tells, until it is done. Raises PerfmodelError where it fails before."""
    with os.fdopen(reading, encoding="utf-8") as lines:
        for text in lines:
            line: list[Any] = json.loads(text)
            if line[0] == "error":
                kind, reason = line[1], shorten(line[2], _LOG_TAIL, placeholder=" ...")
                asked = json.loads(job.read_text(encoding="utf-8"))
                sentences = {
                    "absent": _absent(python),
                    "broken": f"the vLLM of {python} cannot be imported: {reason}",
                    "version": f"got vLLM {reason}, and the scenario is of {asked['version']}; install that one, or "
                    f"--set engine.version={reason.split('+')[0]}.",
                    "device": f"this vLLM runs on {reason}, and the scenario's hardware is a {asked['kind']}; --set "
                    f"hardware=NAME.",
                    "refused": f"vLLM does not start with these arguments: {reason}",
                    "failed": f"vLLM failed in the middle of the run: {reason}",
                }
                raise (MissingExtraError if kind == "absent" else PerfmodelError)(sentences[kind])
            yield line
    status = process.wait()
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - _LOG_TAIL))
    tail = " ".join(log.read().decode(errors="replace").split()) or "it printed nothing"
    raise PerfmodelError(f"vLLM ended with status {status} before the run was over: {tail}")
