"""Each reference kernel against a definition written another way."""

import math

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from perfmodel.errors import PerfmodelError  # noqa: E402
from perfmodel_executors.kernels import KERNELS, load_kernels  # noqa: E402
from perfmodel_executors.kernels.attention_prefill import AttentionRule  # noqa: E402
from perfmodel_executors.kernels.kv_pages import Chunks, KVPages  # noqa: E402
from perfmodel_executors.kernels.moe import ExpertLayer  # noqa: E402
from perfmodel_executors.kernels.rope_kv_write import rope_table  # noqa: E402

BLOCK = 4


def dense_attention(q, k, v, positions, window=None, chunk=None):
    """One query at a time, one head at a time, in fp64."""
    num_heads, group = q.shape[1], q.shape[1] // k.shape[1]
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    for row, position in enumerate(positions):
        low = 0 if window is None else max(0, position - window + 1)
        low = low if chunk is None else max(low, position // chunk * chunk)
        for head in range(num_heads):
            keys = k[low : position + 1, head // group].double()
            scores = keys @ q[row, head].double() / math.sqrt(q.shape[2])
            out[row, head] = torch.softmax(scores, 0) @ v[low : position + 1, head // group].double()
    return out


def paged(sequences, generator):
    """Scatter dense [L, K, H] sequences into a shuffled page pool; returns (pages, tables)."""
    counts = [-(-len(s) // BLOCK) for s in sequences]
    order = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    pages = torch.randn(len(order), BLOCK, *sequences[0].shape[1:], generator=generator)
    tables = torch.zeros(len(sequences), max(counts), dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        for block in range(counts[row]):
            tables[row, block] = order.pop()
            part = sequence[block * BLOCK : (block + 1) * BLOCK]
            pages[tables[row, block], : len(part)] = part
    return pages, tables


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (5, None), (1, None), (None, 6), (100, 100)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_decode_attention_is_dense_attention_of_the_last_token(heads, kv_heads, window, chunk):
    generator = torch.Generator().manual_seed(heads)
    lengths = [1, 3, 4, 5, 17]
    k = [torch.randn(n, kv_heads, 8, generator=generator) for n in lengths]
    v = [torch.randn(n, kv_heads, 10, generator=generator) for n in lengths]
    q = torch.randn(len(lengths), heads, 8, generator=generator)
    seed = torch.Generator().manual_seed(1)
    k_pages, tables = paged(k, seed)
    v_pages, _ = paged(v, torch.Generator().manual_seed(1))
    rule = AttentionRule(window, chunk)
    out = load_kernels().attention_decode(q, KVPages(k_pages, v_pages), tables, torch.tensor(lengths), rule)
    for row, length in enumerate(lengths):
        expected = dense_attention(q[row : row + 1], k[row], v[row], [length - 1], window, chunk)
        torch.testing.assert_close(out[row : row + 1].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (5, None), (None, 6), (200, None)])
def test_prefill_attention_is_dense_attention_of_the_chunk(window, chunk):
    generator = torch.Generator().manual_seed(0)
    spans = [(0, 7), (3, 2), (4, 150), (130, 131)]  # (tokens computed before, new tokens); 150 needs two query tiles
    k = [torch.randn(p + t, 2, 8, generator=generator) for p, t in spans]
    v = [torch.randn(p + t, 2, 8, generator=generator) for p, t in spans]
    q = [torch.randn(t, 4, 8, generator=generator) for _, t in spans]
    k_pages, tables = paged(k, torch.Generator().manual_seed(1))
    v_pages, _ = paged(v, torch.Generator().manual_seed(1))
    starts = torch.tensor([0, *[t for _, t in spans]]).cumsum(0)
    computed = torch.tensor([p for p, _ in spans])
    pages, chunks = KVPages(k_pages, v_pages), Chunks(tables, starts, computed)
    out = load_kernels().attention_prefill(torch.cat(q), pages, chunks, AttentionRule(window, chunk))
    for row, (prefix, new) in enumerate(spans):
        expected = dense_attention(q[row], k[row], v[row], range(prefix, prefix + new), window, chunk)
        actual = out[starts[row] : starts[row + 1]].double()
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_nodes", [7, 19])  # few queries, and more than go to torch's own attention
def test_a_node_of_a_tree_attends_as_the_end_of_its_path(num_nodes):
    """And the last nodes of a tree alone as when the whole tree is computed at once."""
    generator = torch.Generator().manual_seed(2)
    prefix, parents = 10, [-1, *((node - 1) // 2 for node in range(1, num_nodes))]
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if node else []), node])
    k, v = (torch.randn(prefix + num_nodes, 2, 8, generator=generator) for _ in range(2))
    q = torch.randn(num_nodes, 4, 8, generator=generator)
    k_pages, tables = paged([k], torch.Generator().manual_seed(1))
    v_pages, _ = paged([v], torch.Generator().manual_seed(1))
    bits = torch.tensor([sum(1 << j for j in path) for path in paths])

    def attend(first):
        starts, computed = torch.tensor([0, num_nodes - first]), torch.tensor([prefix])
        nodes = torch.tensor([num_nodes]) if first else None
        chunks = Chunks(tables, starts, computed, bits[first:], nodes)
        return load_kernels().attention_prefill(q[first:], KVPages(k_pages, v_pages), chunks)

    out = attend(0)
    for node, path in enumerate(paths):
        seen = [*range(prefix), *(prefix + j for j in path)]
        expected = dense_attention(q[node : node + 1], k[seen], v[seen], [len(seen) - 1])
        torch.testing.assert_close(out[node : node + 1].double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(attend(3), out[3:])


@pytest.mark.parametrize("gated", [True, False])
def test_grouped_experts_equal_a_loop_over_tokens(gated):
    generator = torch.Generator().manual_seed(0)
    tokens, hidden, width, experts, top_k = 13, 8, 5, 6, 2
    x = torch.randn(tokens, hidden, generator=generator)
    up = torch.randn(experts, 2 * width if gated else width, hidden, generator=generator)
    down = torch.randn(experts, hidden, width, generator=generator)
    kernels = load_kernels()
    weights, chosen = kernels.route(torch.randn(tokens, experts, generator=generator), top_k)
    torch.testing.assert_close(weights.sum(-1), torch.ones(tokens))
    out = kernels.grouped_experts(x, weights, chosen, ExpertLayer(up, down, "silu", gated))
    for t in range(tokens):
        expected = torch.zeros(hidden)
        for weight, expert in zip(weights[t], chosen[t], strict=True):
            h = up[expert] @ x[t]
            h = torch.nn.functional.silu(h[:width]) * h[width:] if gated else torch.nn.functional.silu(h)
            expected += weight * (down[expert] @ h)
        torch.testing.assert_close(out[t], expected, rtol=1e-4, atol=1e-4)


def test_route_keeps_the_largest_probabilities():
    weights, experts = load_kernels().route(torch.tensor([[0.0, 2.0, 1.0, -1.0]]), 2)
    assert experts.tolist() == [[1, 2]]
    e1, e2 = math.exp(2.0), math.exp(1.0)
    torch.testing.assert_close(weights, torch.tensor([[e1 / (e1 + e2), e2 / (e1 + e2)]]))


def test_rms_norm_by_its_formula():
    generator = torch.Generator().manual_seed(0)
    x, residual, weight = (torch.randn(3, 8, generator=generator) for _ in range(3))
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight[0]
    torch.testing.assert_close(load_kernels().rms_norm(x, weight[0], 1e-5), expected)
    normed, total = load_kernels().add_rms_norm(x, residual, weight[0], 1e-5)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, load_kernels().rms_norm(x + residual, weight[0], 1e-5))


def test_rope_depends_on_relative_positions_only():
    table = rope_table(64, 8, 10_000.0, torch.float32)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 1, 8, generator=generator), torch.randn(1, 1, 8, generator=generator)
    rope = load_kernels().rope
    scores = [(rope(q, table[[p + 5]]) * rope(k, table[[p]])).sum() for p in (0, 1, 30)]
    torch.testing.assert_close(scores[1], scores[0])
    torch.testing.assert_close(scores[2], scores[0])
    torch.testing.assert_close(rope(q, table[[0]]), q)


def test_kv_write_fills_the_named_slots_only():
    k_pages, v_pages = torch.zeros(3, 2, 1, 4), torch.zeros(3, 2, 1, 4)
    k, v = torch.ones(2, 1, 4), torch.full((2, 1, 4), 2.0)
    load_kernels().kv_write(k, v, KVPages(k_pages, v_pages), torch.tensor([3, 4]))
    assert k_pages.flatten(0, 1)[:, 0, 0].tolist() == [0, 0, 0, 1, 1, 0]
    assert v_pages.flatten(0, 1)[:, 0, 0].tolist() == [0, 0, 0, 2, 2, 0]


def test_every_operator_has_a_reference_and_unknown_backends_are_refused():
    assert all("torch" in row for row in KERNELS.values())
    with pytest.raises(PerfmodelError, match="known backends: torch"):
        load_kernels("cuda-graphs")
