"""Rejection sampling keeps the target's distribution, whatever was drafted; and the test would notice if it did not.

Both models are Markov: a table gives the distribution of the next token from the last one, so the true distribution of
the next two tokens is known in closed form. Counts of the 25 pairs are compared with it by a chi-square test whose
false-alarm probability is 1e-6 per case (and the seeds are fixed, so a passing test goes on passing).
"""

from itertools import pairwise

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from scipy.stats import chi2  # noqa: E402

from perfmodel_executors.kernels import load_kernels  # noqa: E402
from perfmodel_executors.kernels import sampling as reference  # noqa: E402

VOCAB = 5
FALSE_ALARM = 1e-6
NUM_DRAWS = 40_000
CHAIN = [-1, 0, 1, 2]
TREE = [-1, 0, 0, 0, 1, 1, 2, 2, 3, 3]  # three candidates, then two behind each

kernels = load_kernels()


def tables(seed):
    generator = torch.Generator().manual_seed(seed)
    draw = torch.softmax(0.6 * torch.randn(2, VOCAB, VOCAB, generator=generator, dtype=torch.float64), dim=-1)
    return draw[0], draw[1], generator


def drawn(probabilities, generator):
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def iid_nodes(parents, draft, generator):
    """Nodes drawn from the draft's table independently of one another, and what each was drawn from."""
    tokens, from_q = [torch.zeros(NUM_DRAWS, dtype=torch.int64)], [torch.zeros(NUM_DRAWS, VOCAB, dtype=torch.float64)]
    for parent in parents[1:]:
        from_q.append(draft[tokens[parent]])
        tokens.append(drawn(from_q[-1], generator))
    return torch.stack(tokens, 1), torch.stack(from_q, 1)


def most_likely_nodes(parents, draft, generator):
    """The most likely successors of each node in turn: nothing is drawn, so each is certain."""
    tokens, from_q = [torch.zeros(NUM_DRAWS, dtype=torch.int64)], [torch.zeros(NUM_DRAWS, VOCAB, dtype=torch.float64)]
    for node, parent in enumerate(parents[1:], start=1):
        rank = sum(other == parent for other in parents[:node])
        tokens.append(draft[tokens[parent]].argsort(dim=1, descending=True)[:, rank])
        from_q.append(torch.nn.functional.one_hot(tokens[-1], VOCAB).double())
    return torch.stack(tokens, 1), torch.stack(from_q, 1)


def pairs(parents, nodes, rule=reference.verify_stochastic, seed=0):
    """How often each pair of next tokens came, [VOCAB, VOCAB], and what it should be; after the known token 0."""
    draft, target, generator = tables(seed)
    tokens, from_q = nodes(parents, draft, generator)
    uniform = torch.rand(tokens.shape, generator=generator, dtype=torch.float64)
    last, following = rule(tokens, parents, from_q, target[tokens], uniform)
    # The path to the last node, from its end: what came first is the node below the known token.
    first, second = following.clone(), drawn(target[following], generator)
    node = last
    while bool((node > 0).any()):
        token = tokens.gather(1, node[:, None])[:, 0]
        second = torch.where(node > 0, first, second)
        first = torch.where(node > 0, token, first)
        node = torch.where(node > 0, torch.tensor(parents)[node], node)
    counts = torch.zeros(VOCAB * VOCAB, dtype=torch.float64)
    counts.index_add_(0, first * VOCAB + second, torch.ones(NUM_DRAWS, dtype=torch.float64))
    expected = NUM_DRAWS * (target[0][:, None] * target).flatten()
    return counts, expected


