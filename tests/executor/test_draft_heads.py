"""Medusa's heads and EAGLE's layer compute what their formulas say, in batches as singly, and as often as is priced."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from executor_models import MODELS  # noqa: E402

from perfmodel.cost.steps.speculation import passes_of  # noqa: E402
from perfmodel.ops.graphs.drafting import drafter_of  # noqa: E402
from perfmodel.ops.work import BatchShape  # noqa: E402
from perfmodel.specs.engine.spec import EngineSpec  # noqa: E402
from perfmodel.specs.engine.speculation import SpeculativeConfig  # noqa: E402
from perfmodel_executors.models.batch import TokenSegment  # noqa: E402
from perfmodel_executors.models.decoder import Decoder  # noqa: E402
from perfmodel_executors.runner import StepRunner  # noqa: E402
from perfmodel_executors.speculation.build import build_speculator  # noqa: E402
from perfmodel_executors.speculation.heads import EaglePasses  # noqa: E402
from perfmodel_executors.speculation.proposer import Drafting  # noqa: E402

BLOCK_SIZE = 4
PROMPT = [7, 3, 99, 12, 5, 41, 7, 8, 60, 2]
TABLES = [list(range(16)), [0, 1, *range(20, 34)]]  # two sequences that begin with the same two blocks
DECODER = Decoder(MODELS["gqa"], torch.float32, seed=1)


def speculator_of(**config):
    engine = EngineSpec(speculative_config=SpeculativeConfig(**config), block_size=BLOCK_SIZE)
    runner = StepRunner(DECODER, DECODER.new_cache(BLOCK_SIZE))
    speculator = build_speculator(runner, engine)
    runner.cache.reserve_for(TABLES)
    speculator.proposer.reserve_for(TABLES)
    return speculator


def take(speculator, drafting, chunks=()):
    """One step: the tokens of each sequence."""
    verified = speculator.run(drafting, chunks)
    speculator.proposer.finalize(drafting, verified.paths)
    return verified.tokens


def greedy(prompt, count):
    """What the model says by itself."""
    runner, tokens = StepRunner(DECODER, DECODER.new_cache(BLOCK_SIZE, 16)), list(prompt)
    for _ in range(count):
        tokens += runner.run([TokenSegment(tokens, 0, TABLES[0])])
    return tokens


def test_heads_of_a_batch_are_those_of_each_state():
    heads = speculator_of(method="medusa", tree=(3, 2)).proposer.runner
    generator = torch.Generator().manual_seed(3)
    heads.blocks = [torch.randn(32, 32, generator=generator) for _ in range(2)]
    h_RC = torch.randn(5, 32, generator=generator)
    together = heads.candidates(h_RC)
    assert together == [heads.candidates(h_RC[row : row + 1])[0] for row in range(5)]
    assert [[len(ranked) for ranked in row] for row in together] == [[3, 2]] * 5
    normed = h_RC * torch.rsqrt(h_RC.square().mean(-1, keepdim=True) + DECODER.model.norm_eps)
    wanted = [
        (normed + torch.nn.functional.silu(normed @ block.T)) @ head.T
        for block, head in zip(heads.blocks, heads.heads, strict=True)
    ]
    torch.testing.assert_close(heads.logits(h_RC), wanted)


def test_untrained_heads_say_what_the_model_has_said():
    speculator = speculator_of(method="medusa", num_speculative_tokens=2)
    [[token]] = take(speculator, [], [TokenSegment(PROMPT, 0, TABLES[0])])
    drafting = Drafting(0, [*PROMPT, token], TABLES[0], 2)
    assert speculator.proposer.propose([drafting], []) == [[token, token]]


@pytest.mark.parametrize("config", [{"num_speculative_tokens": 3}, {"tree": (3, 2, 2)}])
def test_a_round_of_eagle_computes_as_many_tokens_as_its_formula_says(config, monkeypatch):
    """The first pass 1 + k of each sequence, each later one the nodes of the depth before."""
    speculator = speculator_of(method="eagle", **config)
    passes, counted = speculator.proposer.runner, []
    states = passes.states
    monkeypatch.setattr(passes, "states", lambda segments, before: counted.append(segments) or states(segments, before))
    take(speculator, [], [TokenSegment(PROMPT, 0, TABLES[0])])
    assert [len(segment.tokens) for segment in counted.pop()] == [len(PROMPT)]
    take(speculator, [Drafting(0, greedy(PROMPT, 1), TABLES[0], 3)])
    engine = EngineSpec(speculative_config=SpeculativeConfig(method="eagle", **config))
    drafter = drafter_of(DECODER.model, engine, "greedy")
    priced = passes_of(engine.speculative_config, drafter, BatchShape(1, 1, num_decodes=1, drafting=(1, 1, 1)))
    assert [sum(len(segment.tokens) for segment in each) for each in counted] == [each.queries for each in priced]


@pytest.mark.parametrize("config", [{"num_speculative_tokens": 3}, {"tree": (2, 2, 1)}])
@pytest.mark.parametrize("is_right", [True, False])
def test_eagles_pages_hold_what_a_full_recomputation_gives(config, is_right, monkeypatch):
    """Of a prompt in two chunks, drafts that were right or wrong, a step without a draft, and a prefix found."""
    speculator = speculator_of(method="eagle", **config)
    proposer, tree, text = speculator.proposer, speculator.tree, greedy(PROMPT, 16)
    propose = proposer.propose

    def with_known_drafts(drafting, chunks):
        drafts = propose(drafting, chunks)
        known = [len(each.tokens) for each in drafting]
        return [
            [text[first + tree.depths[node] - 1] if is_right else 0 for node in range(1, len(draft) + 1)]
            for first, draft in zip(known, drafts, strict=True)
        ]

    monkeypatch.setattr(proposer, "propose", with_known_drafts)
    take(speculator, [], [TokenSegment(PROMPT[:6], 0, TABLES[0], is_sampled=False)])
    take(speculator, [], [TokenSegment(PROMPT[6:], 6, TABLES[0])])
    take(speculator, [], [TokenSegment(PROMPT[8:], 8, TABLES[1])])
    known = [len(PROMPT) + 1] * 2
    for depth in (3, 0, 2, 3, 0):
        drafting = [Drafting(i, text[:count], TABLES[i], depth) for i, count in enumerate(known)]
        found = take(speculator, drafting)
        assert [text[count : count + len(each)] for count, each in zip(known, found, strict=True)] == found
        known = [count + len(each) for count, each in zip(known, found, strict=True)]
    drafting = [Drafting(i, text[:count], TABLES[i], 3) for i, count in enumerate(known)]
    propose(drafting, [])
    whole = EaglePasses(
        proposer.runner.decoder, proposer.runner.decoder.new_cache(BLOCK_SIZE, 34), proposer.runner.projection_CD
    )
    for table, count in zip(TABLES, known, strict=True):
        segment = TokenSegment(text[:count], 0, table)
        _, x_TC = StepRunner(DECODER, DECODER.new_cache(BLOCK_SIZE, 34)).run_with_states([segment])
        whole.states([segment], [torch.cat((torch.zeros(1, 32), x_TC[:-1]))])
        blocks = torch.tensor(table)
        for ours, wanted in zip(
            *(c.pages[0].gathered(blocks, torch.float32) for c in (proposer.runner.cache, whole.cache)), strict=True
        ):
            torch.testing.assert_close(ours[:count], wanted[:count])


def test_eagle_reads_a_vocabulary_and_a_layer_of_the_model_itself():
    model = replace(MODELS["moe"], name="mixture")
    engine = EngineSpec(speculative_config=SpeculativeConfig(method="eagle", num_speculative_tokens=2))
    runner = StepRunner(Decoder(model, torch.float32, seed=1), DECODER.new_cache(BLOCK_SIZE))
    decoder = build_speculator(runner, engine).proposer.runner.decoder
    assert decoder.weights.lm_head is runner.decoder.weights.lm_head
    assert decoder.weights.embedding is runner.decoder.weights.embedding
    assert decoder.weights.layers[0].ffn.down.shape == (32, 48)  # two experts of 24 a token
