"""A plan as JSON: all that its words and tables say, and what each finalist's simulations gave."""

__all__ = ["plan_json"]

from typing import Any

from perfmodel.plan.deployments.finalist import Finalist
from perfmodel.plan.deployments.result import PlanResult
from perfmodel.plan.deployments.words import plan_words

_AT_THE_RATE = (
    "usd_per_million_input_tokens_split",
    "usd_per_million_output_tokens_split",
    "usd_per_million_output_tokens",
    "joules_per_output_token",
)


def plan_json(result: PlanResult) -> dict[str, Any]:
    """See the module."""
    winner = result.winner
    return {
        "scenario": result.scenario.name,
        "objective": result.spec.objective,
        "attainment": result.spec.attainment,
        "rate": result.rate,
        "candidates": result.num_candidates,
        "serving": result.num_serving,
        "ruled_out": dict(result.ruled_out),
        "answer": plan_words(result),
        "winner": _row(result, winner) if winner is not None else None,
        "ranked": [_row(result, each) for each in result.ranked],
        "missed": [_row(result, each) for each in result.missed],
        "fewer_replicas": dict(result.fewer),
        "front": [vars(point) for point in result.front],
        "screened_on_the_front_but_not_serving": [vars(point) for point in result.not_serving],
        "bound_share": dict(result.bound_share),
        "notes": list(result.notes),
    }


def _row(result: PlanResult, finalist: Finalist) -> dict[str, Any]:
    screened, quantile, winner = finalist.deployment.screened, result.quantile, result.winner
    better = None if winner is None or finalist is winner else result.better_share(winner, finalist)
    names = ("ttft", "tpot")
    return {
        "label": finalist.label,
        "choices": screened.candidate.choices(finalist.replicas),
        "replicas": finalist.replicas,
        "gpus": finalist.num_devices,
        "usd_per_hour": finalist.usd_per_hour,
        **{metric: finalist.mean(metric) for metric in _AT_THE_RATE},
        "max_rate": finalist.rate,
        "max_rate_interval": list(finalist.rate_interval),
        "max_rate_by_seed": list(finalist.rates),
        "screened_rate": finalist.replicas * screened.rate,
        "rate_per_gpu": finalist.rate_per_device,
        "figure": result.figure(finalist),
        "interval": list(result.interval(finalist)),
        "serves_the_rate_in_share_of_draws": result.sufficient(finalist),
        "winner_better_in_share_of_draws": better,
        "attained": finalist.attained,
        "latencies_ms": {f"{quantile}_{name}": finalist.mean(f"{quantile}_{name}_ms") for name in names},
        "latency_intervals_ms": {f"{quantile}_{name}": finalist.latency_interval(quantile, name) for name in names},
        "binds": screened.binds,
        "origin": screened.origin,
    }
