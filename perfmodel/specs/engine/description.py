"""Facts of a serving engine's code by version (hardware_specs/engines).

Fitted host and server costs are in `hardware_specs/calibrations/engine@<name>.yaml`."""

import datetime
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, field_validator

from perfmodel.errors import SpecError
from perfmodel.files.base import Spec
from perfmodel.files.catalog import find_file
from perfmodel.files.units import Bytes, NonNegativeInt, PositiveInt
from perfmodel.files.validation import load_spec
from perfmodel.specs.engine.versions import ChosenVersion, choose_version, parse_version
from perfmodel.specs.hardware import HardwareSpec

Backend = Literal["cuda", "rocm", "vulkan", "metal", "mlx", "sycl", "opencl", "cpu"]


class BackendFacts(Spec):
    """One backend of an engine.

    kind, makers: of the devices that it is for; any maker unless given"""

    kind: Literal["gpu", "cpu"] = "gpu"
    makers: tuple[str, ...] = ()
    default: bool = True  # it is what these devices are run with unless a scenario says otherwise
    rate: str  # the peak that weights in block formats are multiplied at, a key of `peak_flops_per_s`
    float_rate: str  # the same of weights in 16 bits

    def takes(self, hardware: HardwareSpec) -> bool:
        """Whether it runs on `hardware`; a device of unknown vendor matches any."""
        return self.kind == hardware.kind and (not self.makers or hardware.maker in (None, *self.makers))


def backend_of(asked: Backend | None, backends: Mapping[Backend, BackendFacts], hardware: HardwareSpec) -> Backend:
    """Backend for `hardware`: the one `asked` for, or the first default of `backends` that takes it.

    Raises SpecError, with the available ones, for one the engine lacks, or lacks for the device."""
    fitting = [name for name, facts in backends.items() if facts.takes(hardware)]
    if asked is not None and asked not in fitting:
        allowed = f"expected there: {', '.join(fitting)}" if fitting else "the engine has no backend for it"
        raise SpecError(f"engine.backend: got {asked} on {hardware.name} (a {hardware.kind}); {allowed}.")
    if not fitting:
        raise SpecError(f"engine.profile: the engine has no backend for {hardware.name} (a {hardware.kind}).")
    return asked if asked is not None else next((name for name in fitting if backends[name].default), fitting[0])


GraphObstacle = Literal["encoder", "indexer", "data_parallel", "pipeline_parallel", "all2all", "speculation"]


class CaptureRange(Spec):
    """Sizes from `first` on, every `step`, up to where the next range begins."""

    first: PositiveInt
    step: PositiveInt


