"""The choice of a job's plan as something to start: vLLM's command for files of requests."""

__all__ = ["batch_command"]

import shlex

from perfmodel.planning.deployments.export import engine_arguments
from perfmodel.planning.jobs.result import Job, JobPlan


def batch_command(plan: JobPlan, job: Job) -> list[str]:
    """The command of each replica, which takes its share of the requests."""
    scenario = plan.base.load(job.candidate.overrides(job.replicas))
    engine = scenario.pools[0].engine
    name = scenario.model.hf_id or scenario.model.name
    arguments = ["vllm", "run-batch", "-i", "requests.jsonl", "-o", "answers.jsonl", "--model", name]
    where = (
        f"# {job.replicas} x, each with its share of the requests, on {engine.num_devices} x {scenario.hardware.name}"
    )
    return [where, shlex.join([*arguments, *engine_arguments(engine)])]