def is_distributed_as(counts, expected):
    assert expected.min() > 5
    return ((counts - expected) ** 2 / expected).sum() < chi2.isf(FALSE_ALARM, len(expected) - 1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("nodes", [iid_nodes, most_likely_nodes])
@pytest.mark.parametrize("parents", [CHAIN, TREE, [-1]])
def test_tokens_are_distributed_as_the_targets(parents, nodes, seed):
    assert is_distributed_as(*pairs(parents, nodes, seed=seed))


def accepts_what_is_likely(tokens, parents, draft, target, uniform):
    """Wrong: keeps x with probability p(x), whatever it was drawn from."""
    return reference.verify_stochastic(tokens, parents, torch.ones_like(draft), target, uniform)


def forgets_the_residual(tokens, parents, draft, target, uniform):
    """Wrong: after a rejection draws from p, not from what the draft left of it."""
    last, _ = reference.verify_stochastic(tokens, parents, draft, target, uniform)
    at_last = target[torch.arange(len(last)), last]
    return last, (at_last.cumsum(1) <= uniform[:, :1]).sum(1).clamp_max(VOCAB - 1)


def takes_candidates_for_drawn_ones(tokens, parents, draft, target, uniform):
    """Wrong for the most likely candidates: their q is 1, not the draft's probability."""
    smoothed = 0.5 * draft + 0.5 / VOCAB
    return reference.verify_stochastic(tokens, parents, smoothed, target, uniform)


@pytest.mark.parametrize("rule", [accepts_what_is_likely, forgets_the_residual])
@pytest.mark.parametrize("parents", [CHAIN, TREE])
def test_a_wrong_rule_is_noticed(parents, rule):
    assert not is_distributed_as(*pairs(parents, iid_nodes, rule))


def test_the_wrong_draft_distribution_is_noticed():
    assert not is_distributed_as(*pairs(TREE, most_likely_nodes, takes_candidates_for_drawn_ones))


def test_a_draft_is_kept_as_often_as_the_distributions_overlap():
    """Leviathan et al. 2023, theorem 3.5: the acceptance rate is the sum of min(p, q)."""
    draft, target, generator = tables(4)
    tokens, from_q = iid_nodes([-1, 0], draft, generator)
    uniform = torch.rand(tokens.shape, generator=generator, dtype=torch.float64)
    last, _ = reference.verify_stochastic(tokens, [-1, 0], from_q, target[tokens], uniform)
    rate = torch.minimum(draft[0], target[0]).sum()
    spread = (rate * (1 - rate) / NUM_DRAWS) ** 0.5
    assert abs(last.double().mean() - rate) < 5 * spread


def test_greedy_keeps_the_path_that_the_target_would_have_taken():
    parents = [-1, 0, 0, 1, 1, 2, 5]
    tokens = torch.tensor([[9, 1, 2, 3, 4, 5, 6]] * 5)
    chosen = torch.tensor(
        [
            [1, 4, 0, 0, 0, 0, 0],  # 1, then 4
            [2, 3, 5, 0, 0, 6, 8],  # 2, 5, 6
            [7, 3, 5, 0, 0, 6, 8],  # nothing
            [1, 5, 5, 0, 0, 6, 8],  # 1 only
            [2, 3, 5, 0, 0, 6, 8],  # as the second, but the last two were not drafted
        ]
    )
    last = kernels.verify_greedy(tokens, parents, chosen, torch.tensor([7, 7, 7, 7, 5]))
    assert last.tolist() == [4, 6, 0, 1, 2]


def test_at_temperature_zero_both_rules_are_one():
    generator = torch.Generator().manual_seed(3)
    for parents in (CHAIN, TREE):
        tokens = torch.randint(0, 3, (500, len(parents)), generator=generator)
        chosen = torch.randint(0, 3, (500, len(parents)), generator=generator)
        for node, other in pairwise(range(1, len(parents))):  # siblings differ, as candidates of one node do
            if parents[node] == parents[other]:
                tokens[:, other] = (tokens[:, node] + 1) % 3
        certain, from_q = (torch.nn.functional.one_hot(x, 3).double() for x in (chosen, tokens))
        uniform = torch.rand(tokens.shape, generator=generator)
        counts = torch.randint(1, len(parents) + 1, (500,), generator=generator)
        last, following = kernels.verify_stochastic(tokens, parents, from_q, certain, uniform, counts)
        assert torch.equal(last, kernels.verify_greedy(tokens, parents, chosen, counts))
        assert torch.equal(following, chosen.gather(1, last[:, None])[:, 0])