class GraphRules(Spec):
    """For which steps CUDA graphs are captured, by their tokens; one of another size runs the graph of the next larger.

    sizes, ranges:     the smallest sizes one by one, then in ranges
    most_tokens:       the largest size; 0: no graphs
    per_sequence:      largest size for each of max_num_seqs, up to most_tokens; 0: it does not limit it
    with_prompts:      steps with prompts are captured, too (in pieces around attention); else those that only decode
    prompts_up_to_budget: those of up to max_num_batched_tokens tokens; else of up to as many as the others
    most_with_latents: tokens of the largest step with prompts of models that cache latents; 0: as of others"""

    sizes: tuple[PositiveInt, ...] = ()
    ranges: tuple[CaptureRange, ...] = ()
    most_tokens: NonNegativeInt = 0
    per_sequence: NonNegativeInt = 0
    per_drafted_token: bool = False  # times one and the tokens drafted for a sequence
    with_prompts: bool = False
    prompts_up_to_budget: bool = False
    most_with_latents: NonNegativeInt = 0
    prompts_without: tuple[GraphObstacle, ...] = ()  # what no step with prompts is captured with
    inside_memory_share: bool = False  # their memory counts inside gpu_memory_utilization; else it comes on top

    def most(self, max_num_seqs: int, max_num_batched_tokens: int, drafted: int = 0) -> int:
        """Tokens of the largest captured step; `drafted`: drafted tokens per sequence."""
        most = min(self.most_tokens, max_num_batched_tokens)
        if not self.per_sequence:
            return most
        return min(most, self.per_sequence * max_num_seqs * (1 + (drafted if self.per_drafted_token else 0)))

    def sizes_up_to(self, most: int) -> tuple[int, ...]:
        """All capture sizes up to `most` tokens, ascending."""
        sizes_up = [size for size in self.sizes if size <= most]
        ends = [*(entry.first for entry in self.ranges[1:]), most + 1]
        for item, end in zip(self.ranges, ends, strict=False):  # without ranges there is an end alone
            sizes_up += range(item.first, min(end, most + 1), item.step)
        return tuple(sizes_up)

    def most_with_prompts(
        self, most: int, max_num_batched_tokens: int, has_latents: bool, obstacles: Collection[GraphObstacle]
    ) -> int:
        """Tokens of the largest captured step with prompts; 0: none.

        most: of decode steps; max_num_batched_tokens: of any step; has_latents: the model caches latents; obstacles: of
        the deployment"""
        if not self.with_prompts or not most or not set(self.prompts_without).isdisjoint(obstacles):
            return 0
        if not self.prompts_up_to_budget:
            return most
        limit = self.most_with_latents if has_latents else 0
        return min(max_num_batched_tokens, limit or max_num_batched_tokens)


_S = TypeVar("_S", bound=Spec)

Use = Literal["server", "offline"]
FormatSupport = Literal["native", "emulated", "weight_only", "refused"]


class EstimateRules(Spec):
    """Requests are admitted by what those that run may still need; see `perfmodel.engine.config.Estimates`."""

    most_output_tokens: PositiveInt
    first_ratio: float = Field(gt=0, le=1)
    least_ratio: float = Field(gt=0, le=1)
    decay_steps: PositiveInt
    spared_steps: NonNegativeInt
    duplicate_tokens: PositiveInt
    most_sorted: PositiveInt
    refresh_every: PositiveInt


class SlotRules(Spec):
    """How requests are given slots that keep their KV (llama-server); `perfmodel.engine.slots` has the rules.

    least_similarity: a slot is chosen for what it holds where that is more than this share of a prompt"""

    least_similarity: float = Field(default=0.1, ge=0, le=1)
    saves_prompts: bool = False  # prompts of free slots are kept in the host's memory, too
    is_unified_by_default: bool = False  # without a given `max_num_seqs` all slots share one pool of KV


