"""`perfmodel serve SCENARIO`: a server with the latencies of the deployment that the scenario describes; `perfmodel
web`: the planner in a browser, on this machine."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perfmodel.commands import request as req
from perfmodel.commands.request import QUIET, Answer, CommandRequest, Console, ScenarioRequest, flag
from perfmodel.errors import MissingExtraError, SpecError

if TYPE_CHECKING:
    from perfmodel.serve.emulator_server import EmulatorServer, MetricNames

_KEY = "PERFMODEL_API_KEY"
_METRICS: "Mapping[str | None, MetricNames | None]"  # a flag's value -> which server's names
_METRICS = {None: None, "vllm": "vllm", "sglang": "sglang", "legacy": "vllm"}


@dataclass(frozen=True)
class ServeRequest(ScenarioRequest):
    """Serve OpenAI's API with the latencies that a scenario's hardware, model and engine would have, until ctrl-C."""

    command = "serve"
    examples = (
        "serve llama-3.1-8b-a100 --port 8000",
        "serve llama-3.1-8b-a100 --set cluster.replicas=2 --ports --speed 10",
    )
    has_json = False
    scenario_flags = req.MEMORY_FLAGS
    short_forms = req.PARALLELISM

    host: str = flag("--host", "Address to listen on.", "127.0.0.1", "ADDRESS", shows_default=True)
    port: int = flag("--port", "Port to listen on; 0 is any free one.", 8000, shows_default=True)
    ports: bool = flag("--ports", "Each replica on a port of its own, from --port on, for a router in front.", False)
    speed: float = flag("--speed", "Simulated seconds per second.", 1.0, shows_default=True)
    served_model_name: tuple[str, ...] = flag("--served-model-name", "Names of the model; else its own.", (), "NAME")
    tokenizer: Path | None = flag(
        "--tokenizer", "A tokenizer.json to count prompts by; else four bytes are a token.", metavar="FILE"
    )
    answers: str = flag(
        *("--answers", "requested: as long as max_tokens says; drawn: as the traffic's.", "requested", "LENGTH"),
        shows_default=True,
    )
    api_key: str | None = flag("--api-key", f"What clients have to send; or {_KEY}.", metavar="KEY")
    allowed_host: tuple[str, ...] = flag(
        "--allowed-host", "A name that clients call this machine by; * for any.", (), "NAME"
    )
    lora: tuple[str, ...] = flag("--lora", "An adapter to list as a model.", (), "NAME")
    metrics_names: str | None = flag(
        *("--metrics-names", "vllm, sglang, or legacy: vLLM's with those it has given up; else the engine's own."),
        metavar="NAMES",
    )
    kv_events: str | None = flag(
        "--kv-events",
        "Publish KV events with ZeroMQ: at tcp://*:5557, @tcp://127.0.0.1:5557 or a host; a port an engine.",
        metavar="ENDPOINT",
    )
    kv_replay: str | None = flag("--kv-replay", "Where they can be asked for once more.", metavar="ENDPOINT")
    kv_topic: str = flag(
        *("--kv-topic", "Of KV events; {replica} becomes the number.", "kv-events", "TOPIC"), shows_default=True
    )
    kv_arrays: bool = flag("--kv-arrays", "KV events as arrays, as before vLLM 0.24, for routers of that time.", False)
    cold_start: bool = flag("--cold-start", "Answer 503 for as long as weights would load.", False)
    fail: str | None = flag("--fail", "Faults to inject: rate=0.01,kinds=429+500+broken.", metavar="FAULTS")
    drain: float = flag("--drain", "Seconds for answers under way at the end.", 30, "S", shows_default=True)
    seed: int | None = flag("--seed", req.SEED_HELP)

    def answer(self, console: Console = QUIET) -> None:
        """Serve until interrupted."""
        if not 0 < self.speed < float("inf"):
            raise SpecError(f"--speed {self.speed:g}: expected more than 0 simulated seconds per second.")
        scenario = self.load(self.seed)
        try:
            from perfmodel.serve.emulator_server import EmulatorServer, Telemetry
            from perfmodel.serve.settings import InjectedFaults, ServerSettings
        except ImportError as error:
            raise MissingExtraError(
                f"perfmodel serve needs {error.name}, which is not installed: pip install '.[serve]' in the checkout."
            ) from None
        settings = ServerSettings(
            host=self.host,
            port=self.port,
            allowed_hosts=self.allowed_host,
            api_key=self.api_key or os.environ.get(_KEY) or None,
            served_names=self.served_model_name,
            lora_names=self.lora,
            tokenizer_file=self.tokenizer,
            seed=scenario.seed,
            answer_length=self.answers,  # type: ignore[arg-type]  # checked there
            faults=InjectedFaults.parsed(self.fail) if self.fail else InjectedFaults(),
            drain_s=self.drain,
        )
        if self.metrics_names not in _METRICS:
            raise SpecError(f"--metrics-names {self.metrics_names}: expected vllm, sglang or legacy.")
        names = _METRICS[self.metrics_names], self.metrics_names == "legacy"
        telemetry = Telemetry(*names, self.kv_events, self.kv_replay, self.kv_topic, self.kv_arrays)
        from perfmodel.trust import trust_of

        server = EmulatorServer(scenario, settings, telemetry, self.speed, self.ports, self.cold_start)
        notes = [f"Trust: {trust_of(scenario)}"]
        if self.speed != 1:  # what a load tool's file of such a server needs, to be read as the deployment's
            notes.insert(
                0,
                f"Clients measure {1 / self.speed:.4g} times the deployment's latencies. To compare what a load tool "
                f"has written: perfmodel validate bench FILE --speed {self.speed:g}",
            )
        _serve(server, self.assumed(scenario), notes, console)


def _serve(server: "EmulatorServer", notes: Sequence[str], after_addresses: Sequence[str], console: Console) -> None:
    """Serve. notes: said before the addresses; after_addresses: below them; server, console: what serves, and says"""
    import asyncio
    import logging

    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    for note in notes:
        console.say(note)

    def on_ready(ports: list[int]) -> None:
        host = server.settings.host
        for port in ports:
            console.say(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}")
        for note in after_addresses:
            console.say(note)

    ended, speed = asyncio.run(server.run(on_ready)), server.emulator.clock.speed
    counts = [f"{number} {name.replace('_', ' ')}" for name, number in ended._asdict().items() if name != "slowed_s"]
    slowed = f"; the clock was slowed by {ended.slowed_s:.3g} s" if ended.slowed_s else ""
    paced = "" if speed == 1 else f"; {speed:g} simulated seconds per second"
    console.say(f"Requests: {', '.join(counts)}{paced}{slowed}.")


@dataclass(frozen=True)
class WebRequest(CommandRequest):
    """Open a page on which deployments are changed by hand and looked at: memory, steps, traffic, plans; until ctrl-C.

    Everything runs on this machine, offline; every view says the command that gives the same figures."""

    command = "web"
    examples = ("web", "web --port 8080 --no-open", "web --export out --view 'pareto?model=llama-3.1-8b&hardware=h100'")
    has_json = False

    host: str = flag("--host", "Where to listen; this machine alone.", "127.0.0.1", "HOST", shows_default=True)
    port: int = flag("--port", "0 takes a free one.", 0, "PORT", low=0, high=65535, shows_default=True)
    is_opened: bool = flag("--open", "Open the page in a browser.", True, shows_default=True)
    export: Path | None = flag("--export", "Write --view to DIR as a page that any web server can host.", metavar="DIR")
    view: str = flag("--view", "What is exported: the end of a page's address.", "pareto", "VIEW", shows_default=True)

    def answer(self, console: Console = QUIET) -> None:
        """Serve until interrupted, or write a view."""
        try:
            from perfmodel.web.app import serve_page
            from perfmodel.web.pages import export_page
        except ImportError as error:
            raise MissingExtraError(
                f"perfmodel web needs {error.name}, which is not installed: pip install '.[web]' in the checkout."
            ) from None

        if self.export is not None:
            export_page(self.view, self.export, console)
            console.say(f"Written to {self.export / 'index.html'}")
            return

        def on_ready(address: str) -> None:
            console.say(f"listening on {address}")
            if self.is_opened:
                import webbrowser

                webbrowser.open(address)

        serve_page(self.host, self.port, on_ready)


@dataclass(frozen=True)
class WatchRequest(ScenarioRequest):
    """Compare a running vLLM server with its prediction at the load that it sees, a line a minute: where it leaves the
    80 % interval, and which term explains it (lengths, cache hits, accepted drafts, batch limit, step time)."""

    command = "watch"
    examples = ("watch llama-3.1-8b-a100 --url http://127.0.0.1:8000/metrics --minutes 10 --fail-on drift",)
    has_json = False
    scenario_flags = req.MEMORY_FLAGS
    short_forms = req.PARALLELISM

    url: str = flag(
        "--url", "Where the server has its metrics.", "http://127.0.0.1:8000/metrics", "URL", shows_default=True
    )
    every: float = flag("--every", "Seconds between two readings.", 60.0, "SECONDS", low=1, shows_default=True)
    minutes: float | None = flag("--minutes", "End after these; else ctrl-C does.", None, "N", low=0)
    longest: float = flag("--longest", "Seconds for which drift may last.", 300.0, "SECONDS", low=0, shows_default=True)
    fail_on: str | None = flag("--fail-on", "drift: end with status 1 where it has lasted longer.", metavar="WHAT")
    port: int | None = flag(
        "--port", "Serve observed and predicted means as metrics, on this machine.", low=0, high=65535
    )

    def answer(self, console: Console = QUIET) -> Answer:
        """Raises SpecError for a scenario without a load, and a server that does not answer."""
        from perfmodel.evidence.drift import DriftGuard
        from perfmodel.serve.watch import Watch, serve_metrics

        if self.fail_on not in (None, "drift"):
            raise SpecError(f"--fail-on: got {self.fail_on!r}; expected drift.")
        watch = Watch(self.url, DriftGuard(self.load()), self.every, self.longest)
        server = None if self.port is None else serve_metrics(watch, "127.0.0.1", self.port)
        if server is not None:
            console.say(f"metrics on http://127.0.0.1:{server.server_port}")
        try:
            has_drifted = watch.run(console.say, None if self.minutes is None else 60 * self.minutes)
        finally:
            if server is not None:
                server.shutdown()
        text = f"{'A' if has_drifted else 'No'} drift lasted longer than {self.longest:g} s.\n"
        return Answer(text=text, exit_status=int(has_drifted and self.fail_on == "drift"))
