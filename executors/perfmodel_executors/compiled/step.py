"""The kernels of one whole step of a scenario, compiled for its hardware: the decoder runs on the `meta` device, where
tensors have shapes and no memory, with its launches recorded."""

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from perfmodel.ops.work import BatchShape
from perfmodel.specs.scenario import Scenario
from perfmodel_executors.compiled.build import compile_launch, device_limits
from perfmodel_executors.kernels.dispatch import load_kernels
from perfmodel_executors.kernels.kv_pages import Chunks
from perfmodel_executors.kernels.launch import Launch, recording
from perfmodel_executors.kernels.tiles import targeting
from perfmodel_executors.models.batch import StepBatch
from perfmodel_executors.models.decoder import Decoder, load_decoder

META = torch.device("meta")


def explain_occupancy(
    scenario: Scenario, shape: BatchShape, progress: Callable[[int, int], None] | None = None
) -> list[dict[str, Any]]:
    """The distinct kernels of a step of `shape`, in the order of their first launch; waves: how often the blocks of one
    launch fill the device. Raises SpecError for hardware that Triton kernels are not built for, PerfmodelError for a
    model that is not executed."""
    hardware = scenario.hardware
    limits = device_limits(hardware)
    decoder = load_decoder(scenario.model, scenario.engine, device=META, kernels=load_kernels("triton"))
    with targeting(limits), recording() as launches, torch.inference_mode():
        record_step(decoder, scenario.engine.block_size, shape)
    grouped: dict[tuple[object, ...], list[Launch]] = {}
    for launch in launches:
        grouped.setdefault((launch.name, str(launch.constants), launch.options, launch.grid), []).append(launch)
    result = []
    for done, group in enumerate(grouped.values(), 1):
        first, blocks, kernel = group[0], math.prod(group[0].grid), compile_launch(group[0], hardware)
        row = {
            "kernel": first.name,
            "tile": " ".join(f"{name}={value}" for name, value in first.constants.items()),
            "count": len(group),
            "blocks": blocks,
            "waves": blocks / (kernel.occupancy.blocks * hardware.declared.compute_units),
            "warps": first.options.num_warps,
            "stages": first.options.num_stages,
            **asdict(kernel.facts),
            "blocks_per_unit": kernel.occupancy.blocks,
            "occupancy": kernel.occupancy.fraction,
            "limited_by": kernel.occupancy.limited_by,
        }
        result.append(row)
        if progress is not None:
            progress(done, len(grouped))
    return result


def record_step(decoder: Decoder, block_size: int, shape: BatchShape) -> None:
    """Takes a step of `shape` with a decoder on `meta`, for what is recorded of it."""

    def empty(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int64, device=META)

    chunks, context = len(shape.prefills), -(-shape.decode_context // max(1, shape.num_decodes))
    lengths = [new + done for new, done in shape.prefills]
    batch = StepBatch(
        *(empty(shape.num_tokens), empty(shape.num_tokens), empty(shape.num_tokens)),
        *(empty(shape.num_decodes, -(-context // block_size)), empty(shape.num_decodes)),
        Chunks(empty(chunks, -(-max(lengths, default=0) // block_size)), empty(chunks + 1), empty(chunks)),
        empty(shape.num_samples),
    )
    num_blocks = -(-(shape.decode_context + sum(lengths)) // block_size) + shape.num_decodes + chunks
    decoder.next_tokens(batch, decoder.new_cache(block_size, num_blocks))