class BatchingRules(Spec):
    """What a step may hold.

    reserves_output:   a request is admitted with KV blocks for all that it may generate, so that none is preempted
    stays_of_preempted: what stays in the prefix cache of a request that is preempted, until its blocks are reused: all
                       full blocks, the prompt's, or nothing
    reuses_partial_first: blocks that are freed before they are full are reused before all others; else in the order
                       in which blocks are freed
    caps_lone_prompts: `long_prefill_token_threshold` also holds for a request that is alone in the engine
    pads_lone_tokens:  a request that is admitted for one token is padded to the length of a verification: beside
                       requests that run, also without any where it is found in the prefix cache (always), or never
    waits_to_be_padded: one that has no room for that in the longest sequence waits; else it is not padded
    drafts_ahead:      methods of drafting with which asynchronous scheduling plans the next step although it is not
                       known yet which drafts are right; with others no step is planned ahead
    drafters_write_ahead: a drafter with KV of its own has slots for its drafts behind those of a step, and one that
                       reads the model's hidden states has the last block of a prefix in the cache computed again
    resamples_first:   with KV that another engine computed, the prompt's last token is computed again and the first
                       token of the answer sampled again; else decoding goes on from the other engine's first token
    loads_need_slot:   KV that another engine computed is fetched only while fewer than max_num_seqs requests run
    samples_parts:     logits are computed for a prompt's part that does not end it, too; else for its end alone
    pads_ranks:        data-parallel ranks that step together are padded to the tokens of the largest of them: in CUDA
                       graphs alone, or in every step unless no graphs are captured
    halves_alike:      where steps are cut in two, the first half of each data-parallel rank has as many tokens: half of
                       the largest's, padded; no rank is cut where one idles, is below its threshold or has no second
                       half. Else each is cut in its own middle where all that have work have prompts, or none has
    defers_frees:      an engine that takes KV from others and has several plans under way preempts no request of a plan
                       that is, since that may still write its blocks
    estimates:         how those that run count when another request is to be admitted; none: by the blocks they hold
    sequences_on_stages: max_num_seqs is over all pipeline stages however sequences come together (shared), an even
                       share of it is in each micro-batch (even_share), or as many are in each stage (each)
    serves_adapters:   requests name LoRA adapters, of which a step has at most `max_loras`, by kernels for all of them
                       (grouped) or one by one
    masks_shapes:      requests name the shape of their answers, whose masks are made while the device computes
    encodes_in_steps:  images are encoded in the steps that need them, within a budget (`EncoderCache`)
    pools_synchronously: no step is planned ahead by default where requests end with their prompts
    slots:             requests take slots that keep their KV, and share none with each other; none: KV blocks"""

    prefill_exclusive: bool = False  # prompts or decodes, prompts first; else both together
    reserves_output: bool = False
    stays_of_preempted: Literal["all", "prompt", "nothing"] = "all"
    reuses_partial_first: bool = False
    caps_lone_prompts: bool = True
    drafts_past_end: bool = False  # drafts are as long however few tokens a request lacks
    pads_lone_tokens: Literal["never", "beside_running", "always"] = "never"
    waits_to_be_padded: bool = False
    drafts_ahead: tuple[str, ...] = ()
    drafters_write_ahead: bool = False
    resamples_first: bool = False
    loads_need_slot: bool = False
    samples_parts: bool = False
    pads_ranks: Literal["in_graphs", "always"] = "in_graphs"
    halves_alike: bool = False
    defers_frees: bool = False
    chunks_prompts: bool = True  # a prompt may be computed in several steps
    whole_prompts_raise_budget: bool = False  # without chunks, the default token budget is at least max_model_len
    estimates: EstimateRules | None = None
    sequences_on_stages: Literal["shared", "even_share", "each"] = "shared"
    slots: SlotRules | None = None
    serves_adapters: Literal["no", "grouped", "one_by_one"] = "no"
    masks_shapes: bool = False
    encodes_in_steps: bool = False
    pools_synchronously: bool = False


class BufferRules(Spec):
    """What an engine holds on a device beside weights and KV blocks.

    rotary_table: cosines and sines of all positions that a model was trained for, in the model's dtype or in fp32;
                  none: computed when they are needed
    sorts_logits: sampling by top-k or top-p sorts the logits of as many sequences as may run, with indices of so many
                  bits (int64: PyTorch's sort); none: its kernels do not sort"""

    rotary_table: Literal["none", "dtype", "fp32"] = "none"
    positions_per_axes: PositiveInt = 1  # times so many positions, of models whose positions have several axes (M-RoPE)
    sorts_logits: Literal["none", "int64", "int32"] = "none"


class EngineDefaults(Spec):
    """Arguments where a scenario gives none, on every device. Names and meanings are those of `EngineSpec`."""

    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    block_size: PositiveInt = 16
    async_scheduling: bool = True
    all2all_backend: str | None = None
    ubatch_size: NonNegativeInt = 0  # 0: steps are computed whole
    attention: Literal["flash", "standard"] = "flash"


class AllToAll(Spec):
    """How tokens reach the experts of other ranks on some devices: the first line of a list that fits counts.

    backend: `EngineSpec.all2all_backend`; none: tokens go to the ranks of their experts"""

    beside: str | None = None  # a link that the device has; any device unless given
    backend: str | None = None

    def fits(self, hardware: HardwareSpec) -> bool:
        return self.beside is None or any(link.name == self.beside for link in hardware.declared.links)


