"""Kernels and bytes that `fused_kernels: false` counts are those that PyTorch launches for modules written plainly."""

import pytest

torch = pytest.importorskip("torch", reason="the modules are PyTorch's")
functional = torch.nn.functional

from plain_modules import (  # noqa: E402
    GatedMLP,
    Layer,
    RMSNorm,
    attend,
    counted,
    rotated,
    routed,
    sum_of_experts,
)

from perfmodel.models.architecture import MoEFFN  # noqa: E402
from perfmodel.ops import BatchShape, Work, build_graph, decode_shape  # noqa: E402
from perfmodel.ops.attention.decode import attention_decode  # noqa: E402
from perfmodel.ops.attention.prefill import Heads, standard_prefill  # noqa: E402
from perfmodel.ops.elementwise import (  # noqa: E402  # noqa: E402  # noqa: E402
    activation,
    gate,
    kv_concat,
    kv_write,
    residual_add,
    rms_norm,
    rope,
)
from perfmodel.ops.feedforward import experts, route  # noqa: E402
from perfmodel.ops.formats import linear_format  # noqa: E402
from perfmodel.ops.routing import ExpertLoad  # noqa: E402
from perfmodel.specs import EngineSpec, load_model  # noqa: E402

N, D, DIM = 48, 1024, 64  # tokens, width, of a head
PLAIN = EngineSpec(enforce_eager=True, fused_kernels=False, attention="standard", dtype="bfloat16")
DTYPES = [("bf16", torch.bfloat16), ("fp32", torch.float32)]


def holds(run, *works: Work) -> None:
    """As many kernels, and bytes to a few per cent (rows of statistics, masks and tables are not counted)."""
    count = counted(run)
    assert sum(work.num_kernels for work in works) == count.num_kernels
    assert sum(work.hbm_bytes for work in works) == pytest.approx(count.num_bytes, rel=0.04)


def heads_of(kv_heads: int, dtype: str, size: float) -> Heads:
    return Heads(16, kv_heads, DIM, DIM, dtype, size, size)


@pytest.mark.parametrize(("name", "dtype"), DTYPES)
def test_norm_and_residual(name, dtype):
    x, size = torch.randn(N, D, dtype=dtype), dtype.itemsize
    norm = RMSNorm(D).to(dtype)
    holds(lambda: norm(x), rms_norm("norm", N, D, size, is_fused=False))
    holds(lambda: x + x, residual_add("add", N, D, size))


@pytest.mark.parametrize(("name", "dtype"), DTYPES)
def test_rotation(name, dtype):
    q, k = torch.randn(1, 16, N, DIM, dtype=dtype), torch.randn(1, 4, N, DIM, dtype=dtype)
    table = q.new_ones(1, 1, N, DIM)
    work = rope(N, 20 * DIM, dtype.itemsize, is_fused=False)
    count = counted(lambda: (rotated(q, table, table), rotated(k, table, table)))
    assert work.num_kernels == count.num_kernels
    tables = 4 * table.numel() * dtype.itemsize  # read by two products each; they stay in cache
    assert work.hbm_bytes == pytest.approx(count.num_bytes - tables)


@pytest.mark.parametrize(("name", "dtype"), DTYPES)
def test_activations_and_gates(name, dtype):
    x, y, size = torch.randn(N, D, dtype=dtype), torch.randn(N, D, dtype=dtype), dtype.itemsize
    gelu, silu = functional.gelu, functional.silu
    holds(lambda: silu(x) * y, activation(N, D, size, is_fused=False))
    holds(lambda: gelu(x), activation(N, D, size, function="gelu", is_gated=False, is_fused=False))
    relu2 = activation(N, D, size, function="relu2", is_gated=False, is_fused=False)
    holds(lambda: torch.relu(x).square(), relu2)
    holds(lambda: x * torch.sigmoid(y), gate("gate", N, D, size, is_fused=False))


