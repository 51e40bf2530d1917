"""No prediction beats the hardware: under every calibration, committed or passed on, for every device file.

FLOPs / t    <= the declared peak of the rate that the work is done at (attention whose kernel multiplies in FP8
                because its KV cache is FP8: FP8's)
bytes / t    <= the declared bandwidth of main memory, unless all bytes could sit in L2
message / t  <= the declared bandwidth of the link, for the bytes that any algorithm must send from a device: for an
                all-reduce 2 S (k-1)/k (Patarasuk and Yuan 2009), or S (1 + 1/k) where a switch adds; else S (k-1)/k
"""

from functools import cache
from typing import Any

import pytest
from devices import ONE_OF_EACH
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfmodel.cost import OperatorTimer, estimate_step, load_calibration
from perfmodel.cost.kernel_models.messages.links import link_for, path_of
from perfmodel.ops import build_graph
from perfmodel.ops.attention.decode import mixed_attention
from perfmodel.ops.attention.prefill import Heads
from perfmodel.ops.collectives import all_gather, all_reduce, all_to_all, reduce_scatter, send_recv
from perfmodel.ops.formats import LinearFormat
from perfmodel.ops.graphs.step import StepGraph
from perfmodel.ops.linear import gemm
from perfmodel.ops.messages import Message, Spread
from perfmodel.ops.work import BatchShape, Work
from perfmodel.specs import EngineSpec, list_models, load_hardware, load_model
from perfmodel.specs.hardware import Link

pytestmark = pytest.mark.release

ENGINES = ("vllm", "trtllm", "sglang", "datasheet")
SERVED: tuple[dict[str, Any], ...] = (
    {},
    {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    {"tensor_parallel_size": 2, "kv_cache_dtype": "fp8"},
    {"tensor_parallel_size": 8},
    {"tensor_parallel_size": 4, "quantization": "awq"},
    {"data_parallel_size": 8, "enable_expert_parallel": True},
)
FORMATS = (
    LinearFormat("bf16", 2.0, 2.0, 2.0),
    LinearFormat("fp16", 2.0, 2.0, 2.0),
    LinearFormat("fp8", 1.0, 1.0, 2.0, True),
    LinearFormat("fp8", 1.004, 1.0, 2.0, True, "fp8_block"),
    LinearFormat("int8", 1.0, 1.0, 2.0, True),
    LinearFormat("bf16", 0.53, 2.0, 2.0, name="int4_wo"),
    LinearFormat("fp4", 0.5625, 0.5625, 2.0, True, "nvfp4"),
)
MESSAGES = (all_reduce, all_gather, reduce_scatter, all_to_all)
ROUNDING = 1 + 1e-9
EXAMPLES = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])

sizes = st.integers(0, 17).flatmap(lambda e: st.integers(2**e, 2 ** (e + 1)))
tokens = st.integers(0, 13).flatmap(lambda e: st.integers(2**e, 2 ** (e + 1)))
prompts = st.lists(st.tuples(tokens, st.integers(0, 60_000)), max_size=3)
decodes = st.tuples(st.integers(0, 256), st.integers(1, 60_000))


@cache
def timer_of(device: str, engine: str) -> OperatorTimer:
    hardware = load_hardware(device)
    return OperatorTimer(hardware, load_calibration(hardware, engine))


@cache
def graph_of(model: str, served: int) -> StepGraph:
    return build_graph(load_model(model), EngineSpec(**SERVED[served]))


def peak(timer: OperatorTimer, work: Work) -> float:
    """Of the rate that the work is done at: its kernel's where the fit names one, else its own."""
    rate = work.message.kind if work.message else work.rate
    traits = work.problem.traits if work.problem is not None else None
    fit = timer.calibration.fit(work.family, rate, traits, work.format)
    return timer.device.peak(getattr(fit, "rate", None) or work.rate)


def least_sent(message: Message, link: Link) -> float:
    """Bytes that leave a device whatever the algorithm."""
    k, payload = message.num_ranks, message.bytes_
    if message.kind == "send_recv":
        return payload
    ring = (2 if message.kind == "all_reduce" else 1) * payload * (k - 1) / k
    return min(ring, payload * (1 + 1 / k)) if message.kind == "all_reduce" and link.has_switch else ring


def least_from_node(message: Message, spread: Spread) -> float:
    """Bytes that leave a device for other nodes whatever the algorithm: its share of what its node has to send."""
    k, payload, on_node = message.num_ranks, message.bytes_, spread.most
    if message.kind == "send_recv":
        return payload * spread.crossing
    if message.kind == "all_to_all":
        return 0.0 if message.exchange else payload * (k - on_node) / k
    return (2 if message.kind == "all_reduce" else 1) * payload * (k - on_node) / k / on_node


