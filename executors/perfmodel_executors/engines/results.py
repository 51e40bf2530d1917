"""What another engine tells of a run, as our own executed runs have it: records, totals, and what it ran on."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from perfmodel.cost import plan_memory, usd_per_hour
from perfmodel.engine import Request, StepRecord
from perfmodel.errors import WorkloadError
from perfmodel.sim import Collector, DeviceTotals, RunResult, Workload, summarize
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.engine.speculation import Acceptance, MeasuredAcceptance
from perfmodel.specs.scenario import Scenario
from perfmodel_executors.clocks import PS_PER_NS
from perfmodel_executors.speculation.measured import with_acceptance

Progress = Callable[[int, int | None], None]

CHUNKS = "chunks.csv"
_CHUNK_COLUMNS = "step,num_tokens,num_computed_tokens"
# Of vLLM's configurations, what it changes of what it was asked for, where a backend does not do it.
_PARTS = ("cache_config", "scheduler_config", "model_config")
_SETTINGS = (
    *("block_size", "enable_prefix_caching", "enable_chunked_prefill", "async_scheduling"),
    *("max_num_batched_tokens", "max_num_seqs", "max_model_len"),
)


def collected(
    scenario: Scenario, lines: Iterator[list[Any]], facts: dict[str, Any], progress: Progress | None, out: Path | None
) -> RunResult:
    """The records of one load, as `lines` bring them, up to its end. facts: of the engine; progress, out: as of
    `execute_on`. Raises WorkloadError without requests, and what `lines` raise; records written so far stay."""
    turns, expected = scenario.traffic.has_conversations, Workload(scenario).num_requests
    totals: dict[str, Any] = {}
    conversations = Workload(scenario).conversations() if turns else ()
    turn_of = {
        request.request_id: (request.session, request.turn) for chain in conversations for _, request, _ in chain
    }
    with Collector(out, has_turns=turns) as collector, ExitStack() as stack:
        chunks = None
        if out is not None:
            chunks = stack.enter_context((out / CHUNKS).open("w", encoding="utf-8", newline="\n"))
            chunks.write(_CHUNK_COLUMNS + "\n")
        for kind, *values in lines:
            if kind == "step":
                record = StepRecord(*values[0])
                times = {name: getattr(record, name) * PS_PER_NS for name in ("start", "end", "first_duration")}
                collector.add_step(record._replace(**times))
                if chunks is not None:
                    chunks.writelines(f"{values[0][0]},{tokens},{computed}\n" for tokens, computed in values[1])
                for gap in values[2]:
                    collector.add_gap(gap * PS_PER_NS)
            elif kind == "request":
                request = _request(values[0])
                request.session, request.turn = turn_of.get(request.request_id, (None, -1))
                collector.add_request(request)
                if progress is not None:
                    progress(collector.num_finished, expected)
            else:
                totals = values[0]
                break
    examined, accepted, num_offered = totals.pop("acceptance")
    if num_offered:
        counts = MeasuredAcceptance(method="ngram", examined=examined, accepted=accepted, offered=num_offered)
        if out is not None:
            text = counts.model_dump_json(indent=2) + "\n"
            (out / "acceptance.json").write_text(text, encoding="utf-8", newline="\n")
        acceptance = Acceptance(per_position=counts.rates, offered=num_offered / counts.examined[0])
        scenario = with_acceptance(scenario, acceptance)
    return summarized(scenario, collector, facts, totals)


def summarized(scenario: Scenario, collector: Collector, facts: dict[str, Any], totals: dict[str, Any]) -> RunResult:
    """The result of what was collected; facts: of the engine, with `num_blocks` where it is known; totals: fields of
    `DeviceTotals`. Raises WorkloadError where there was no request."""
    if not collector.num_finished:
        raise WorkloadError(f"{scenario.name}: the traffic has no requests; raise num_requests, duration_s or the rate")
    num_blocks = facts.get("num_blocks") or 0
    peak = max(collector.used_blocks_peak.values(), default=0)
    device = DeviceTotals(
        num_devices=scenario.num_devices,
        kv_cache_usage_peak=peak / num_blocks if num_blocks and collector.num_steps else None,
        usd_per_hour=usd_per_hour(scenario.hardware, scenario.price),
        **totals,
    )
    version = facts["versions"].get("vllm")
    if version is not None:
        engine = scenario.engine.model_copy(update={"version": version.split("+")[0]})
        scenario = scenario.model_copy(update={"engine": engine})
    summary, records = summarize(scenario, collector, device), (collector.requests(), collector.steps())
    return RunResult(scenario, "executed", summary, *records, num_blocks, measured_on=facts)


def _request(fields: list[int]) -> Request:
    number, arrival, scheduled, first, finished, prompt, output, cached, preemptions = fields
    request = Request(number, arrival * PS_PER_NS, prompt, output)
    request.first_scheduled_at, request.first_token_at = scheduled * PS_PER_NS, first * PS_PER_NS
    request.finished_at = finished * PS_PER_NS
    request.num_output_tokens, request.num_cached_tokens, request.num_preemptions = output, cached, preemptions
    return request


def changed_settings(engine: EngineSpec, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine came to have otherwise than `engine` says; facts: `measured_on` of a result."""
    used = facts.get("used", {})
    result = {name: value for part in _PARTS for name, value in used.get(part, {}).items() if name in _SETTINGS}
    if facts.get("num_blocks") and engine.num_gpu_blocks_override is not None:
        result["num_gpu_blocks_override"] = facts["num_blocks"]
    asked = {name: getattr(engine, name) for name in result} | {"async_scheduling": engine.plans_ahead}
    return {name: value for name, value in result.items() if value is not None and value != asked[name]}


def described(result: RunResult, weights: str, arguments: dict[str, Any], environment: Mapping[str, str]) -> RunResult:
    facts = dict(result.measured_on or {})
    own = {name: value for name, value in arguments.items() if name != "model" or not Path(str(value)).is_absolute()}
    facts |= {"arguments": own, "environment": dict(environment)}
    notes = [
        f"Executed on vLLM {facts['versions']['vllm']} ({facts['device']}, {facts['num_threads']} threads) with "
        f"{weights}, in one process and without its HTTP server; times are of the wall's clock."
    ]
    changed = changed_settings(result.scenario.engine, facts)
    if changed:
        listed = ", ".join(f"engine.{name}={json.dumps(value)}" for name, value in changed.items())
        notes.append(f"vLLM came to have other settings than the scenario, which is given with them here: {listed}.")
        facts["changed"] = changed
        engine = result.scenario.engine.model_copy(update=changed)
        result = replace(result, scenario=result.scenario.model_copy(update={"engine": engine}))
    expected = plan_memory(result.scenario.model, result.scenario.hardware, result.scenario.engine).num_kv_blocks
    if result.num_blocks != expected:
        notes.append(
            f"vLLM has {result.num_blocks:,} KV blocks and the memory plan of the scenario {expected:,}; "
            f"engine.num_gpu_blocks_override makes them alike."
        )
    return replace(result, notes=(*result.notes, *notes), measured_on=facts)