@pytest.mark.parametrize("batch", [1, 3])
def test_a_cache_that_grows_or_is_filled(batch):
    cache, new = torch.randn(batch, 4, 500, DIM), torch.randn(batch, 4, 1, DIM)
    grown = kv_concat("kv", 1, batch * 501 * 8 * DIM * 4, batch * 8 * DIM, (4, 4))
    holds(lambda: [torch.cat((cache, new), dim=-2) for _ in "kv"], grown)
    count = counted(lambda: [cache.index_copy_(2, torch.tensor([7]), new) for _ in "kv"])
    filled = kv_write(batch, 8 * DIM, 4, 4, is_fused=False)
    assert count.num_kernels - 2 == filled.num_kernels  # without making the index


@pytest.mark.parametrize("kv_heads", [16, 4])
@pytest.mark.parametrize(("name", "dtype"), DTYPES)
def test_attention_of_a_decode(name, dtype, kv_heads):
    context, batch = 600, 3
    q = torch.randn(batch, 16, 1, DIM, dtype=dtype)
    k = torch.randn(batch, kv_heads, context, DIM, dtype=dtype)
    heads = heads_of(kv_heads, name, dtype.itemsize)
    work = attention_decode(batch, batch * context, heads, is_flash=False, is_fused=False, is_module=True)
    mask = q.new_zeros(1, 1, 1, context)
    holds(lambda: attend(q, k, k, mask), work)


@pytest.mark.parametrize("kv_heads", [16, 4])
@pytest.mark.parametrize(("name", "dtype"), DTYPES)
def test_attention_of_a_prompt(name, dtype, kv_heads):
    q = torch.randn(1, 16, 300, DIM, dtype=dtype)
    k = torch.randn(1, kv_heads, 300, DIM, dtype=dtype)
    work = standard_prefill([(300, 0)], heads_of(kv_heads, name, dtype.itemsize), is_fused=False, is_module=True)
    mask = torch.zeros(1, 1, 300, 300, dtype=dtype)
    holds(lambda: attend(q, k, k, mask), work)


def test_the_softmax_of_half_precision_casts_while_it_reads():
    """ATen, SoftMax.cpp: on a GPU, which the count on a CPU cannot show."""
    kernels = [heads_of(4, name, 2.0).module_scores[0] for name in ("fp16", "bf16")]
    assert kernels[0] == kernels[1] - 1


def test_router_and_experts():
    ffn, form = MoEFFN(4, 2, 512), linear_format(load_model("mixtral-8x7b"), "experts")
    logits, x = torch.randn(N, 4).bfloat16(), torch.randn(N, D).bfloat16()
    work = route(N, 4, 2, is_fused=False)
    assert work.num_kernels == counted(lambda: routed(logits, 2)).num_kernels
    weights, mask = routed(logits, 2)
    modules, total = [GatedMLP(D, 512).bfloat16() for _ in range(4)], torch.zeros_like(x)
    work = experts(N, ffn, ExpertLoad(4, 2 * N), form, width=D, intermediate=512, is_fused=False)
    assert work.num_kernels == counted(lambda: sum_of_experts(x, modules, weights, mask, total)).num_kernels


@pytest.mark.parametrize("shape", [decode_shape(1, 9), BatchShape(5, 1, ((5, 4),))], ids=["decode", "prompt"])
@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3.1-8b"])
def test_a_whole_layer(name, shape):
    """Kernels of one layer, however wide: from norm to residual sum."""
    model, tokens = load_model(name), shape.num_tokens
    kv_heads = 8 if name == "llama-2-7b" else 2
    layer = Layer(32, 8, kv_heads, 4, 64).bfloat16()
    x, mask, cache = (torch.zeros(*sizes).bfloat16() for sizes in ((1, tokens, 32), (1, 1, 1, 1), (1, kv_heads, 8, 4)))
    count = counted(lambda: layer(x, (cache, cache), mask, mask))
    nodes = [node for node in build_graph(model, PLAIN).nodes if node.count == model.num_layers]
    assert sum(node.work(shape).num_kernels for node in nodes) == count.num_kernels
