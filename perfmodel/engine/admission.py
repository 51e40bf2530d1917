"""Admission: order, timing and KV reservation of waiting requests.

A scheduling policy is one function from a request to its sort key: smallest first, largest preempted first. To add
one, enter it in POLICIES (and its name in `EngineSpec.scheduling_policy`). Batching disciplines:

| discipline | joins                                            | KV reserved on joining | prompt            |
|------------|--------------------------------------------------|------------------------|-------------------|
| none       | when nothing runs, alone                         | longest possible       | whole             |
| static     | when nothing runs, all that wait up to the limit | longest possible       | whole             |
| dynamic    | as static, once the batch is full or a wait over | longest possible       | whole             |
| iteration  | at any step (Orca)                               | longest possible       | whole             |
| continuous | at any step, within the token budget (vLLM)      | what it holds          | whole or in chunks|

A static or dynamic batch keeps slots and KV until its last request is done; finished rows are not computed. Engines
with a radix tree have SGLang's schedule policies (`sort_waiting`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perfmodel.engine.config import Estimates, SchedulerConfig
from perfmodel.engine.kv_blocks import KVBlockManager
from perfmodel.engine.radix_blocks import RadixKVBlocks, RadixNode
from perfmodel.engine.request import Request
from perfmodel.errors import WorkloadError

Policy = Callable[[Request], tuple[int, ...]]


POLICIES: dict[str, Policy] = {
    "fcfs": lambda request: (request.arrival, request.request_id),
    "priority": lambda request: (request.priority, request.arrival, request.request_id),
    # Service time known on arrival.
    "shortest-first": lambda request: (request.num_prompt_tokens, request.arrival, request.request_id),
}


class VirtualTokenCounters:
    """Fairness among tenants (VTC: Sheng et al. 2024, "Fairness in Serving Large Language Models", algorithm 2): the
    tenant whose counter is least goes first. A counter is the service so far, `input_weight` a prompt token and
    `output_weight` an output token, over the tenant's weight; one that comes back gets no credit for its absence.

    weights: of the tenants, by number"""

    def __init__(self, weights: Sequence[float], input_weight: float, output_weight: float) -> None:
        self.counters = [0.0] * len(weights)
        self.num_waiting = [0] * len(weights)
        self._weights, self._input_weight, self._output_weight = weights, input_weight, output_weight
        self._last = 0  # of those that waited, the one that had none left last

    def enter(self, tenant: int) -> None:
        """A request of `tenant` waits."""
        if not self.num_waiting[tenant]:
            others = [self.counters[one] for one, count in enumerate(self.num_waiting) if count]
            floor = min(others) if others else self.counters[self._last]
            self.counters[tenant] = max(self.counters[tenant], floor)
        self.num_waiting[tenant] += 1

    def leave(self, tenant: int, num_prompt_tokens: int = 0) -> None:
        """It waits no more: admitted with its prompt, or gone."""
        self.num_waiting[tenant] -= 1
        self._last = tenant if not self.num_waiting[tenant] else self._last
        self.counters[tenant] += self._input_weight * num_prompt_tokens / self._weights[tenant]

    def charge(self, tenant: int, num_output_tokens: int) -> None:
        """Its answer has so many tokens."""
        self.counters[tenant] += self._output_weight * num_output_tokens / self._weights[tenant]

    def next_tenant(self) -> int:
        """The next to be served of those that wait; there must be one."""
        return min((counter, one) for one, counter in enumerate(self.counters) if self.num_waiting[one])[1]


@dataclass(frozen=True, slots=True)
class Discipline:
    """One row of the table above.

    joins_running:   new requests may join a running batch
    waits_to_fill:   an idle engine waits for a full batch, or until the oldest has waited `batch_timeout`
    reserves_all:    KV for the longest allowed sequence is reserved on joining
    uses_budget:     `max_num_batched_tokens` limits a step (and chunked prefill applies)
    frees_together:  slots and blocks are released when the whole batch is done
    max_batch:       limit on the batch in addition to max_num_seqs"""

    joins_running: bool
    waits_to_fill: bool = False
    reserves_all: bool = True
    uses_budget: bool = False
    frees_together: bool = False
    max_batch: int | None = None


DISCIPLINES: dict[str, Discipline] = {
    "none": Discipline(joins_running=False, frees_together=True, max_batch=1),
    "static": Discipline(joins_running=False, frees_together=True),
    "dynamic": Discipline(joins_running=False, waits_to_fill=True, frees_together=True),
    "iteration": Discipline(joins_running=True),
    "continuous": Discipline(joins_running=True, reserves_all=False, uses_budget=True),
}


class Reservations:
    """KV reservations under `config` and its batching `discipline`."""

    def __init__(self, config: SchedulerConfig, discipline: Discipline) -> None:
        self._config, self._discipline, drafts = config, discipline, config.speculation
        self._spare_slots = drafts.spare_slots if drafts is not None else 0
        self._num_lookahead = drafts.num_lookahead if drafts is not None else 0

    def num_tokens(self, request: Request, needed: int, is_load: bool = False) -> int:
        """Tokens to allocate on joining; `needed` now, `is_load`: for KV from elsewhere."""
        config = self._config
        is_known = config.reserves_output and (config.is_contiguous or not self._discipline.reserves_all)
        if is_known:
            outputs = request.max_output_tokens
            if config.rounds_output:
                outputs = 1 << (outputs - 1).bit_length()
            return min(request.num_prompt_tokens + outputs - 1, config.max_model_len) + self._spare_slots
        if config.is_contiguous or self._discipline.reserves_all:
            return config.max_model_len + self._spare_slots
        if is_load or not self._num_lookahead:
            return needed
        return max(needed, min(needed + self._num_lookahead, config.max_model_len))

    def check_can_ever_run(self, request: Request, blocks: KVBlockManager) -> None:
        """Raise WorkloadError for a request that an empty engine with these `blocks` could not serve."""
        config = self._config
        longest = request.num_prompt_tokens + request.max_output_tokens - 1  # the last sampled token is never computed
        if longest > config.max_model_len:
            raise WorkloadError(
                f"request {request.request_id} needs {longest} tokens ({request.num_prompt_tokens} of prompt), above "
                f"max_model_len={config.max_model_len}; raise it or shorten the request"
            )
        largest = max([item.num_tokens for item in request.encoder_inputs], default=0)
        if largest and (config.encoder is None or largest > min(config.encoder.budget, config.encoder.cache_size)):
            raise WorkloadError(
                f"request {request.request_id} has an image of {largest} tokens, more than the engine encodes at once; "
                f"raise max_num_batched_tokens or shrink the image"
            )
        is_whole = self._discipline.uses_budget and not (config.enable_chunked_prefill and config.keeps_kv)
        is_kept = config.reserves_output and config.keeps_kv
        at_once = request.num_prompt_tokens if is_kept else longest  # it may be recomputed whole
        if request.num_transferred_tokens and config.reserves_output:
            at_once = 1
        if is_whole and at_once > config.max_num_batched_tokens:
            raise WorkloadError(
                f"request {request.request_id} may have to compute {at_once} tokens at once, above "
                f"max_num_batched_tokens={config.max_num_batched_tokens}; raise it or "
                + ("set enable_chunked_prefill" if config.keeps_kv else "keep the KV cache")
            )
        last = longest + self._spare_slots + self._num_lookahead
        if config.speculation is not None and (config.speculation.is_ahead or self._num_lookahead):
            last = max(min(last, config.max_model_len), longest)  # drafts end there
        most = max(self.num_tokens(request, longest), last)
        if blocks.num_filled(most) + blocks.num_buffers > blocks.num_blocks:
            raise WorkloadError(
                f"request {request.request_id} needs KV blocks for {most} tokens, but the pool has {blocks.num_blocks} "
                f"blocks of {blocks.block_size}; shorten it, or give the KV cache more memory"
            )


ORDERS = ("dfs-weight", "fcfs", "lof", "lpm", "priority")  # of `sort_waiting`


def sort_waiting(waiting: list[Request], policy: str, blocks: RadixKVBlocks, rules: Estimates) -> bool:
    """Sort `waiting` (stable) by `policy` and `rules`; return whether all were looked up in the tree of `blocks`."""
    match policy:
        case "priority":
            waiting.sort(key=lambda request: request.priority)
        case "lof":  # longest output first
            waiting.sort(key=lambda request: -request.max_output_tokens)
        case "lpm" if blocks.enable_prefix_caching and len(waiting) <= rules.most_sorted:  # longest prefix first
            keys = _prefixes(waiting, blocks, rules)
            waiting.sort(key=lambda request: keys[request][1])
            return True
        case "dfs-weight" if blocks.enable_prefix_caching:
            nodes: dict[RadixNode, list[Request]] = {}  # depth first, the child with most waiting requests first
            for request, (node, _) in _prefixes(waiting, blocks, rules).items():
                nodes.setdefault(node, []).append(request)
            weights = {node: len(requests) for node, requests in nodes.items()}
            for node in _children_first(blocks):
                weights[node] = weights.get(node, 0) + sum(weights.get(child, 0) for child in node.children.values())
            waiting.clear()
            for node in _children_first(blocks, weights):
                waiting += nodes.get(node, ())
            return True
    return False


def _children_first(blocks: RadixKVBlocks, weights: dict[RadixNode, int] | None = None) -> list[RadixNode]:
    """All nodes in postorder, heaviest children first if there are `weights`."""
    order: list[RadixNode] = []
    stack = [(blocks.root, False)]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
            continue
        children = list(node.children.values())
        if weights is not None:
            children.sort(key=lambda child: -weights.get(child, 0))
        stack.append((node, True))
        stack += [(child, False) for child in reversed(children)]
    return order


def _prefixes(
    waiting: list[Request], blocks: RadixKVBlocks, rules: Estimates
) -> dict[Request, tuple[RadixNode, float]]:
    """(node of the cached prefix, key of `lpm`) per waiting request. The key is minus the cached tokens; infinite, so
    last, where at most `duplicate_tokens` are cached and one before it begins alike."""
    seen: set[object] = set()
    num_same = -(-rules.duplicate_tokens // blocks.block_size)
    prefixes: dict[Request, tuple[RadixNode, float]] = {}
    for request in waiting:
        node = blocks.match(request, request.num_tokens)
        num_tokens = blocks.depth(node) * blocks.block_size
        key = float(-min(num_tokens, request.num_tokens - 1))
        if num_tokens <= rules.duplicate_tokens:
            beginning = request.contents[:num_same]
            if len(beginning) == num_same and beginning in seen:
                key = float("inf")
            else:
                seen.add(beginning)
        prefixes[request] = (node, key)
    return prefixes
