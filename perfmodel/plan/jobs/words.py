"""The plan of a job in words, as a table and as JSON."""

__all__ = ["batch_command", "job_json", "job_question", "job_table", "job_text", "job_words", "looked_at"]

import shlex
from typing import Any

from perfmodel.plan.deployments.export import engine_arguments
from perfmodel.plan.deployments.result import SURE
from perfmodel.plan.deployments.tables import PlanTable, aligned
from perfmodel.plan.jobs.result import Job, JobPlan
from perfmodel.plan.sweeps.metrics import shares_in_words


def job_words(plan: JobPlan) -> list[str]:
    """The answer in sentences."""
    spec, winner = plan.spec, plan.winner
    job = f"{plan.num_requests:,} requests"
    if winner is None:
        when = f" within {_duration(spec.deadline_s)}" if spec.deadline_s is not None else ""
        nearest = min(plan.late, key=lambda each: each.seconds, default=None)
        words = f"Nothing within {spec.max_gpus} GPUs does {job}{when}."
        return [words + (f" First would be {nearest.label}, {_done(nearest)}." if nearest is not None else "")]
    lines = [f"Take {winner.label}: {_devices(winner)}; {job} are {_done(winner)}{_bill(winner)}."]
    if spec.deadline_s is not None:
        lines += _deadline(plan, winner)
    lines.append(f"It comes to {_rates(winner)}.")
    tail = winner.mean("tail_share")
    if tail is not None:
        lines.append(f"For {tail:.0%} of the time nobody waits for an engine any more, and places stay empty.")
    if plan.bound_share:
        lines.append(f"Its devices' time goes to: {shares_in_words(plan.bound_share)}.")
    return lines + _comparison(plan, winner)


def _deadline(plan: JobPlan, winner: Job) -> list[str]:
    deadline, share = plan.spec.deadline_s or 0.0, plan.in_time(winner)
    lines = [
        f"The deadline of {_duration(deadline)} leaves {deadline / winner.seconds - 1:.0%} to spare; in "
        f"{share:.0%} of the draws of what its calibration leaves unexplained it is kept."
    ]
    if share < SURE:
        count = plan.replicas_for_sure(winner, SURE)
        lines.append(f"{count} replicas, in proportion, would keep it in {SURE:.0%} of them.")
    return lines


def _comparison(plan: JobPlan, winner: Job) -> list[str]:
    others = [job for job in plan.ranked[1:] if job.candidate.kind != winner.candidate.kind] or plan.ranked[1:]
    if not others:
        return ["No other finalist is done in time, so there is nothing to compare it with."]
    other = others[0]
    margin, share = plan.figure(other) / plan.figure(winner) - 1, plan.better_share(winner, other)
    doubt = "" if share >= SURE else f": their order is in doubt (below {SURE:.0%})"
    return [
        f"Runner-up: {other.label}, {_done(other)}{_bill(other)}; the margin is {margin:.0%}.",
        f"In {share:.0%} of the model's errors, the same for both where they share a device, the choice is "
        f"better{doubt}.",
    ]


def _duration(seconds: float) -> str:
    """`45 s`, `12.5 min`, `3.2 h`"""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _devices(job: Job) -> str:
    count = "1 GPU" if job.num_devices == 1 else f"{job.num_devices} GPUs"
    return count if job.candidate.usd_per_hour is None else f"{count}, {job.price:.2f} USD per hour"


def _done(job: Job) -> str:
    low, high = job.seconds_interval
    return f"done in {_duration(job.seconds)} (80 % interval {_duration(low)} to {_duration(high)})"


def _bill(job: Job) -> str:
    if job.candidate.usd_per_hour is None:
        return f", {job.bill:.3g} GPU hours"
    return f", for {job.bill:.3g} USD"


def _rates(job: Job) -> str:
    parts = []
    output, usd = job.mean("output_throughput_per_gpu"), job.mean("usd_per_million_output_tokens")
    every = job.mean("usd_per_million_tokens")
    if output is not None:
        parts.append(f"{output:,.0f} output tokens per second and GPU")
    if usd and every:
        parts.append(f"{usd:.3g} USD per million output tokens ({1 / every:.3g} million tokens of either kind per USD)")
    energy = job.mean("joules_per_output_token")
    if energy is not None:
        parts.append(f"{energy:.3g} J per output token")
    return ", ".join(parts)


