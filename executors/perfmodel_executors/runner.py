"""`StepRunner`: one rank's decoder, KV pool and graphs; takes steps as segments, in the way that is fastest."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from perfmodel.errors import PerfmodelError
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.formats import served_model
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.traffic import ExpertRouting
from perfmodel_executors.device import StepClock, default_kernels, device_clock, interprets_triton
from perfmodel_executors.graphs import Capture, CudaCapture, DecodeGraphs
from perfmodel_executors.kernels import load_kernels
from perfmodel_executors.kernels.tiles import tuning
from perfmodel_executors.models.batch import TokenSegment, build_batch
from perfmodel_executors.models.decoder import Decoder, load_decoder
from perfmodel_executors.models.kv_cache import HostPages, KVCache
from perfmodel_executors.models.random_weights import TRAINED
from perfmodel_executors.models.support import check_capturable, check_served, kv_packing
from perfmodel_executors.parallel.group import ALONE, TensorGroup
from perfmodel_executors.sampling import SamplingSettings


class Passes(Protocol):
    """Takes passes of a decoder, or of its heads; `graphs`: what decodes are replayed from."""

    decoder: Decoder
    cache: KVCache
    graphs: DecodeGraphs | None
    keeps_kv: bool

    def reserve_for(self, segments: Sequence[TokenSegment]) -> None: ...

    def run(self, segments: Sequence[TokenSegment], is_warm_up: bool = False) -> list[int]:
        """Sampled tokens in the order of `segments`. A warm-up may take its time to choose how such a step runs."""


class StepTaker(Protocol):
    """Takes the steps of an engine, in this process or elsewhere; as of `StepRunner`."""

    @property
    def model(self) -> ModelSpec: ...

    @property
    def block_size(self) -> int: ...

    @property
    def stage_ns(self) -> Sequence[int]: ...

    def new_clock(self) -> StepClock: ...

    def reserve_for(self, segments: Sequence[TokenSegment]) -> None: ...

    def release(self, first_block: int) -> None: ...

    def copy_blocks(self, out: Sequence[tuple[int, int]], back: Sequence[tuple[int, int]]) -> None: ...

    def run(self, segments: Sequence[TokenSegment], is_warm_up: bool = False) -> list[int]: ...

    def count_nan(self) -> int: ...


class StepRunner:
    """Takes steps: the new tokens of sequences in, the next token of each sampled one out, by one decoder; with
    `graphs`, decodes go there, and the pool must not have to grow. keeps_kv: without, each step computes whole
    sequences, and `cache` stays empty. stage_ns: what each pipeline stage took of the last step, by the runner's clock;
    empty where there is but one."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, graphs: DecodeGraphs | None = None, keeps_kv: bool = True
    ) -> None:
        self.decoder, self.cache, self.graphs = decoder, cache, graphs
        self.keeps_kv = keeps_kv
        self.host_pages = HostPages(cache)
        self.stage_ns: Sequence[int] = ()

    @property
    def model(self) -> ModelSpec:
        return self.decoder.model

    @property
    def block_size(self) -> int:
        return self.cache.block_size

    def count_nan(self) -> int:
        """How many logits were no numbers so far."""
        return self.decoder.chooser.num_nan

    def new_clock(self) -> StepClock:
        return device_clock(self.decoder.device)

    def reserve_for(self, segments: Sequence[TokenSegment]) -> None:
        self.cache.reserve_for([segment.block_table for segment in segments])

    def release(self, first_block: int) -> None:
        self.cache.states.release(first_block)

    def copy_blocks(self, out: Sequence[tuple[int, int]], back: Sequence[tuple[int, int]]) -> None:
        """Copy KV blocks to slots of the second tier, (block, slot) each, then from there, (slot, block)."""
        self.host_pages.copy(out, back)

    def send_blocks(self, blocks: Sequence[int], to: int) -> None:
        dist.send(self.cache.packed(blocks), to)

    def receive_blocks(self, blocks: Sequence[int], origin: int) -> int:
        """When they are in the cache, in nanoseconds of the machine's monotonic clock."""
        packed = self.cache.packed(blocks)
        dist.recv(packed, origin)
        self.cache.unpack(blocks, packed)
        return time.monotonic_ns()

    def run(self, segments: Sequence[TokenSegment], is_warm_up: bool = False) -> list[int]:
        with torch.inference_mode(), tuning() if is_warm_up else nullcontext():
            decoder = self.decoder
            # Run again, a chunk in a ring would read what it has overwritten, and a state would take tokens in twice.
            if is_warm_up and self.keeps_kv and (decoder.ring is not None or decoder.model.has_states):
                with self.cache.restored([segment.block_table for segment in segments]):
                    return self._run(segments)
            return self._run(segments)

    def _run(self, segments: Sequence[TokenSegment]) -> list[int]:
        if not segments:  # on a data-parallel rank without work
            self.decoder.assist()
            return []
        if self.graphs is not None and self.graphs.can_run(segments):
            return self.graphs.run(segments)
        decoder = self.decoder
        batch = build_batch(segments, self.cache.block_size, decoder.device, decoder.ring, self.keeps_kv)
        return decoder.step(batch, self.cache)

    def run_with_states(self, segments: Sequence[TokenSegment], is_warm_up: bool = False) -> tuple[list[int], Tensor]:
        """As `run`, without graphs; and what the last layer gives for all tokens, [T, C], in the rows of the batch."""
        decoder, cache = self.decoder, self.cache
        with torch.inference_mode(), tuning() if is_warm_up else nullcontext():
            batch = build_batch(segments, cache.block_size, decoder.device, decoder.ring)
            x_TC = decoder.through(batch, cache)
            if not len(batch.sample_rows_S):
                return [], x_TC
            return list(decoder.chooser.choose(decoder.logits(x_TC, batch), batch.draws_S).tolist()), x_TC

    def candidates(self, segments: Sequence[TokenSegment], count: int) -> list[list[int]]:
        if count == 1:
            return [[token] for token in self.run(segments)]
        with torch.inference_mode():
            batch = build_batch(segments, self.cache.block_size, self.decoder.device, self.decoder.ring)
            return self.decoder.chooser.candidates(self.decoder.forward(batch, self.cache), count)


