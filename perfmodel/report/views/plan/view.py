"""A plan as a document: what to deploy, who comes next and how sure that is, what it costs, how to start it."""

__all__ = ["plan_json", "plan_view"]

from typing import Any

from perfmodel.planning.deployments.export import serve_commands
from perfmodel.planning.deployments.result import PlanResult
from perfmodel.report.document import Block, Commands, Document, Notes, Sentences
from perfmodel.report.views.plan.pictures import plan_pictures
from perfmodel.report.views.plan.sentences import OBJECTIVES, plan_sentences
from perfmodel.report.views.plan.tables import plan_tables


def plan_view(result: PlanResult, command: str = "") -> Document:
    """The answer, pictures, tables, commands, what was searched, notes."""
    blocks: list[Block] = [Sentences(plan_sentences(result)), *plan_pictures(result), *plan_tables(result)]
    if result.winner is not None:
        blocks.append(Commands("To start it", serve_commands(result, result.winner)))
    searched = [f"{result.num_candidates:,} candidates", f"{result.num_serving:,} serve the rate"]
    searched += [f"{count:,} {reason}" for reason, count in result.ruled_out.items()]
    blocks += [Sentences(searched, "What was searched"), Notes([*_left_out(result), *result.notes])]
    return Document(f"Plan: {result.scenario.name}", blocks, _question(result), "plan", command)


def _left_out(result: PlanResult) -> list[str]:
    return [f"Not carried into the plan: {each}." for each in result.left_out]


def plan_json(result: PlanResult) -> dict[str, Any]:
    """All that the sentences and the tables say, and what each finalist's simulations gave."""
    return {**result.to_json(), "answer": plan_sentences(result)}


def _question(result: PlanResult) -> str:
    given = " and ".join(result.scenario.slo.limits_in_words)
    return (
        f"What serves {result.scenario.model.name} at {result.rate:g} requests/s, {result.spec.attainment:.0%} of them "
        f"with {given}, best by {OBJECTIVES[result.spec.objective]}, on at most {result.spec.max_gpus} GPUs?"
    )
