"""`DraftTables`: what drafting and verifying cost, worked out once for all timers of a scenario.

The passes of a drafter run on the same devices as the model, one behind the other without waiting for the host, which
launches them ahead: a pass takes the longer of its operators and its launches.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from perfmodel.cost.calibrations.calibration import EAGER_LAUNCH_S, Calibration, HostFit
from perfmodel.cost.operator_timer import OperatorTimer
from perfmodel.cost.steps.tables import StepTables
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.graphs.drafting import Drafter, drafter_of, skipping_parts
from perfmodel.ops.graphs.step import StepGraph, build_graph
from perfmodel.ops.routing import Routing, slowest_uniform_routing
from perfmodel.ops.work import BatchShape, windowed_contexts
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.engine.speculation import SpeculativeConfig
from perfmodel.specs.hardware import HardwareSpec

# Launches between two passes that no CUDA graph holds: the chosen token, positions, cache slots, lengths [assumed].
_LAUNCHES_BETWEEN = 8
# Looking up n-grams on the host, compiled: a scan of each sequence's tokens, and its bookkeeping [assumed].
_LOOKUP_PER_TOKEN_S = 1e-9
_LOOKUP_S = 2e-6


@dataclass(frozen=True)
class DraftTables:
    """Beside the tables of the model's own steps.

    drafter, passes: who drafts, and what a pass costs; None where no device drafts
    first, rest:     the two parts of LayerSkip's verification; None where all layers see all tokens
    method:          how the model samples
    """

    config: SpeculativeConfig
    method: str
    drafter: Drafter | None
    passes: StepTables | None
    first: StepTables | None
    rest: StepTables | None

    @property
    def has_distribution(self) -> bool:
        return self.drafter is not None and self.drafter.has_distribution

    def with_drafts(self, shape: BatchShape, depth: int) -> BatchShape:
        """The step of `shape` in which each decode drafts `depth` deep, and as many tokens are verified."""
        if not depth:
            return shape
        drafted = shape.num_decodes * self.config.nodes_by_depth[depth]
        # Pipelined, the drafter guesses the model's own token, too.
        return shape._replace(
            group_tokens=shape.group_tokens + drafted if shape.group_tokens else 0,
            drafting=(shape.num_decodes,) * (depth + self.config.pipelined),
            num_draft_tokens=drafted,
        )


class Pass(NamedTuple):
    """A pass of the drafter over `num_seqs` sequences of `queries` tokens each, which has `rows` rows of logits and
    sees `context` tokens in all."""

    num_seqs: int
    queries: int
    rows: int
    context: int

    def shape(self, prefills: tuple[tuple[int, int], ...], spans: tuple[int, ...]) -> BatchShape:
        """The batch of the pass, with prompts beside it; `spans` are those of the drafter's attention."""
        tokens = self.num_seqs * self.queries
        return BatchShape(
            num_tokens=tokens + sum([new for new, _ in prefills]),
            num_samples=self.rows,
            prefills=prefills,
            num_decodes=self.num_seqs,
            decode_context=self.context,
            decode_windowed=windowed_contexts(self.num_seqs, self.context, spans),
            decode_tokens=tokens if self.queries > 1 else 0,
        )


def draft_tables(
    model: ModelSpec,
    engine: EngineSpec,
    hardware: HardwareSpec,
    calibration: Calibration,
    graph: StepGraph,
    *,
    sampling: str = "default",
    bytes_per_logit: float | None = None,
    routing: Routing = slowest_uniform_routing,
) -> DraftTables | None:
    """The tables for `engine.speculative_config`; None without one. `graph`: the model's own steps.

    calibration, sampling, bytes_per_logit: of the model's own steps

    hardware: of the drafter, too; routing: of its experts

    Raises SpecError for a model that cannot be drafted for so.
    """
    config = engine.speculative_config
    if config is None:
        return None
    method = graph.model.sampling if sampling == "default" else sampling
    drafter = drafter_of(model, engine, method, routing, hardware)
    launching = OperatorTimer(hardware, calibration.model_copy(update={"host": _launches(hardware, calibration.host)}))
    passes = StepTables(drafter.graph, launching) if drafter is not None else None
    first = rest = None
    if config.method == "self_skip":
        silent = OperatorTimer(hardware, calibration.model_copy(update={"host": HostFit()}))
        build = partial(
            build_graph, sampling=sampling, bytes_per_logit=bytes_per_logit, routing=routing, hardware=hardware
        )
        parts = [build(model, engine, part=part) for part in skipping_parts(model, engine)]
        first = StepTables(parts[0], silent)
        rest = StepTables(parts[1], OperatorTimer(hardware, calibration))
    return DraftTables(config, method, drafter, passes, first, rest)


def _launches(hardware: HardwareSpec, host: HostFit) -> HostFit:
    """The host's time of a pass: launches beside the graph's, hidden behind the device; prompts as the model's.

    Without CUDA graphs those of all kernels come on top (`host_fit`).
    """
    is_gpu = hardware.kind == "gpu"
    return HostFit(
        hidden_step_s=_LAUNCHES_BETWEEN * EAGER_LAUNCH_S if is_gpu else 0.0,
        replays_graphs=is_gpu,
        captured_tokens=host.captured_tokens,
        hidden_prompt_layer_s=host.hidden_prompt_layer_s,
    )


def passes_of(config: SpeculativeConfig, drafter: Drafter, shape: BatchShape) -> list[Pass]:
    """The passes of the round of a step of `shape`; one for its prompts alone where no sequence drafts.

    A pass reads the nodes that the one before it drafted (one of a chain, several of a tree) and drafts their children.
    """
    drafting = shape.drafting
    if not drafting:
        return [Pass(0, 1, 0, 0)] if shape.prefills and drafter.computes_prompts else []
    if drafter.has_one_pass:
        return [Pass(drafting[0], 1, drafting[0], shape.decode_context)]
    nodes, mean = config.nodes_by_depth, shape.decode_context / shape.num_decodes
    found = []
    for i, count in enumerate(drafting):
        width = nodes[i] - nodes[i - 1] if i else 1
        queries = width if i else drafter.first_tokens
        found.append(Pass(count, queries, count * width, round((mean + nodes[i]) * count)))
    return found


def ngram_seconds(num_seqs: int, context: int) -> float:
    """Host seconds of looking up n-grams in `num_seqs` sequences with `context` tokens in all."""
    return num_seqs * _LOOKUP_S + context * _LOOKUP_PER_TOKEN_S