class StepBudget(Spec):
    """The default size of a step on some devices: the first line of a list that fits counts.

    named, not_named: parts of the device's name"""

    kind: Literal["gpu", "cpu", "tpu", "npu", "fpga"] | None = None  # of device; any unless given
    least_memory: Bytes = 0.0  # that a process sees of the device, bytes
    named: tuple[str, ...] = ()
    not_named: tuple[str, ...] = ()
    use: Use | None = None  # server, or offline: all requests are there at once; either unless given
    per_device: bool = False  # the sizes are those of each device of a replica
    max_num_batched_tokens: PositiveInt
    max_num_seqs: PositiveInt

    def fits(self, hardware: HardwareSpec, use: Use) -> bool:
        """Whether it applies to `hardware` in this `use`."""
        return (
            self.kind in (None, hardware.kind)
            and hardware.visible_memory_bytes >= self.least_memory
            and (not self.named or any(name in hardware.name for name in self.named))
            and not any(name in hardware.name for name in self.not_named)
            and self.use in (None, use)
        )


class KvGroupRules(Spec):
    """How the KV blocks of layers that see different parts of a sequence are managed.

    kinds:      layers that keep no more than they see, in blocks of their own (window, chunk), and recurrent states
                that are blocks of the same pool (state); else all tokens are kept, and states are set apart
    pads_below: groups are as large as the largest kind where that has less than so many times the layers of the
                smallest; else as large as the smallest"""

    kinds: tuple[Literal["window", "chunk", "state"], ...] = ()
    pads_below: float = Field(default=1.0, ge=1)


class FormatRow(Spec):
    """What becomes of a number format on some generations of devices, and the kernel, where it is known.

    native:      multiplied as it is stored
    emulated:    converted before it is used, by instructions that no unit has for it
    weight_only: stored so, multiplied in the 16 bits of the activations
    refused:     the engine does not start"""

    on: tuple[str, ...]
    support: FormatSupport
    kernel: str = ""


class ExpertsRow(Spec):
    """How the routed experts of a layer run: in some number formats, on some generations of devices.

    formats, on:  as of `EngineFacts.weights` ("bf16" for weights that are not quantized); empty: any
    aligned_rows: block size M of a contiguous grouped GEMM: each expert's rows are padded to whole blocks, and the up
                  and the down product are one launch each of the GEMM kernel of linear layers
    multiplies_empty_blocks: it computes the worst-case number of blocks, not only those with tokens
    checks_shape: it does so for M tokens and more of experts whose sizes are multiples of M, the inner one above 512"""

    formats: tuple[str, ...] = ()
    on: tuple[str, ...] = ()
    kernel: str = ""  # which ones, where it is known
    num_kernels: PositiveInt  # of one layer's experts, between the choice of experts and the sum of their results
    one_operator: bool = False  # the host launches them as one operator; else operator by operator, from Python
    chooses: bool = False  # the choice of a token's experts is among these kernels
    aligned_rows: Literal[64, 128] | None = None
    multiplies_empty_blocks: bool = False
    checks_shape: bool = False
    ranks_from: PositiveInt = 1  # only where experts are cut by width over so many ranks and more

    def fits(self, form: str, generation: str | None) -> bool:
        """Whether it applies to weights in `form` on devices of `generation`."""
        return (not self.formats or form in self.formats) and (not self.on or generation in self.on)

    def aligned_from(self, width: int, inner: int) -> float:
        """Tokens of a step from which on it aligns rows; inf: it never does."""
        block = self.aligned_rows or 1
        is_odd = self.checks_shape and (inner <= 512 or width % block or inner % block)
        return inf if self.aligned_rows is None or is_odd else self.checks_shape * block


class SparseAttentionRow(Spec):
    """How prompts attend to the latents that an indexer keeps for each token, on some generations of devices.

    on:             generations, as in `declared.architecture`; none: all"""

    on: tuple[str, ...] = ()
    kernel: str = ""
    heads_per_tile: PositiveInt  # of the kernel; fewer heads on a device are padded to it


