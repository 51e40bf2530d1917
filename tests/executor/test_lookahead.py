"""Lookahead decoding: a window that is the model's own Jacobi iteration, a pool that comes of it, a count as priced."""

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from executor_models import MODELS  # noqa: E402

from perfmodel.specs.engine.spec import EngineSpec  # noqa: E402
from perfmodel.specs.engine.speculation import SpeculativeConfig  # noqa: E402
from perfmodel_executors.models.batch import TokenSegment  # noqa: E402
from perfmodel_executors.models.decoder import Decoder  # noqa: E402
from perfmodel_executors.runner import StepRunner  # noqa: E402
from perfmodel_executors.speculation.build import build_speculator  # noqa: E402
from perfmodel_executors.speculation.lookahead import NgramPool  # noqa: E402
from perfmodel_executors.speculation.proposer import Drafting  # noqa: E402

BLOCK_SIZE = 4
PROMPT = [7, 3, 99, 12, 5, 41, 7, 8, 60, 2]
TABLE = list(range(24))
DECODER = Decoder(MODELS["gqa"], torch.float32, seed=1)
SHAPE = {"window": 3, "ngram": 4, "guesses": 2}


def speculator():
    config = SpeculativeConfig(method="lookahead", lookahead=SHAPE)
    runner = StepRunner(DECODER, DECODER.new_cache(BLOCK_SIZE, len(TABLE)))
    return build_speculator(runner, EngineSpec(speculative_config=config, block_size=BLOCK_SIZE))


def likeliest(tokens):
    """The model's next token behind a text."""
    runner = StepRunner(DECODER, DECODER.new_cache(BLOCK_SIZE, len(TABLE)))
    return runner.run([TokenSegment(tokens, 0, TABLE)])[0]


def test_the_window_is_what_the_model_says_of_its_columns():
    """Each column continues the text by row 0 up to it, then by its own rows; (W + G)(N - 1) tokens are computed."""
    lookahead = speculator()
    proposer, branches = lookahead.proposer, lookahead.tree
    [[token]] = lookahead.run([], [TokenSegment(PROMPT, 0, TABLE)]).tokens
    tokens = [*PROMPT, token]
    for _ in range(4):
        drafting = [Drafting(0, tokens, TABLE, 3)]
        assert 1 + len(proposer.propose(drafting, [])[0]) == (3 + 2) * (4 - 1)
        rows = [list(row) for row in proposer._iterations[0].rows]
        verified = lookahead.run(drafting, [])
        said = branches.last_row(proposer._predicted[0])
        for column in range(3):
            behind = [*rows[0][1 : column + 1], *(row[column] for row in rows[1:])]
            assert said[column] == likeliest([*tokens, *behind])
        proposer.finalize(drafting, verified.paths)
        tokens += verified.tokens[0]
    ngrams = list(proposer._iterations[0].pool._order)
    assert len(ngrams) >= 4
    assert {len(ngram) for ngram in ngrams} == {4}


@pytest.mark.parametrize(("num_right", "depth", "kept"), [(3, 3, 3), (3, 2, 2), (2, 3, 2), (0, 3, 0)])
def test_a_guess_is_kept_as_far_as_the_model_says_it(num_right, depth, kept):
    lookahead, text = speculator(), list(PROMPT)
    lookahead.run([], [TokenSegment(PROMPT, 0, TABLE)])
    for _ in range(5):
        text.append(likeliest(text))
    known = text[: len(PROMPT) + 1]
    lookahead.proposer.propose([Drafting(0, known, TABLE, 3)], [])
    behind = [
        token if i < num_right else (token + 1) % 101 for i, token in enumerate(text[len(known) : len(known) + 3])
    ]
    lookahead.proposer._iterations[0].pool.add((known[-1], *behind))
    verified = lookahead.run([Drafting(0, known, TABLE, depth)], [])
    assert verified.num_accepted == [kept]
    assert verified.tokens == [text[len(known) : len(known) + kept + 1]]


def test_guesses_begin_with_the_newest_n_grams_of_a_token():
    pool = NgramPool()
    for ngram in ((1, 2, 3), (1, 4, 5), (6, 7, 8), (1, 2, 3)):
        pool.add(ngram)
    assert pool.guesses(1, 2) == [(2, 3), (4, 5)]
    assert pool.guesses(1, 4) == [(2, 3), (4, 5), (7, 8)]
    assert pool.guesses(6, 2) == [(7, 8), (2, 3)]
    assert NgramPool().guesses(1, 2) == []