def beaten(timer: OperatorTimer, work: Work, duration_s: float | None = None) -> str:
    """The limit that the prediction for `work`, or another duration, beats, or nothing."""
    if not work.num_kernels or work.name in timer.calibration.contained:
        return ""
    device, seconds = timer.device, (duration_s or timer.time(work).duration_s) * ROUNDING
    about = f"{work.name} ({work.family}/{work.rate} {work.format}) {work.problem}"
    if work.flops > seconds * peak(timer, work):
        return f"{work.flops / seconds / peak(timer, work):.2f} of the peak rate: {about}"
    streamed = work.weight_bytes + work.kv_bytes
    least = max(streamed if streamed > device.l2_bytes else 0.0, work.hbm_bytes - device.l2_bytes)
    if least > seconds * device.bandwidth:
        return f"{least / seconds / device.bandwidth:.2f} of the bandwidth: {about}"
    if work.message is not None:
        group = work.message.group or work.message.num_ranks
        link, spread = link_for(device.hardware, group), path_of(device.hardware, group)
        sent = least_sent(work.message, link) if spread.num_nodes == 1 else least_from_node(work.message, spread)
        if sent > seconds * link.bandwidth_bytes_per_s:
            return f"{sent / seconds / link.bandwidth_bytes_per_s:.2f} of {link.name}: {about}"
    return ""


def test_the_laws_notice_what_beats_them() -> None:
    """Predictions for a device with twice everything, held against the device."""
    twice = [f"hardware.{name}=2x" for name in ("bf16", "hbm.bandwidth", "nvlink.bandwidth")]
    fast = load_hardware("h100-sxm-80gb", twice)
    slow = timer_of("h100-sxm-80gb", "datasheet")
    cheat = OperatorTimer(fast, slow.calibration)
    for work in (gemm("a", 8192, 8192, 8192, FORMATS[0]), gemm("b", 1, 16384, 16384, FORMATS[0]), all_reduce(1e9, 8)):
        assert not beaten(slow, work)
        assert beaten(slow, work, cheat.time(work).duration_s)


@pytest.mark.parametrize("device", ONE_OF_EACH)
@EXAMPLES
@given(
    engine=st.sampled_from(ENGINES),
    model=st.sampled_from(list_models()),
    served=st.integers(0, len(SERVED) - 1),
    prefills=prompts,
    decoding=decodes,
)
def test_steps_of_models(
    device: str,
    engine: str,
    model: str,
    served: int,
    prefills: list[tuple[int, int]],
    decoding: tuple[int, int],
) -> None:
    graph, timer = graph_of(model, served), timer_of(device, engine)
    num_decodes, context = decoding
    num_samples = num_decodes + len(prefills)
    shape = BatchShape(
        num_tokens=sum(new for new, _ in prefills) + num_decodes,
        num_samples=num_samples,
        prefills=tuple(prefills),
        num_decodes=num_decodes,
        decode_context=num_decodes * context,
        decode_windowed=tuple(num_decodes * min(context, span) for span in graph.model.attention_spans),
    )
    if num_samples:
        rows = estimate_step(graph, timer, shape).rows
        assert [found for row in rows if (found := beaten(timer, row.work))] == []


@pytest.mark.parametrize("device", ONE_OF_EACH)
@EXAMPLES
@given(engine=st.sampled_from(ENGINES), m=sizes, n=sizes, k=sizes, form=st.sampled_from(FORMATS))
def test_multiplications(device: str, engine: str, m: int, n: int, k: int, form: LinearFormat) -> None:
    assert not beaten(timer_of(device, engine), gemm("gemm", m, n, k, form))


@pytest.mark.parametrize("device", ONE_OF_EACH)
@EXAMPLES
@given(
    engine=st.sampled_from(ENGINES),
    prefills=prompts.filter(bool),
    decoding=decodes.filter(lambda found: found[0] > 0),
    kv_heads=st.sampled_from([1, 2, 8]),
    group=st.sampled_from([1, 4, 8, 16]),
    head_dim=st.sampled_from([64, 128, 256]),
    kv_bytes=st.sampled_from([1.0, 2.0]),
)
def test_prompts_and_decodes_in_one_kernel(
    device: str,
    engine: str,
    prefills: list[tuple[int, int]],
    decoding: tuple[int, int],
    kv_heads: int,
    group: int,
    head_dim: int,
    kv_bytes: float,
) -> None:
    heads = Heads(kv_heads * group, kv_heads, head_dim, head_dim, "bf16", 2.0, kv_bytes)
    num_decodes, context = decoding
    work = mixed_attention(prefills, num_decodes, num_decodes * context, heads)
    assert not beaten(timer_of(device, engine), work)


@pytest.mark.parametrize("device", ONE_OF_EACH)
@EXAMPLES
@given(
    engine=st.sampled_from(ENGINES),
    collective=st.sampled_from(MESSAGES),
    payload=st.floats(10, 2**33),
    ranks=st.sampled_from([2, 4, 8, 16, 32]),
)
def test_messages(device: str, engine: str, collective: Any, payload: float, ranks: int) -> None:
    timer = timer_of(device, engine)
    assert not beaten(timer, collective(payload, ranks))
    assert not beaten(timer, send_recv(payload))