class LatentPromptsRow(Spec):
    """Dense attention of prompts over latents, on some generations of devices: the kernel that tables time of latents.

    on:              generations, as in `declared.architecture`; none: all
    in_cache_format: queries, keys and values are multiplied in the KV cache's format"""

    on: tuple[str, ...] = ()
    kernel: str = ""
    in_cache_format: bool = False


class HostProcesses(Spec):
    """Processes that keep a core of the host busy, as they poll, while their engine has requests.

    per_rank, per_device: of a data-parallel rank, and of each of its devices
    joins_lone_device:    a rank of one device has no process for it beside its own
    polling_share:        of what a process with work gets of a core, what one gets that polls: less where it yields"""

    per_rank: NonNegativeInt = 0
    per_device: NonNegativeInt = 0
    joins_lone_device: bool = False
    polling_share: float = Field(default=1.0, ge=0, le=1)

    def polling(self, num_devices: int) -> int:
        """How many a rank with so many devices has."""
        return self.per_rank + (0 if self.joins_lone_device and num_devices == 1 else self.per_device * num_devices)


class ImageRequests(Spec):
    """CPU seconds of an API server for a request with images, beside what decoding them and its model's processor take,
    and how much more for the request and for an image that its cache has not."""

    request_s: float = Field(ge=0)
    new_request_s: float = Field(ge=0)
    new_image_s: float = Field(ge=0)


class EngineFacts(Spec):
    """The facts of an engine at one version; in a file, those that changed with it.

    quantizes_before:   norms, activations and attention write the format that the next multiplication reads, by scales
                        known ahead; else a kernel of its own quantizes them
    states_in_model_dtype: recurrent states are kept in the model's dtype where its configuration names no other
    stripes_kv:         ranks with copies of the same KV heads can share out the tokens (decode context parallelism)
    splits_prompts:     models whose prompts' tokens ranks can share out (prefill context parallelism)
    kv_block_sizes:     tokens of a KV block that the engine takes; none: any
    default_kernels:    by generation, of a family and format the kernel that servers run, as tables call it; else the
                        one that was measured with most
    newest_kernels:     by generation, families and formats that servers of this version run with the kernels of the
                        newest tables, while its tables timed others; a single kernel's key: with it alone in any layout
    limits_to_positions: it does not start with a max_model_len beyond the positions that the model was trained for
    ranks_by:           how a replica's data-parallel rank is chosen for a request, by the role of its pool (`ROUTERS`);
                        the one with fewest requests unless given
    sparse_attention:   the kernels of prompts with an indexer: the first row that fits
    latent_prompts:     those of prompts that attend to all of their latents, likewise; elsewhere the kernel of heads of
                        their size
    weights, kv_cache:  by number format, then by generation; a format that is listed is refused on others
    backends:           what its kernels are run with, by name, where there are several; without, it has one
    pieces_under_way:   of a batch, that follow one another over the devices of a layer split; 0: plans do, instead
    offloads_from_tokens: a batch of so many tokens multiplies weights in the CPU's memory on the device; 0: none does
    unconfirmed:        paths of facts that were recalled or derived, not read in the engine's source or documents"""

    source: str = ""
    batching: BatchingRules = BatchingRules()
    defaults: EngineDefaults = EngineDefaults()
    all2all: tuple[AllToAll, ...] = ()
    budgets: tuple[StepBudget, ...] = ()
    graphs: GraphRules = GraphRules()
    buffers: BufferRules = BufferRules()  # what it holds beside weights and KV blocks
    attention_contains: tuple[str, ...] = ()  # operators whose time is inside that of measured attention calls
    newest_kernels: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    default_kernels: dict[str, dict[str, str]] = Field(default_factory=dict)
    quantizes_before: bool = False
    states_in_model_dtype: bool = False
    stripes_kv: bool = False
    splits_prompts: Literal["none", "latents", "all"] = "none"
    kv_block_sizes: tuple[PositiveInt, ...] = ()
    kv_groups: KvGroupRules = KvGroupRules()  # which layers have KV blocks of their own
    limits_to_positions: bool = False
    ranks_by: dict[str, Literal["random", "round_robin"]] = Field(default_factory=dict)
    experts: tuple[ExpertsRow, ...] = ()  # how expert layers run: the first row that fits, the newest version's first
    sparse_attention: tuple[SparseAttentionRow, ...] = ()
    latent_prompts: tuple[LatentPromptsRow, ...] = ()
    weights: dict[str, tuple[FormatRow, ...]] = Field(default_factory=dict)
    kv_cache: dict[str, tuple[FormatRow, ...]] = Field(default_factory=dict)
    backends: dict[Backend, BackendFacts] = Field(default_factory=dict)
    pieces_under_way: NonNegativeInt = 0
    offloads_from_tokens: NonNegativeInt = 0
    api_server_request_s: float = Field(
        default=0.0, ge=0
    )  # CPU time of its server's process for an answer that comes whole
    api_server_beam_s: float = Field(default=0.0, ge=0)  # for a token of a beam that it asks for; 0: it has no beams
    api_server_images: ImageRequests | None = None  # None: it works on no images, or how is not known
    host_processes: HostProcesses | None = None  # None: not known
    released: datetime.date | None = None  # when the version came out
    unconfirmed: tuple[str, ...] = ()


