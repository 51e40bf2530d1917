"""`perfmodel explain SCENARIO`: where the time of a step, or of a run, goes."""

__all__ = ["Batch", "Context", "Prefill", "explain"]

from typing import Annotated

import typer

from perfmodel.answers.asked import STEP_FLAGS, Asked
from perfmodel.answers.short_forms import STEP_FORMS
from perfmodel.cli.flags import takes_flags, takes_short_forms
from perfmodel.cli.options import Details, JsonFlag, Overrides, Seed, count
from perfmodel.cli.terminal import give, progress_bar
from perfmodel.errors import SpecError

Batch = Annotated[
    int | None,
    typer.Option("--batch", parser=count, metavar="N", help="Decode this many sequences.", show_default=False),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        parser=count,
        metavar="N",
        help="Tokens in each sequence's KV cache; 8k is 8,000, 8K is 8,192.",
        show_default=False,
    ),
]
Prefill = Annotated[
    int | None,
    typer.Option(
        "--prefill", parser=count, metavar="N", help="Prefill a prompt of this many tokens.", show_default=False
    ),
]
WholeRun = Annotated[bool, typer.Option("--run", help="Simulate, and show what the whole run's time went to.")]
Occupancy = Annotated[
    bool,
    typer.Option("--occupancy", help="Compile the executor's kernels for this GPU; show what they take of it."),
]


@takes_flags(*STEP_FLAGS)
@takes_short_forms(*STEP_FORMS)
def explain(
    asked: Asked,
    overrides: Overrides = None,
    batch: Batch = None,
    context: Context = None,
    prefill: Prefill = None,
    whole_run: WholeRun = False,
    occupancy: Occupancy = False,
    as_json: JsonFlag = False,
    seed: Seed = None,
    has_details: Details = False,
) -> None:
    """Show one step operator by operator: FLOPs, bytes, intensity, time, bound.

    Without a batch, a context or a prefill it is the scenario's typical decode step: the batch to expect at the
    arrival rate (Little's law; `simulate` has a run's mean batch), each sequence with its prompt and half of its
    answer.
    `--occupancy` compiles the step's Triton kernels ahead of time, no GPU needed: registers, SRAM, spills, thread
    blocks, waves.
    """
    if occupancy and whole_run:
        raise SpecError("--occupancy explains the kernels of one step; leave --run out.")
    if prefill is not None and (batch is not None or context is not None):
        raise SpecError("--prefill does not go with --batch and --context: one step prefills or decodes here.")
    if whole_run and (prefill or batch or context):
        raise SpecError("--run explains the whole run; leave --batch, --context and --prefill out.")
    from perfmodel.answers.step import answer_occupancy, answer_run_steps, answer_step

    if whole_run:
        with progress_bar("simulating") as progress:
            answer = answer_run_steps(asked, overrides, seed, progress)
    else:
        answer = answer_step(asked, overrides, batch, context, prefill, seed)
    if occupancy:
        with progress_bar("compiling") as progress:
            answer = answer_occupancy(answer.result, progress)
    give(answer, as_json, has_details=has_details)
