"""Tokens of text: prompts that go on begin as they did, answers have the tokens that they say, blocks have one name."""

from pydoc_data.topics import topics

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from perfmodel.errors import SpecError, WorkloadError
from perfmodel.serve.settings import ServerSettings
from perfmodel.serve.tokens import (
    AnswerWriter,
    ByteTokens,
    ChatMessage,
    FileTokens,
    GenerationLimits,
    block_hashes,
    chat_prompt,
)
from perfmodel.specs.traffic import Traffic

TRAFFIC = {"num_requests": 1, "input_tokens": {"distribution": "fixed", "value": 10}}
TEXT = [text for _, text in sorted(topics.items())][:20]


def writer(vocabulary=None, length="requested", seed=0, max_model_len=1000, stream=None, **output):
    lengths = output or {"distribution": "uniform", "low": 50, "high": 150}
    traffic = Traffic.model_validate({**TRAFFIC, "output_tokens": lengths})
    settings = ServerSettings(answer_length=length, seed=seed)
    return AnswerWriter(
        vocabulary or ByteTokens(), traffic, max_model_len, settings, seed if stream is None else stream
    )


def trained(kind):
    """A tokenizer of each family, trained on a text of Python's help."""
    if kind == "bytes":
        built = tokenizers.Tokenizer(models.BPE())
        built.pre_tokenizer, built.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        built.train_from_iterator(
            TEXT, trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet, show_progress=False)
        )
    elif kind == "byte-level BPE":
        built = tokenizers.Tokenizer(models.BPE())
        built.pre_tokenizer, built.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        built.train_from_iterator(
            TEXT, trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
        )
    elif kind == "SentencePiece":
        built = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
        built.pre_tokenizer, built.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        built.train_from_iterator(
            TEXT, trainers.BpeTrainer(vocab_size=2000, special_tokens=["<unk>"], show_progress=False)
        )
    else:
        built = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
        built.pre_tokenizer = pre_tokenizers.Whitespace()
        built.train_from_iterator(TEXT, trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False))
    return built


@pytest.fixture(params=["bytes", "byte-level BPE", "SentencePiece", "words"], scope="module")
def vocabulary(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    trained(request.param).save(str(path))
    return FileTokens(path)


def test_an_answer_has_the_tokens_that_its_text_has(vocabulary):
    for number in range(1, 60):
        answer = writer(vocabulary).write(GenerationLimits(max_tokens=number, seed=number), vocabulary.encode("why"))
        assert vocabulary.encode("".join(answer.pieces)).tolist() == answer.ids.tolist()


def test_what_goes_on_with_a_prompt_leaves_its_tokens_alone(vocabulary):
    prompt = "the result of an operation"
    for number in range(1, 60):
        wanted = GenerationLimits(max_tokens=number, seed=number, is_continued=True)
        answer = writer(vocabulary).write(wanted, vocabulary.encode(prompt))
        again = vocabulary.encode(prompt + "".join(answer.pieces)).tolist()
        assert again == [*vocabulary.encode(prompt).tolist(), *answer.ids.tolist()]


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(SpecError, match="no such file"):
        FileTokens(tmp_path / "none.json")
    (tmp_path / "some.json").write_text("{}")
    with pytest.raises(SpecError, match=r"no tokenizer\.json"):
        FileTokens(tmp_path / "some.json")


@given(st.text())
def test_four_bytes_are_a_token_and_come_back(text):
    vocabulary = ByteTokens()
    ids = vocabulary.encode(text)
    size = len(text.encode("utf-8", "surrogatepass"))
    assert len(ids) == -(-size // 4)
    assert all(0 <= number < 2**32 for number in chat_prompt(vocabulary, [ChatMessage("user", text)]).tolist())
    if text.isprintable():
        assert vocabulary.decode(ids) == text


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "system", "x"]), st.text()), min_size=1, max_size=6))
def test_a_conversation_begins_as_it_did(turns):
    """Each prompt, with the answer's tokens after it, is the beginning of the next turn's prompt."""
    vocabulary = ByteTokens()
    messages = [ChatMessage(*turn) for turn in turns]
    prompt = chat_prompt(vocabulary, messages)
    answer = writer().write(GenerationLimits(max_tokens=30), prompt)
    said = [*messages, ChatMessage("assistant", "".join(answer.pieces)), ChatMessage("user", "and then?")]
    following = chat_prompt(vocabulary, said)
    assert following[: len(prompt) + 30].tolist() == [*prompt.tolist(), *answer.ids.tolist()]


