"""`perfmodel serve SCENARIO`: a server with the latencies of the deployment that the scenario describes."""

__all__ = ["serve"]

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfmodel.answers.asked import MEMORY_FLAGS, Asked
from perfmodel.answers.short_forms import PARALLELISM
from perfmodel.cli.flags import takes_flags, takes_short_forms
from perfmodel.cli.options import Overrides, Seed
from perfmodel.cli.terminal import say
from perfmodel.errors import MissingExtraError, SpecError

if TYPE_CHECKING:
    from perfmodel.serve.emulator_server import EmulatorServer, Ended, MetricNames

_KEY = "PERFMODEL_API_KEY"


@takes_flags(*MEMORY_FLAGS)
@takes_short_forms(*PARALLELISM)
def serve(
    asked: Asked,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0 is any free one.")] = 8000,
    ports: Annotated[
        bool, typer.Option("--ports", help="Each replica on a port of its own, from --port on, for a router in front.")
    ] = False,
    speed: Annotated[float, typer.Option("--speed", help="Simulated seconds per second.")] = 1.0,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            "--served-model-name", metavar="NAME", help="Names of the model; else its own.", show_default=False
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            metavar="FILE",
            help="A tokenizer.json to count prompts by; else four bytes are a token.",
            show_default=False,
        ),
    ] = None,
    answers: Annotated[
        str,
        typer.Option(
            "--answers", metavar="LENGTH", help="requested: as long as max_tokens says; drawn: as the traffic's."
        ),
    ] = "requested",
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", metavar="KEY", help=f"What clients have to send; or {_KEY}.", show_default=False),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            metavar="NAME",
            help="A name that clients call this machine by; * for any.",
            show_default=False,
        ),
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option("--lora", metavar="NAME", help="An adapter to list as a model.", show_default=False),
    ] = None,
    metrics_names: Annotated[
        str | None,
        typer.Option(
            "--metrics-names",
            metavar="NAMES",
            help="vllm, sglang, or legacy: vLLM's with those it has given up; else the engine's own.",
            show_default=False,
        ),
    ] = None,
    kv_events: Annotated[
        str | None,
        typer.Option(
            "--kv-events",
            metavar="ENDPOINT",
            help="Publish KV events with ZeroMQ: at tcp://*:5557, @tcp://127.0.0.1:5557 or a host; a port an engine.",
            show_default=False,
        ),
    ] = None,
    kv_replay: Annotated[
        str | None,
        typer.Option(
            "--kv-replay", metavar="ENDPOINT", help="Where they can be asked for once more.", show_default=False
        ),
    ] = None,
    kv_topic: Annotated[
        str, typer.Option("--kv-topic", metavar="TOPIC", help="Of KV events; {replica} becomes the number.")
    ] = "kv-events",
    kv_arrays: Annotated[
        bool, typer.Option("--kv-arrays", help="KV events as arrays, as before vLLM 0.24, for routers of that time.")
    ] = False,
    cold_start: Annotated[
        bool, typer.Option("--cold-start", help="Answer 503 for as long as weights would load.")
    ] = False,
    fail: Annotated[
        str | None,
        typer.Option(
            "--fail", metavar="FAULTS", help="Faults to inject: rate=0.01,kinds=429+500+broken.", show_default=False
        ),
    ] = None,
    drain: Annotated[
        float, typer.Option("--drain", metavar="S", help="Seconds for answers under way at the end.")
    ] = 30,
    overrides: Overrides = None,
    seed: Seed = None,
) -> None:
    """Serve OpenAI's API with the latencies that a scenario's hardware, model and engine would have, until ctrl-C."""
    if not 0 < speed < float("inf"):
        raise SpecError(f"--speed {speed:g}: allowed more than 0 simulated seconds per second.")
    loaded = asked.load(overrides, seed)
    try:
        from perfmodel.serve.emulator_server import EmulatorServer, Telemetry
        from perfmodel.serve.settings import InjectedFaults, ServerSettings
    except ImportError as error:
        raise MissingExtraError(
            f"perfmodel serve needs {error.name}, which is not installed: pip install '.[serve]' in the checkout."
        ) from None
    settings = ServerSettings(
        host=host,
        port=port,
        allowed_hosts=tuple(allowed_host or ()),
        api_key=api_key or os.environ.get(_KEY) or None,
        served_names=tuple(served_model_name or ()),
        lora_names=tuple(lora or ()),
        tokenizer_file=tokenizer,
        seed=loaded.seed,
        answer_length=answers,  # type: ignore[arg-type]  # checked there
        faults=InjectedFaults.parsed(fail) if fail else InjectedFaults(),
        drain_s=drain,
    )
    names, legacy = _metric_names(metrics_names), metrics_names == "legacy"
    telemetry = Telemetry(names, legacy, kv_events, kv_replay, kv_topic, kv_arrays)
    from perfmodel.trust import trust_of

    server = EmulatorServer(loaded, settings, telemetry, speed, ports, cold_start)
    _run(server, asked.assumed(loaded, overrides), [*_speed_notes(speed), f"Trust: {trust_of(loaded)}"])


def _metric_names(asked: str | None) -> "MetricNames | None":
    known: dict[str | None, MetricNames | None]
    known = {None: None, "vllm": "vllm", "sglang": "sglang", "legacy": "vllm"}
    if asked not in known:
        raise SpecError(f"--metrics-names {asked}: allowed vllm, sglang or legacy.")
    return known[asked]


def _run(server: "EmulatorServer", notes: Sequence[str], after_addresses: Sequence[str]) -> None:
    import asyncio
    import logging

    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    for note in notes:
        say(note)

    def on_ready(ports: list[int]) -> None:
        host = server.settings.host
        for port in ports:
            say(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}")
        for note in after_addresses:
            say(note)

    say(_closing(asyncio.run(server.run(on_ready)), server.emulator.clock.speed))


def _speed_notes(speed: float) -> list[str]:
    """What a load tool's file of such a server needs, to be read as the deployment's."""
    if speed == 1:
        return []
    return [
        f"Clients measure {1 / speed:.4g} times the deployment's latencies. To compare what a load tool has written: "
        f"perfmodel validate bench FILE --speed {speed:g}"
    ]


def _closing(ended: "Ended", speed: float) -> str:
    counts = [f"{count} {name.replace('_', ' ')}" for name, count in ended._asdict().items() if name != "slowed_s"]
    slowed = f"; the clock was slowed by {ended.slowed_s:.3g} s" if ended.slowed_s else ""
    paced = "" if speed == 1 else f"; {speed:g} simulated seconds per second"
    return f"Requests: {', '.join(counts)}{paced}{slowed}."