@dataclass(frozen=True)
class RunnerSetup:
    """What a rank has to know to build its runner. num_blocks: KV blocks that the engine hands out, on a GPU allocated
    at once; sampling: None: the likeliest token is taken."""

    model: ModelSpec
    engine: EngineSpec
    num_blocks: int
    device: torch.device
    seed: int = 0
    kernels: str | None = None
    sampling: SamplingSettings | None = None
    routing: ExpertRouting = TRAINED
    num_adapters: int = 0

    @property
    def backend(self) -> str:
        return self.kernels or default_kernels(self.device)


def build_runner(setup: RunnerSetup, group: TensorGroup = ALONE, capture: Capture | None = None) -> StepRunner:
    """The runner of a rank of `group`. capture: how decode steps are captured; by default as CUDA graphs on a GPU, not
    at all on a CPU. Raises DoesNotFitError for too little memory, PerfmodelError for what is not executed yet."""
    model, engine, device = setup.model, setup.engine, setup.device
    if setup.backend == "triton" and device.type == "cpu" and not interprets_triton():
        raise PerfmodelError("triton kernels run on a GPU, and the scenario is for a CPU; use --kernels torch.")
    if setup.backend == "triton" and kv_packing(served_model(model, engine)) is not None:
        raise PerfmodelError("a KV cache with scales in groups is read by the torch kernels only; use --kernels torch.")
    check_served(model, engine)
    kernels = load_kernels(setup.backend, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if setup.num_adapters and (group.size > 1 or group.stage.num_stages > 1):
        raise PerfmodelError("adapters are executed on one rank; set engine.tensor_parallel_size to 1, or simulate it.")
    own = setup.sampling, setup.routing, setup.num_adapters
    decoder = load_decoder(model, engine, setup.seed, device, kernels, group, *own)
    # The torch definitions of some operators look at lengths on the host, which a graph cannot.
    if capture is None and device.type == "cuda" and setup.backend == "triton":
        capture = CudaCapture(device)
    if engine.kv_cache == "off" or (capture is None and device.type == "cpu"):
        return StepRunner(decoder, decoder.new_cache(engine.kv_block_tokens), keeps_kv=engine.kv_cache != "off")
    scratch = setup.num_blocks  # one block beside those that the engine hands out
    cache = decoder.new_cache(engine.kv_block_tokens, setup.num_blocks + 1)
    if capture is None or engine.enforce_eager:
        return StepRunner(decoder, cache)
    check_capturable(decoder.model, engine.attention, group.experts is not None, group.num_stripes, setup.num_adapters)
    context = engine.max_model_len or model.max_position_embeddings
    most_tokens, rules = engine.max_num_batched_tokens, engine.described.facts.graphs
    most = rules.most_with_prompts(engine.captured_tokens, most_tokens, has_latents=False, obstacles=())
    limits = (scratch, engine.max_num_seqs, context)
    return StepRunner(decoder, cache, DecodeGraphs(decoder, cache, *limits, capture, most))