class EngineDescription(Spec):
    """A file of hardware_specs/engines: facts of all versions described, then what changed with each."""

    name: str
    title: str
    aliases: tuple[str, ...] = ()
    source: str
    facts: EngineFacts = EngineFacts()
    versions: dict[str, EngineFacts] = Field(default_factory=dict)

    @field_validator("versions")
    @classmethod
    def _are_releases(cls, versions: dict[str, EngineFacts]) -> dict[str, EngineFacts]:
        for text in versions:
            if parse_version(text)[1] != "release":
                raise ValueError(f"got version {text!r}; expected a release as in 0.21")
        return dict(sorted(versions.items(), key=lambda item: parse_version(item[0])))

    def at(self, version: str) -> EngineFacts:
        """Facts at a described version: common ones, with changes up to it."""
        facts, last = self.facts, parse_version(version)[0] if version else ()
        for text, changes in self.versions.items():
            if parse_version(text)[0] <= last:
                facts = _overlaid(facts, changes)
        return facts


@dataclass(frozen=True, slots=True)
class DescribedEngine:
    """An engine at one version."""

    description: EngineDescription
    version: ChosenVersion
    facts: EngineFacts

    @property
    def label(self) -> str:
        """`vllm 0.30`"""
        return f"{self.description.name} {self.version.described}".strip()


def load_engine_description(name_or_path: str | Path) -> EngineDescription:
    """Engine description by name, alias or path. Raises SpecError for a missing or malformed one."""
    return load_spec(EngineDescription, find_file("engines", name_or_path))


@lru_cache(maxsize=256)
def describe_engine(name_or_path: str, version: str | None = None) -> DescribedEngine:
    """Engine, described version and facts for `version`. Raises SpecError for unknown, malformed or no version."""
    description = load_engine_description(name_or_path)
    chosen = choose_version(version, description.versions)
    return DescribedEngine(description, chosen, description.at(chosen.described))


def _overlaid(base: _S, changes: _S) -> _S:
    """`base` overlaid by `changes`: blocks and tables by key, `experts` before older rows, others replaced."""
    update: dict[str, Any] = {}
    for name in changes.model_fields_set:
        old, new = getattr(base, name), getattr(changes, name)
        if isinstance(old, Spec):
            update[name] = _overlaid(old, new)
        elif isinstance(old, dict):
            update[name] = {**old, **new}
        else:
            update[name] = (*new, *old) if name == "experts" else new
    return base.model_copy(update=update)
