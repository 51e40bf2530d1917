"""Asks the offline replay of Dynamo, a discrete-event simulation, in its own environment.

On stdin a list: for each server arguments of `MockEngineArgs` beside `traffic`: nominal `isl` and `osl`, the least
`share` of them that is drawn, `slots`, `rounds`. On stdout a line for each: [TTFT ms, TPOT ms, the closed form's TTFT
ms, TPOT ms], or why there is none. Each is asked with the kernel tables of its device and engine, from the newest to
the oldest, until one has what the model needs; the closed form is asked with the same."""

import json
import logging
import random
import resource
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")

_MAX_MEMORY_BYTES = 8 * 2**30
_BLOCK = 512  # tokens of a hashed block of a trace


def _write_trace(path: Path, traffic: dict[str, Any]) -> None:
    """Requests of `traffic`, lengths drawn, none of which shares a prefix with another."""
    draw, block = random.Random(0), 0
    with path.open("w", encoding="utf-8") as file:
        for _ in range(traffic["slots"] * traffic["rounds"]):
            isl, osl = (draw.randint(round(traffic["share"] * traffic[name]), traffic[name]) for name in ("isl", "osl"))
            own = list(range(block, block + -(-isl // _BLOCK)))
            block += len(own)
            file.write(json.dumps({"timestamp": 0, "input_length": isl, "output_length": osl, "hash_ids": own}) + "\n")


def _closed_form(asked: dict[str, Any], traffic: dict[str, Any], version: str) -> list[float]:
    """TTFT and TPOT in ms of the same release's estimate, in mean lengths."""
    from aiconfigurator.cli.api import cli_estimate

    names = {"tp_size": "aic_tp_size", "attention_dp_size": "aic_attention_dp_size"}
    names |= {"moe_tp_size": "aic_moe_tp_size", "moe_ep_size": "aic_moe_ep_size"}
    sizes = {name: asked[key] for name, key in names.items() if key in asked}
    mean = (1 + traffic["share"]) / 2
    answer = cli_estimate(
        asked["aic_model_path"],
        asked["aic_system"],
        backend_name=asked["aic_backend"],
        backend_version=version,
        isl=round(mean * traffic["isl"]),
        osl=round(mean * traffic["osl"]),
        batch_size=traffic["slots"],
        **sizes,
    )
    return [answer.ttft, answer.tpot]


def _answer(asked: dict[str, Any]) -> list[float]:
    from aiconfigurator.sdk.perf_database import get_supported_databases
    from dynamo.llm import MockEngineArgs
    from dynamo.replay.api import run_trace_replay

    traffic = asked.pop("traffic")
    versions = get_supported_databases().get(asked["aic_system"], {}).get(asked["aic_backend"], [])
    error: BaseException = LookupError("no kernel tables")
    for version in sorted(versions, key=lambda text: [int(part) for part in text.split("rc")[0].split(".")[:3]])[::-1]:
        try:
            engine = MockEngineArgs(**asked, aic_backend_version=version)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.jsonl"
                _write_trace(path, traffic)
                report = run_trace_replay(str(path), extra_engine_args=engine, replay_concurrency=traffic["slots"])
            return [report["mean_ttft_ms"], report["mean_tpot_ms"], *_closed_form(asked, traffic, version)]
        except BaseException as failed:  # a panic of its core is no Exception
            if isinstance(failed, KeyboardInterrupt):
                raise
            error = failed
    raise error


def main() -> None:
    """Ask for each."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    output, sys.stdout = sys.stdout, sys.stderr  # it prints
    for asked in json.load(sys.stdin):
        try:
            answer: Any = _answer(asked)
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"[:200]
        print(json.dumps(answer), file=output, flush=True)


if __name__ == "__main__":
    main()