@given(st.lists(st.integers(0, 5), max_size=40), st.lists(st.integers(0, 5), max_size=40), st.integers(1, 9))
def test_blocks_are_equal_where_all_up_to_their_ends_is(first, second, block_size):
    one, other = (np.array(ids, dtype=np.int64) for ids in (first, second))
    named, also = block_hashes(one, block_size), block_hashes(other, block_size)
    assert (len(named), len(also)) == (len(first) // block_size, len(second) // block_size)
    for number, (mine, yours) in enumerate(zip(named, also, strict=False), 1):
        assert (mine == yours) == (first[: number * block_size] == second[: number * block_size])
    assert not set(named) & set(block_hashes(one, block_size, salt="s"))
    assert not set(named) & set(block_hashes(one, block_size, adapter="s"))


def test_drawn_lengths_are_the_traffics():
    """Uniform from 50 to 150: a mean of 100 with a standard error of 29.2 / sqrt(2000)."""
    prompt = ByteTokens().encode("a")
    own = writer()
    lengths = [len(own.write(GenerationLimits(), prompt).ids) for _ in range(2000)]
    assert 50 <= min(lengths) <= max(lengths) <= 150
    assert np.mean(lengths) == pytest.approx(100, abs=4 * 29.2 / 2000**0.5)


def test_max_tokens_decides_or_cuts():
    prompt, fixed = ByteTokens().encode("a"), {"distribution": "fixed", "value": 20}

    def ends(length, **wanted):
        answer = writer(length=length, **fixed).write(GenerationLimits(**wanted), prompt)
        return len(answer.ids), answer.finish_reason

    assert ends("requested", max_tokens=30) == (30, "length")
    assert ends("drawn", max_tokens=30) == (20, "stop")
    assert ends("drawn", max_tokens=10) == (10, "length")
    assert ends("drawn", max_tokens=30, ignore_eos=True) == (30, "length")
    assert ends("drawn", max_tokens=30, min_tokens=25) == (25, "stop")
    assert ends("requested") == (20, "stop")
    assert ends("requested", default_max_tokens=16) == (16, "length")
    assert ends("requested", ignore_eos=True) == (999, "length")


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(1000, 1), (990, 11)])
def test_what_does_not_fit_in_the_context_is_refused(num_prompt_tokens, max_tokens):
    with pytest.raises(WorkloadError, match="maximum context length is 1000 tokens"):
        writer().write(GenerationLimits(max_tokens=max_tokens), np.zeros(num_prompt_tokens, dtype=np.int64))


def test_a_stop_counts_after_the_first_tokens():
    prompt, vocabulary = ByteTokens().encode("a"), ByteTokens()
    whole = writer().write(GenerationLimits(max_tokens=400, seed=1), prompt)
    word = whole.pieces[0].strip()
    later = writer().write(GenerationLimits(max_tokens=400, seed=1, min_tokens=1, stop=(word,)), prompt)
    assert len(later.ids) > 1
    by_id = frozenset({int(whole.ids[5])})
    cut = writer().write(GenerationLimits(max_tokens=400, seed=1, stop_token_ids=by_id), prompt)
    first = whole.ids.tolist().index(int(whole.ids[5]))
    assert (cut.ids.tolist(), cut.stop_reason) == (whole.ids[: first + 1].tolist(), int(whole.ids[5]))
    assert "".join(cut.pieces) == vocabulary.decode(whole.ids[:first])
    kept = writer().write(GenerationLimits(max_tokens=400, seed=1, stop=(word,), keeps_stop=True), prompt)
    assert "".join(kept.pieces) == word
