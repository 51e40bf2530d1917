"""The plan of an offline job as a document: what does it in time at the lowest cost, or first."""

__all__ = ["job_json", "job_view", "preliminary_job_sentence"]

from typing import Any

from perfmodel.planning.deployments.result import SURE
from perfmodel.planning.jobs.result import Job, JobPlan, PreliminaryJob, batch_command
from perfmodel.planning.metrics import metric_of
from perfmodel.report.document import Block, Commands, Document, Notes, Sentences, Table
from perfmodel.report.numbers import format_duration, format_metric, format_optional
from perfmodel.report.views.plan.sentences import bound_sentence, in_100
from perfmodel.report.views.scenario import trust_blocks


def job_view(plan: JobPlan, command: str = "") -> Document:
    """The answer, the finalists, the command, what was searched, notes."""
    blocks: list[Block] = [Sentences(_sentences(plan)), _table(plan), *trust_blocks(plan.trust)]
    if plan.winner is not None:
        blocks.append(Commands("To start it", batch_command(plan, plan.winner)))
    searched = [f"{plan.num_candidates:,} candidates", f"{plan.num_in_time:,} in time in closed form"]
    searched += [f"{count:,} {reason}" for reason, count in plan.ruled_out.items()]
    blocks += [Sentences(searched, "What was searched"), Notes(plan.notes)]
    return Document(f"Plan: {plan.scenario.name}", blocks, _question(plan), "plan", command)


def job_json(plan: JobPlan) -> dict[str, Any]:
    """Everything, for `--json`."""
    return {**plan.to_json(), "answer": _sentences(plan)}


def preliminary_job_sentence(preliminary: PreliminaryJob) -> str:
    """How many candidates are being simulated, and the best one in closed form."""
    if not preliminary.finalists:
        limit = f"{preliminary.spec.max_gpus} GPUs"
        return f"In closed form nothing within {limit} does {preliminary.num_requests:,} requests."
    best = preliminary.finalists[0]
    label = f"{best.replicas} x {best.candidate.layout.label} in {format_duration(best.seconds)}"
    count = f"{len(preliminary.finalists)} of {preliminary.num_candidates:,} candidates"
    return f"Simulating {count}; the best in closed form is {label}."


def _sentences(plan: JobPlan) -> list[str]:
    """The answer in sentences."""
    spec, winner = plan.spec, plan.winner
    job = f"{plan.num_requests:,} requests"
    if winner is None:
        when = f" within {format_duration(spec.deadline_s)}" if spec.deadline_s is not None else ""
        nearest = min(plan.late, key=lambda each: each.seconds, default=None)
        answer = f"Nothing within {spec.max_gpus} GPUs does {job}{when}."
        return [answer + (f" First would be {nearest.label}, {_done(nearest)}." if nearest is not None else "")]
    lines = [f"Take {winner.label}: {_devices(winner)}; {job} are {_done(winner)}{_bill(winner)}."]
    if spec.deadline_s is not None:
        lines += _deadline(plan, winner)
    lines.append(f"It comes to {_rates(winner)}.")
    tail = winner.mean("tail_share")
    if tail is not None:
        lines.append(f"Drain time is {tail:.0%} of it: no request waits any more, and batch slots stay empty.")
    return [*lines, *bound_sentence(plan.bound_share), *_comparison(plan, winner)]


def _deadline(plan: JobPlan, winner: Job) -> list[str]:
    """How sure it is to be in time, and what that costs."""
    deadline, share, wanted = plan.spec.deadline_s or 0.0, plan.in_time(winner), plan.spec.confidence
    line = (
        f"The deadline of {format_duration(deadline)} leaves {deadline / winner.seconds - 1:.0%} to spare; it is met "
        f"in {in_100(share)} of what the calibrations leave unexplained"
    )
    if share < wanted:
        count = plan.replicas_for_sure(winner, wanted)
        return [
            f"{line}, which is short of the {wanted:.0%} that were asked for (plan.confidence): no finalist does "
            f"better within what is allowed. {count} replicas, in proportion, would."
        ]
    lines = [f"{line}; {wanted:.0%} were asked for (plan.confidence)."]
    plain = plan.plain
    if plain is not None and plain.label != winner.label:
        lines.append(
            f"Were predictions exact, {plain.label} would do{_bill(plain)}; it is in time in "
            f"{in_100(plan.in_time(plain))}."
        )
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


def _devices(job: Job) -> str:
    count = "1 GPU" if job.num_devices == 1 else f"{job.num_devices} GPUs"
    return count if job.candidate.usd_per_hour is None else f"{count}, {job.price:.2f} USD per hour"


def _done(job: Job) -> str:
    low, high = job.seconds_interval
    return f"done in {format_duration(job.seconds)} (80 % interval {format_duration(low)} to {format_duration(high)})"


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


def _table(plan: JobPlan) -> Table:
    """The finalists, best first, late ones at the end."""

    def row(job: Job) -> tuple[str, ...]:
        low, high = job.seconds_interval
        better = "-" if plan.winner is None or job is plan.winner else f"{plan.better_share(plan.winner, job):.0%}"
        return (
            job.label,
            str(job.num_devices),
            f"{format_duration(job.seconds)} [{format_duration(low)}..{format_duration(high)}]",
            "-" if job.candidate.usd_per_hour is None else f"{job.bill:.3g}",
            format_optional(job.mean("output_throughput_per_gpu"), ",.0f"),
            format_optional(job.mean("usd_per_million_output_tokens"), ".3g"),
            format_metric(metric_of("tail_share"), job.mean("tail_share")),
            f"{plan.in_time(job):.0%}",
            better,
            format_duration(job.screened_s),
            f"{job.seconds / job.screened_s:.2f}",
        )

    note = (
        f"Of the whole job, simulated under {plan.spec.seeds} seeds; in brackets 80 % intervals: what the calibration "
        "leaves unexplained (common draws) and the scatter of the seeds. Drain time: in which no request waits any "
        "more. in time: the share of draws in which the deadline is met. choice better: the share of draws, the same "
        "for both, in which the first row is better by the objective. ratio: the simulated time over that of the "
        "closed form. Long jobs are extrapolated from the steady pace of shorter ones."
    )
    shown = ("usd_total", "output_throughput_per_gpu", "usd_per_million_output_tokens", "tail_share")
    head = (
        *("deployment", metric_of("gpus").title, metric_of("duration").name),
        *(metric_of(key).title for key in shown),
        *("in time", "choice better", "closed form", "ratio"),
    )
    return Table(head, [row(job) for job in (*plan.ranked, *plan.late)], "Finalists, simulated", note=note)


def _question(plan: JobPlan) -> str:
    """What was asked, in a sentence."""
    spec = plan.spec
    best = "at the lowest cost" if spec.objective == "cheapest_job" else "first"
    when = f" within {format_duration(spec.deadline_s)}" if spec.deadline_s is not None else ""
    job = f"{plan.num_requests:,} requests to {plan.scenario.model.name}"
    return f"Which deployment completes {job}{when} {best}, on at most {spec.max_gpus} GPUs?"
