"""Scheduler settings. Sizes in tokens and sequences, times in ticks of the driving clock."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Speculation:
    """Draft depth per decode and step, in tokens and sequences; see `DraftingRequests`."""

    nodes: tuple[int, ...]  # tokens verified beside the newest when drafting 0, 1, 2 ... deep; nodes[0] is 0
    # How deep to draft, by the number of requests that decode in the step (from 1; the last repeats); a row for each of
    # as many equal parts of [0, 1] in which the estimated acceptance may lie; () = all the way.
    depths: tuple[tuple[int, ...], ...] = ()
    disable_by_batch_size: int | None = None  # steps in which more requests decode draft nothing
    pipelined: bool = False  # the next draft is made while this one is verified
    estimate: float = 1.0  # where the estimate of acceptance begins
    past_end: bool = False  # drafts are as deep however few tokens a request lacks, up to the longest sequence (vLLM)
    # The next plan is made before it is known which drafts are right, as if all were (vLLM, asynchronous).
    is_ahead: bool = False
    num_lookahead: int = 0  # KV slots behind those of a step that the drafter writes, up to the longest sequence (vLLM)
    num_input_tokens: int = 0  # of the budget, beside a request's own tokens: the drafter's input (vLLM)
    # The last block of a cached prefix is computed again, for what the drafter reads of the model behind it (vLLM).
    rereads_last_block: bool = False
    # Draft depth after 0, 1, 2 ... right tokens in a row; the last repeats; () = whatever came before (suffix decoding)
    depth_by_match: tuple[int, ...] = ()

    @property
    def depth(self) -> int:
        return len(self.nodes) - 1

    @property
    def spare_slots(self) -> int:
        """KV slots beyond a request's last token that a step may need: trees have more nodes than accepted tokens."""
        spare = self.nodes[-1] if self.past_end else max(nodes - depth for depth, nodes in enumerate(self.nodes))
        return spare + self.nodes[-1] if self.is_ahead else spare

    def depth_at(self, num_decodes: int, acceptance: float) -> int:
        """Draft depth with `num_decodes` decodes and the estimated `acceptance`."""
        if self.disable_by_batch_size is not None and num_decodes > self.disable_by_batch_size:
            return 0
        if not self.depths:
            return self.depth
        row = self.depths[min(int(acceptance * len(self.depths)), len(self.depths) - 1)]
        return row[min(num_decodes, len(row)) - 1]

    def depth_within(self, depth: int, num_slots: int) -> int:
        """The deepest draft, at most `depth`, of no more than `num_slots` tokens."""
        while depth and self.nodes[depth] > num_slots:
            depth -= 1
        return depth


@dataclass(frozen=True, slots=True)
class Estimates:
    """How an engine that admits by expected remaining tokens estimates them (SGLang), in tokens and steps."""

    most_output_tokens: int = 4096  # of an answer, no more are expected
    # The share of their longest answers that running requests are expected to give: where it begins, and whenever the
    # engine has been idle; where it ends; and the steps of decodes in which it falls from one to the other.
    first_ratio: float = 0.7
    least_ratio: float = 0.098
    decay_steps: int = 600
    spared_steps: int = 20  # after a retraction, so many more tokens are expected and kept free for each that stays
    ends_early: bool = False  # answers may end before their longest, so that the ratio counts
    # By longest prefix, a request that has no more in the cache waits if it begins with as many tokens of another one
    # that waits; and more that wait are served first come, first served.
    duplicate_tokens: int = 32
    most_sorted: int = 128
    refresh_every: int = 32  # the cache sees the prompts of those that wait as used at every such admission