def job_table(plan: JobPlan) -> PlanTable:
    """The finalists, best first, late ones at the end."""

    def row(job: Job) -> tuple[str, ...]:
        low, high = job.seconds_interval
        better = "-" if plan.winner is None or job is plan.winner else f"{plan.better_share(plan.winner, job):.0%}"
        return (
            job.label,
            str(job.num_devices),
            f"{_duration(job.seconds)} [{_duration(low)}..{_duration(high)}]",
            "-" if job.candidate.usd_per_hour is None else f"{job.bill:.3g}",
            _number(job.mean("output_throughput_per_gpu"), ",.0f"),
            _number(job.mean("usd_per_million_output_tokens"), ".3g"),
            _number(job.mean("tail_share"), ".1%"),
            f"{plan.in_time(job):.0%}",
            better,
            f"{job.seconds / job.screened_s:.2f}",
        )

    note = (
        f"time: of the whole job, simulated under {plan.spec.seeds} seeds; in brackets 80 % intervals: what the "
        "calibration leaves unexplained (common draws) and the scatter of the seeds. tok/s/GPU: output tokens. tail: "
        "the share of the time in which nobody waits for an engine any more. in time: the share of draws in which the "
        "deadline is kept. choice better: the share of draws, the same for both, in which the first row is better by "
        "the objective. over screen: the simulated time over that of the closed form."
    )
    head = (
        *("deployment", "GPUs", "time", "USD", "tok/s/GPU", "USD/Mtok out", "tail", "in time"),
        *("choice better", "over screen"),
    )
    return PlanTable("Finalists, simulated", head, tuple(row(job) for job in (*plan.ranked, *plan.late)), note)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def batch_command(plan: JobPlan, job: Job) -> list[str]:
    """vLLM's command for files of requests, one for each replica with its share of them."""
    scenario = plan.base.load(job.candidate.overrides(job.replicas))
    engine = scenario.pools[0].engine
    name = scenario.model.hf_id or scenario.model.name
    words = ["vllm", "run-batch", "-i", "requests.jsonl", "-o", "answers.jsonl", "--model", name]
    where = (
        f"# {job.replicas} x, each with its share of the requests, on {engine.num_devices} x {scenario.hardware.name}"
    )
    return [where, shlex.join([*words, *engine_arguments(engine)])]


def job_text(plan: JobPlan) -> str:
    """The sentences, the table and the command."""
    table = job_table(plan)
    lines = [*job_words(plan), "", table.title, *aligned(table)]
    return "\n".join([*lines, "", looked_at(plan)])


def looked_at(plan: JobPlan) -> str:
    """How many candidates there were, and how many fell out for which reason."""
    looked = f"{plan.num_candidates:,} candidates, {plan.num_in_time:,} in time in closed form"
    return "; ".join([looked, *(f"{count:,} {reason}" for reason, count in plan.ruled_out.items())])


def job_question(plan: JobPlan) -> str:
    """What was asked, in a sentence."""
    spec = plan.spec
    best = "for the least money" if spec.objective == "cheapest_job" else "first"
    when = f" within {_duration(spec.deadline_s)}" if spec.deadline_s is not None else ""
    job = f"{plan.num_requests:,} requests to {plan.scenario.model.name}"
    return f"What does {job}{when} {best}, on at most {spec.max_gpus} GPUs?"


def job_json(plan: JobPlan) -> dict[str, Any]:
    """Everything, for `--json`."""
    return {
        "scenario": plan.scenario.name,
        "objective": plan.spec.objective,
        "deadline_s": plan.spec.deadline_s,
        "num_requests": plan.num_requests,
        "candidates": plan.num_candidates,
        "in_time": plan.num_in_time,
        "ruled_out": dict(plan.ruled_out),
        "answer": job_words(plan),
        "ranked": [_row(plan, job) for job in plan.ranked],
        "late": [_row(plan, job) for job in plan.late],
        "bound_share": dict(plan.bound_share),
        "notes": list(plan.notes),
    }


def _row(plan: JobPlan, job: Job) -> dict[str, Any]:
    has_price = job.candidate.usd_per_hour is not None
    return {
        "label": job.label,
        "choices": job.candidate.choices(job.replicas),
        "replicas": job.replicas,
        "gpus": job.num_devices,
        "usd_per_hour": job.price if has_price else None,
        "duration_s": job.seconds,
        "duration_interval_s": list(job.seconds_interval),
        "screened_duration_s": job.screened_s,
        "usd_total": job.bill if has_price else None,
        "in_time_in_share_of_draws": plan.in_time(job),
        "metrics": {name: job.mean(name) for name in (job.records[0].values if job.records else ())},
        "problems": [record.problem for record in job.records if record.problem],
    }
