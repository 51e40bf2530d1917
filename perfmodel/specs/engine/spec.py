"""`EngineSpec`: how the model is served, with vLLM's engine-argument names and meanings."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from perfmodel.files.base import Resolved, Spec, UsedBy, VariantSpec
from perfmodel.files.units import Milliseconds, NonNegativeFloat, NonNegativeInt, PositiveInt
from perfmodel.models.layer_formats import LayerQuantization
from perfmodel.models.number_formats import GROUPED_FORMATS
from perfmodel.models.spec import ModelSpec
from perfmodel.specs.engine.description import Backend, BatchingRules, DescribedEngine, describe_engine
from perfmodel.specs.engine.offload import KvOffload
from perfmodel.specs.engine.speculation import SpeculativeConfig


class KvEviction(Spec):
    """Keeps the `heavy_tokens` of a sequence with the highest accumulated scores and its `recent_tokens` newest."""

    method: Literal["h2o"] = "h2o"
    heavy_tokens: PositiveInt
    recent_tokens: PositiveInt

    @property
    def num_tokens(self) -> int:
        """Most tokens that a sequence keeps."""
        return self.heavy_tokens + self.recent_tokens


class KvTier(Spec):
    """The precision of the next older `tokens` of a sequence (None: all that are older), newest tier first."""

    tokens: PositiveInt | None = None
    dtype: str = "auto"


class PromptCompression(Spec):
    """Prompts are shortened to the share `ratio` of their tokens before they are computed.

    model: reads each prompt in full to do so, on a device like the scenario's; None: shortening costs nothing"""

    ratio: Annotated[float, Field(gt=0, le=1)]
    model: Annotated[ModelSpec, Resolved("A name in workloads/models, or a path")] | None = None


# Linear modules of a decoder that may have adapters, as vLLM calls them.
LoraModule = Literal["qkv_proj", "o_proj", "gate_up_proj", "down_proj", "embed_tokens", "lm_head"]


class StructuredOutputsConfig(Spec):
    """vLLM's, for answers of a required shape."""

    backend: Literal["auto", "xgrammar", "guidance"] = "auto"  # who makes their masks; auto: xgrammar


class EplbConfig(Spec):
    """vLLM's: how many copies of popular experts there are beside one of each, placed by the tokens of the last
    `window_size` steps every `step_interval` steps."""

    num_redundant_experts: NonNegativeInt = 0
    window_size: PositiveInt = 1000
    step_interval: PositiveInt = 3000


class AfdConfig(Spec):
    """Feed-forward blocks on devices beside the attention ranks (`data_parallel_size`), as vLLM's afd-plugin calls
    it."""

    num_ffn_servers: PositiveInt = 1  # all of which see every token
    ffn_tensor_parallel_size: PositiveInt = 8  # devices of each, which gather tokens from each other
    num_afd_stages: PositiveInt = 3  # micro-batches of a step, on their way at the same time

    @property
    def num_ffn_devices(self) -> int:
        return self.num_ffn_servers * self.ffn_tensor_parallel_size


class PoolerConfig(Spec):
    """vLLM's: which states of a prompt make its vector, instead of those that the model's repository says."""

    pooling_type: Literal["LAST", "CLS", "MEAN"]


def _about_flag(key: str) -> str:
    """Effect of a server flag; empty for none. Imported late: commands are described in terms of engines."""
    from perfmodel.specs.commands.description import about_flag

    return about_flag(key)


