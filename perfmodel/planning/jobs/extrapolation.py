"""A long job, extrapolated from two short ones with the first requests of the same traffic.

Start and drain take the same time for any number of requests, and the pace between them is steady. So what grows with
the work is linear in the number of requests N. Two runs, of n/2 and n requests, give the line:

    x(N) = x(n) + (N - n) (x(n) - x(n/2)) / (n/2)        x: seconds, USD, joules, tokens, preemptions

The slope is that of the steady middle, since both runs have the same start and drain. A share of the time (MFU) is
extrapolated as its product with the time, a cost per token as its product with the tokens. The drain is constant. The
slope scatters by c (n/2)^(-1/2), with c the coefficient of variation of a request's work: 1 % for c = 1.
"""

__all__ = ["extrapolate", "run_lengths"]

from math import prod

from perfmodel.planning.jobs.result import Job
from perfmodel.planning.sweeps.points import Record
from perfmodel.specs.scenario import Scenario

_FEWEST_REQUESTS = 20_000  # of the longer run
_BATCHES = 8  # full batches of every engine that the longer run lasts at least

# Metrics that grow with the work, and those that do when multiplied by others.
_FACTORS: dict[str, tuple[str, ...]] = {
    "duration": (),
    "usd_total": (),
    "preemptions": (),
    "mfu": ("duration",),
    "mbu": ("duration",),
    "output_throughput_per_gpu": ("duration",),
    "total_token_throughput_per_gpu": ("duration",),
    "usd_per_million_tokens": ("total_token_throughput_per_gpu", "duration"),
    "usd_per_million_output_tokens": ("output_throughput_per_gpu", "duration"),
    "joules_per_output_token": ("output_throughput_per_gpu", "duration"),
}
_DRAIN = "tail_share"


def run_lengths(job: Job, scenario: Scenario) -> tuple[int, ...]:
    """Requests of the runs that a job takes: all of them, or of a long job n/2 and n.

    scenario: of this traffic; a trace and conversations are simulated as a whole, since they have no steady middle
    """
    traffic, whole = scenario.traffic, scenario.traffic.num_requests or 0
    slots = job.candidate.max_num_seqs * job.candidate.num_engines * job.replicas
    count = max(_FEWEST_REQUESTS, _BATCHES * slots)
    if whole <= 2 * count or traffic.trace is not None or traffic.has_conversations:
        return (whole,)
    return count // 2, count


def extrapolate(short: Record, long: Record, lengths: tuple[int, int], num_requests: int) -> Record:
    """The record of a job of `num_requests`, from `short` and `long`, those of its first `lengths` requests."""
    if short.problem or long.problem:
        return short if short.problem else long
    further = (num_requests - lengths[1]) / (lengths[1] - lengths[0])
    values = dict(long.values)
    for name, factors in _FACTORS.items():
        one, other = (_product(record, (name, *factors)) for record in (short, long))
        if one is None or other is None:
            continue
        value = other + further * max(other - one, 0.0)
        for factor in factors:
            value /= values[factor] or 1.0
        values[name] = value
    if long.values.get(_DRAIN) is not None:
        values[_DRAIN] = (_product(long, (_DRAIN, "duration")) or 0.0) / (values["duration"] or 1.0)
    return Record(values, "", long.clock, long.origin, long.notes)


def _product(record: Record, names: tuple[str, ...]) -> float | None:
    """None where the record lacks one of `names`."""
    values = [value for name in names if (value := record.values.get(name)) is not None]
    return prod(values) if len(values) == len(names) else None