@dataclass(frozen=True, slots=True)
class Slots:
    """Slots that each keep the KV of their last request; see `SlottedRequests`."""

    least_similarity: float = 0.1  # a slot is chosen for what it holds where that is more than this share of a prompt
    reuses: bool = True  # a request computes only what its slot lacks of its prompt
    saves_prompts: bool = True  # prompts of free slots are kept in the host's memory, too
    is_unified: bool = False  # all slots share one pool of KV; a free slot is emptied once its prompt is saved


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """LoRA adapters (vLLM's engine arguments): in slots, so in one step, and in the host's memory, those among them;
    num_adapters: that the server is started with; see `AdapterSlots`."""

    max_loras: int = 1
    max_cpu_loras: int = 1
    num_adapters: int = 0


@dataclass(frozen=True, slots=True)
class EncoderRules:
    """Encoder inputs, in tokens; see `EncoderCache`.

    budget:     encoded in one step; cache_size: kept at once
    is_whole:   no input's tokens are computed in several steps (vLLM's disable_chunked_mm_input)
    is_ahead:   a step is planned before the one in flight has come back
    is_alone:   no text is computed: a request ends with the first of its steps to come back once all of its prompt is
                in plans (vLLM's mm_encoder_only)"""

    budget: int
    cache_size: int
    is_whole: bool = False
    is_ahead: bool = True
    is_alone: bool = False


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Names and meanings of vLLM's engine arguments; see `perfmodel.specs.EngineSpec`."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192
    block_size: int = 16
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"
    batching: str = "continuous"
    batch_timeout: int = 0
    # A request is admitted only when blocks for all its known tokens are free, not just for its first chunk; it is not
    # given more than that chunk needs.
    scheduler_reserve_full_isl: bool = True
    prefill_exclusive: bool = False  # prompts or decodes, prompts first (SGLang); else both together (vLLM, TRT-LLM)
    reserves_output: bool = False  # blocks for the whole answer from the start, so nobody is preempted (TRT-LLM)
    # What stays in the prefix cache of a preempted request, until its blocks are reused: all full blocks (vLLM), the
    # prompt's (SGLang), or nothing.
    stays_of_preempted: Literal["all", "prompt", "nothing"] = "all"
    caps_lone_prompts: bool = True  # `long_prefill_token_threshold` also holds for a lone request (vLLM before 0.31)
    # A request admitted for one token is padded to the length of a verification (vLLM): beside requests that run, also
    # without any where it is found in the prefix cache (always), or never. One that has no room for that in the longest
    # sequence waits, or is not padded.
    pads_lone_tokens: Literal["never", "beside_running", "always"] = "never"
    waits_to_be_padded: bool = False
    poll_every: int = 1  # arrivals are looked at every so many decodes, and after prompts (SGLang's receive interval)
    loads_need_slot: bool = False  # KV from elsewhere comes while fewer than max_num_seqs run (vLLM); else any time
    # A plan under way may still write its blocks, and KV from elsewhere could come into them: no request of such a plan
    # is preempted (vLLM, consumers of KV).
    defers_frees: bool = False
    keeps_kv: bool = True  # without, each step computes all tokens of every sequence that it advances
    is_contiguous: bool = False  # each request has room for the longest sequence (with reserves_output, for its own)
    rounds_output: bool = False  # reservations are for answers of the next power of two of tokens (Orca (Pow2))
    spans: tuple[int, ...] = ()  # limits on how far a query sees; plans sum the decodes' context under each
    speculation: Speculation | None = None  # requests that decode draft tokens, too
    estimates: Estimates | None = None  # requests are admitted by these; None: by the blocks that are free
    pipeline_parallel_size: int = 1  # stages that plans pass one after another: so many may be under way at once
    max_plan_seqs: int = 0  # with several stages, sequences of one plan; 0: as many as there are
    slots: Slots | None = None  # that keep their KV (llama-server); with continuous batching, on one stage
    record_positions: bool = False  # plans carry the token positions and block tables that a backend with tensors needs
    adapters: AdapterLimits | None = None  # requests may name LoRA adapters
    has_shapes: bool = False  # requests may name the shape of their answers
    encoder: EncoderRules | None = None  # of models with an encoder, where requests have inputs for it