class EngineSpec(VariantSpec):
    """vLLM's arguments first, ours (batching, profile, ...) last.

    Where a scenario gives none, `gpu_memory_utilization`, `max_num_seqs`, `max_num_batched_tokens`, `block_size` and
    `async_scheduling` are those of the engine's version on the device (`perfmodel.specs.engine.spec`)."""

    discriminator = "batching"
    about_key: ClassVar = staticmethod(_about_flag)  # type: ignore[assignment]  # mypy takes the base's for a method
    used_by: ClassVar[UsedBy] = {"batch_timeout_ms": ("dynamic",)}

    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    data_parallel_size: PositiveInt = 1
    prefill_context_parallel_size: PositiveInt = 1
    decode_context_parallel_size: PositiveInt = 1
    enable_expert_parallel: bool = False
    enable_eplb: bool = False  # experts placed, and popular ones copied, so that ranks are loaded alike
    eplb_config: EplbConfig = EplbConfig()
    # How tokens of data-parallel ranks get to the experts of others: gathered on all ranks and reduced afterwards, or
    # sent to the ranks of their experts and back (all others; deepep_auto, SGLang's: high throughput in steps with
    # prompts, low latency in others); None: as the profile's engine does by default
    all2all_backend: (
        Literal[
            "allgather_reducescatter",
            "deepep_auto",
            "deepep_high_throughput",
            "deepep_low_latency",
            "flashinfer_all2allv",
            "pplx",
        ]
        | None
    ) = None
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    # How FP32 operands are multiplied in linear layers (torch.set_float32_matmul_precision): highest: as FP32; high: as
    # TF32, on tensor units that round them to 10 bits of mantissa
    float32_matmul_precision: Literal["highest", "high"] = "highest"
    # Whether FP16 products are summed in FP16 (torch.backends.cuda.matmul.allow_fp16_accumulation), which GeForce cards
    # do at twice the rate of sums in FP32
    allow_fp16_accumulation: bool = False
    quantization: str | None = None
    # Integer weights that share a scale, along the inputs of a layer; -1: one scale per output channel; None: as many
    # as the method's checkpoints have (128)
    quantization_group_size: Literal[-1, 32, 64, 128, 256] | None = None
    quantization_by_layer: tuple[LayerQuantization, ...] = ()  # layers or blocks in other formats than the rest
    # paged: blocks as tokens come; contiguous: one run of max_model_len tokens for each request (with reserve_output,
    # of its prompt and answer); off: nothing is kept, every step computes all tokens of each sequence
    kv_cache: Literal["paged", "contiguous", "off"] = "paged"
    kv_cache_dtype: str = "auto"
    # Recurrent states between steps (SGLang's mamba_ssm_dtype); auto: fp32, as the models' configurations say
    mamba_ssm_cache_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_cache_group_size: PositiveInt | None = None  # elements that share a scale and zero point; None: 32 below 8 bits
    kv_cache_residual_tokens: NonNegativeInt = 0  # the newest tokens of a sequence stay in the model's dtype
    kv_tiers: tuple[KvTier, ...] = ()  # precisions by age, newest first; instead of kv_cache_dtype
    kv_eviction: KvEviction | None = None
    kv_offload: KvOffload | None = None
    max_num_seqs: PositiveInt = 256
    max_num_batched_tokens: PositiveInt = 2048
    max_model_len: PositiveInt | None = None
    block_size: PositiveInt = 16
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    num_gpu_blocks_override: PositiveInt | None = None
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: NonNegativeInt = 0
    scheduler_reserve_full_isl: bool = True  # admit a prompt only when KV blocks for all of it are free
    enable_prefix_caching: bool = True
    # Layers with a window or a chunk keep all tokens in the blocks of the others, also where the engine could keep what
    # they see apart (`EngineFacts.kv_groups`)
    disable_hybrid_kv_cache_manager: bool = False
    enforce_eager: bool = False
    # lpm (longest cached prefix first), dfs-weight and lof (longest output first) are SGLang's
    scheduling_policy: Literal["fcfs", "priority", "shortest-first", "lpm", "dfs-weight", "lof"] = "fcfs"
    async_scheduling: bool = True
    # Of engines for a single machine: what the kernels are run with (None: the device's own), tokens of a piece that a
    # step is computed in (0: whole), devices that the layers are split over, which work one after another, and layers
    # on them, the output among these (None: all; the others are computed by `cpu`, a name in hardware_specs, from the
    # host's memory)
    backend: Backend | None = None
    ubatch_size: NonNegativeInt = 0
    layer_split: PositiveInt = 1
    n_gpu_layers: NonNegativeInt | None = None
    cpu: str | None = None
    batching: Literal["continuous", "iteration", "dynamic", "static", "none"] = "continuous"
    # dynamic batching: start a partial batch after this wait
    batch_timeout_ms: Milliseconds = Field(default=100.0, ge=0)
    # Which engine: a name in hardware_specs/engines, whose facts and fits count; or one's own server's, as `perfmodel
    # calibrate --name` called it, which stands for its engine and `calibration`
    profile: str = "vllm"
    calibration: str | None = None  # the file of one's own server's host and front end, in place of the engine's
    version: str | None = None  # of that engine, as its --version prints it; None: the newest described
    prefill_exclusive: bool | None = None  # steps of prompts or of decodes, never both; None: as the profile's engine
    # Admit with KV blocks for the whole answer, or for its length rounded up to a power of two; None: as the profile's
    reserve_output: bool | Literal["pow2"] | None = None
    poll_every: PositiveInt = 1  # decodes between looks at arrivals while busy (SGLang's scheduler_recv_interval)
    # Steps that a prompt on one data-parallel rank waits for the others to have one, too; 0: it does not wait
    # (TensorRT-LLM's attention_dp_config with enable_balance: timeout_iters)
    attention_dp_timeout_iters: NonNegativeInt = 0
    split_kv: bool = True  # decode attention split over the KV length (flash-decoding)
    attention: Literal["flash", "standard"] = "flash"
    # Generation of FlashAttention (vLLM's attention_config.flash_attn_version); None: that of the calibrated kernels
    flash_attn_version: Literal[1, 2, 3] | None = None
    fused_kernels: bool = True
    inference_mode: bool = True  # no gradients: activations are dropped at once; costs memory, not time, without
    speculative_config: SpeculativeConfig | None = None
    enable_lora: bool = False  # requests name LoRA adapters (`traffic.adapters`)
    max_loras: PositiveInt = 1  # slots for adapters on each device, as many as one step may have
    max_cpu_loras: PositiveInt | None = None  # adapters in the host's memory, those in slots, too; None: `max_loras`
    max_lora_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = 16  # of a slot, whatever an adapter's own is
    lora_target_modules: tuple[LoraModule, ...] | None = None  # that have adapters; None: all, with embedding and head
    disable_chunked_mm_input: bool = False  # no chunk of a prompt ends within an image
    mm_processor_cache_gb: NonNegativeFloat = 4.0  # GiB of processed images that an API server keeps
    media_loading_threads: PositiveInt = 8  # of an API server, that decode files (VLLM_MEDIA_LOADING_THREAD_COUNT)
    mm_encoder_tp_mode: Literal["weights", "data"] = "weights"  # that ranks share out: the encoder's, or whole images
    # What the engine returns: text, or of each prompt a vector or scores; auto: what the model is for
    runner: Literal["auto", "generate", "pooling"] = "auto"
    convert: Literal["auto", "embed", "classify"] = "auto"  # of a model under `runner: pooling`: to a vector, or scores
    pooler_config: PoolerConfig | None = None
    # Processes of the front end of a replica, each of which tokenises and answers one request after another; None: one
    # for each data-parallel rank
    api_server_count: PositiveInt | None = None
    # Two-batch overlap: steps of so many tokens on each rank are computed in two halves, the messages of one of which
    # travel while the other computes (SGLang's enable_two_batch_overlap; it splits from two tokens on)
    enable_dbo: bool = False
    dbo_decode_token_threshold: int = Field(default=32, ge=2)
    dbo_prefill_token_threshold: int = Field(default=512, ge=2)
    structured_outputs_config: StructuredOutputsConfig = (
        StructuredOutputsConfig()
    )  # read with traffic.structured_outputs
    mm_encoder_only: bool = False  # has the encoder of images alone, as engines of encode pools always do
    afd_config: AfdConfig | None = None  # feed-forward blocks on devices of their own

    @property
    def num_host_adapters(self) -> int:
        """Adapters in the host's memory, those in slots among them."""
        return self.max_cpu_loras or self.max_loras

    @property
    def overlap_from(self) -> tuple[int, int] | None:
        """Tokens from which steps without and with prompts are split in two halves; None: none are."""
        return (self.dbo_decode_token_threshold, self.dbo_prefill_token_threshold) if self.enable_dbo else None

    @property
    def plans_ahead(self) -> bool:
        """Whether the next step is planned during one; with drafts, if the engine does so for the method."""
        drafts = self.speculative_config
        can = drafts is None or (drafts.method in self.rules.drafts_ahead and not drafts.pipelined)
        return self.async_scheduling and can

    @property
    def defers_frees(self) -> bool:
        """Whether an engine that exchanges KV frees no blocks that a plan in flight may write."""
        return self.rules.defers_frees and (self.plans_ahead or self.pipeline_parallel_size > 1)

    @property
    def gathers_tokens(self) -> bool:
        """Whether data-parallel ranks gather all tokens for their shared experts, routed there or not."""
        backend = self.all2all_backend or self.described.facts.defaults.all2all_backend
        return backend == "allgather_reducescatter"

    @property
    def described(self) -> DescribedEngine:
        """Engine and facts for `profile` and `version`. Raises SpecError for no engine."""
        return describe_engine(self.profile, self.version)

    @property
    def rules(self) -> BatchingRules:
        """Batching rules of the engine, overlaid by the scenario's."""
        own = self.described.facts.batching
        is_asked = own.chunks_prompts or "enable_chunked_prefill" in self.model_fields_set
        chunks = self.enable_chunked_prefill and is_asked
        update: dict[str, bool] = {"chunks_prompts": chunks}
        if chunks and not own.chunks_prompts:  # vLLM's V0: whole prompts alone, or chunks beside decodes
            update["prefill_exclusive"] = False
        if self.prefill_exclusive is not None:
            update["prefill_exclusive"] = self.prefill_exclusive
        if self.reserve_output is not None:
            update["reserves_output"] = bool(self.reserve_output)
        return own.model_copy(update=update)

    @property
    def sequence_limits(self) -> tuple[int, int]:
        """(running sequences, sequences per plan on pipeline stages; 0: unlimited)."""
        most, num_stages = self.max_num_seqs, self.pipeline_parallel_size
        shared = self.described.facts.batching.sequences_on_stages
        if num_stages == 1 or shared == "shared":
            return most, 0
        return (most, max(most // num_stages, 1)) if shared == "even_share" else (most * num_stages, most)

    @property
    def captured_tokens(self) -> int:
        """Tokens of the largest step in a CUDA graph; 0 without graphs."""
        if self.enforce_eager:
            return 0
        return self.described.facts.graphs.most(self.max_num_seqs, self.max_num_batched_tokens, self._drafted)

    @property
    def padded_rank_tokens(self) -> tuple[int, int]:
        """Tokens up to which data-parallel ranks pad steps that only decode, and steps with prompts; 0: none."""
        facts, most = self.described.facts, self.captured_tokens
        if facts.batching.pads_ranks == "always":
            # DeepEP's kernels for many tokens cannot be captured: with them no graphs are, and nothing is padded.
            budget = self.max_num_batched_tokens if most and self.all2all_backend != "deepep_high_throughput" else 0
            return budget, budget
        has_prompts = facts.graphs.with_prompts and "data_parallel" not in facts.graphs.prompts_without
        return most, most if has_prompts else 0

    @property
    def num_graphs(self) -> int:
        """CUDA graphs that are captured: of steps that decode, and of those with prompts where the engine does that."""
        graphs = self.described.facts.graphs
        sizes = graphs.sizes_up_to(self.captured_tokens)
        decodes = sum(size <= self.max_num_seqs * (1 + self._drafted) for size in sizes)
        return decodes + (len(sizes) if graphs.with_prompts else 0)

    @property
    def _drafted(self) -> int:
        return 0 if self.speculative_config is None else self.speculative_config.num_speculative_tokens or 0

    @property
    def num_devices(self) -> int:
        ranks = self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size
        ffn = self.afd_config.num_ffn_devices if self.afd_config is not None else 0
        return ranks * self.prefill_context_parallel_size * self.layer_split + ffn

    @property
    def kv_block_tokens(self) -> int:
        """Tokens of a sequence in a KV block, of which each rank of decode context parallelism keeps `block_size`."""
        return self.block_size * self.decode_context_parallel_size

    def _conflicts(self) -> Iterator[str]:
        yield from super()._conflicts()
        both_given = {"max_num_batched_tokens", "max_num_seqs"} <= self.model_fields_set
        # vLLM refuses this too: a running batch must fit the budget with one token each.
        if both_given and self.batching == "continuous" and self.max_num_batched_tokens < self.max_num_seqs:
            yield (
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}; "
                f"raise the first or lower the second"
            )
        if self.quantization_group_size is not None and self.quantization is None:
            yield (
                f"got quantization_group_size={self.quantization_group_size} without quantization; name the format "
                f"whose weights share scales, as in w4a16"
            )
        if self.flash_attn_version is not None and self.attention != "flash":
            yield (
                f"got flash_attn_version={self.flash_attn_version} with attention={self.attention}; set that to "
                f"flash, or leave the version out"
            )
        if self.speculative_config is not None and self.pipeline_parallel_size > 1:
            yield (
                f"got speculative_config with pipeline_parallel_size={self.pipeline_parallel_size}; drafts are "
                f"verified by one stage at a time and would leave the others idle, which is not modelled: set it to 1"
            )
        if (self.n_gpu_layers is None) != (self.cpu is None):
            given, missing = ("n_gpu_layers", "cpu") if self.cpu is None else ("cpu", "n_gpu_layers")
            yield (
                f"got {given}={getattr(self, given)} without {missing}; layers that are not on the device are "
                f"computed by the host's CPU: give both, or leave both out"
            )
        copies = self.eplb_config.num_redundant_experts
        if self.enable_eplb and not self.enable_expert_parallel:
            yield "got enable_eplb without enable_expert_parallel; experts are whole only with the latter"
        if copies and not self.enable_eplb:
            yield f"got num_redundant_experts={copies} without enable_eplb; set that, or leave it out"
        yield from self._conflicts_of_kv()
        yield from self._conflicts_of_adapters()

    def _conflicts_of_adapters(self) -> Iterator[str]:
        names = ("max_loras", "max_cpu_loras", "max_lora_rank", "lora_target_modules")
        given = next((name for name in names if self._is_given(name)), None)
        if not self.enable_lora and given is not None:
            yield f"got {given} without enable_lora; set that, or leave it out"
        if self.num_host_adapters < self.max_loras:
            yield (
                f"got max_cpu_loras={self.max_cpu_loras}; expected at least max_loras={self.max_loras}, as adapters in "
                f"slots are in the host's memory, too"
            )
        others = ("speculative_config", "pipeline_parallel_size", "n_gpu_layers")
        other = next((name for name in others if self._is_given(name)), None)
        if self.enable_lora and other is not None:
            yield f"got enable_lora with {other}, which are not modelled together; leave one of them out"

    def _conflicts_of_kv(self) -> Iterator[str]:
        names = ("kv_tiers", "kv_eviction", "kv_offload", "kv_cache_residual_tokens")
        used = [name for name in names if getattr(self, name)]
        given = {"kv_cache": self.kv_cache != "paged", "speculative_config": self.speculative_config is not None}
        others = [*used, *(name for name, is_given in given.items() if is_given)]
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if (size := getattr(self, name)) > 1 and others:
                yield (
                    f"got {others[0]} with {name}={size}, which is modelled for plain KV blocks without drafts; leave "
                    f"one of them out"
                )
        if self.kv_cache == "off" and used:
            yield f"got {used[0]} with kv_cache=off, which keeps no keys and values; leave one of them out"
        if self.kv_cache == "contiguous" and self.kv_offload:
            yield (
                "got kv_offload with kv_cache=contiguous, whose requests keep their reservation until they are done, "
                "so that nothing would ever be moved; use kv_cache=paged"
            )
        if self.kv_offload is not None and self.kv_offload.load == "async":
            plain = {"batching": "continuous", "speculative_config": None}
            for name in [name for name, value in plain.items() if getattr(self, name) != value]:
                yield (
                    f"got kv_offload.load=async with {name}={getattr(self, name)}, which is not modelled together; set "
                    f"kv_offload.load=step, or leave {name} out"
                )
        if self.speculative_config is not None and self.kv_cache == "off":
            yield (
                "got speculative_config with kv_cache=off, where every step computes all tokens of a sequence, drafted "
                "ones with them; keep the KV cache"
            )
        if self.speculative_config is not None and self.kv_eviction is not None:
            yield (
                "got speculative_config with kv_eviction; a drafted token that turns out wrong has evicted others and "
                "counted in their scores by then, which cannot be taken back: leave one of them out"
            )
        residual = self.kv_cache_residual_tokens
        if self.kv_tiers and (self.kv_cache_dtype != "auto" or residual):
            other = "kv_cache_residual_tokens" if residual else "kv_cache_dtype"
            yield f"got kv_tiers beside {other}, which set the same thing; leave {other} out"
        if self.kv_tiers and (oldest := self.kv_tiers[-1].tokens) is not None:
            yield f"kv_tiers: got tokens={oldest} in the last tier, which takes all older tokens; leave it out"
        if any(tier.tokens is None for tier in self.kv_tiers[:-1]):
            yield "kv_tiers: got a tier without tokens before the last; only the last takes all older tokens"
        if not self.kv_tiers and residual and self.kv_cache_dtype == "auto":
            yield (
                f"got kv_cache_residual_tokens={residual} with kv_cache_dtype=auto, where all tokens are in the "
                f"model's dtype; name the format of the older ones, as in int4"
            )
        formats = [tier.dtype for tier in self.kv_tiers] or [self.kv_cache_dtype]
        if self.kv_cache_group_size is not None and not any(name in GROUPED_FORMATS for name in formats):
            yield (
                f"got kv_cache_group_size={self.kv_cache_group_size} with kv_cache_dtype={formats[-1]}, which has no "
                f"scales in groups; leave it out, or use one of {', '.join(GROUPED_FORMATS)}"
            )
