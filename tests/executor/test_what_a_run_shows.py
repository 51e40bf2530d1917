"""What `execute` shows in addition to its records: predicted vs measured, an early end, and text."""

import json
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")
tokenizers = pytest.importorskip("tokenizers", reason="needs perfmodel[weights]")
pytest.importorskip("transformers", reason="needs perfmodel[test]")

from perfmodel.commands.runs import ExecuteRequest  # noqa: E402
from perfmodel.errors import PerfmodelError, SpecError, WorkloadError  # noqa: E402
from perfmodel.evidence.executed.compare import RunPrediction  # noqa: E402
from perfmodel.models import load_model  # noqa: E402
from perfmodel.report.runs import timeline_json  # noqa: E402
from perfmodel.specs.scenario_file import load_scenario  # noqa: E402
from perfmodel_executors.parity import REFERENCES, build  # noqa: E402
from perfmodel_executors.quality.tokenizer import load_tokenizer  # noqa: E402
from perfmodel_executors.run import execute_scenario  # noqa: E402

FEW = (
    "traffic.num_requests=3",
    "traffic.input_tokens={distribution: fixed, value: 40}",
    "traffic.output_tokens={distribution: fixed, value: 6}",
)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}{% endfor %}"
    "{% if add_generation_prompt %}<|bot|>{% endif %}"
)
MARKS = ["<s>", "</s>", "<|user|>", "<|bot|>"]


@pytest.fixture(scope="module")
def executed():
    scenario = load_scenario("tiny-llama-cpu", [*FEW])
    prediction, seen = RunPrediction(scenario), []
    result = execute_scenario(scenario, progress=lambda *now: seen.append(now), wrap=prediction.around)
    return result, prediction.compare(result), seen


def test_progress_counts_tokens_up_to_all_of_them(executed):
    """Three prompts of 40 tokens, and five steps of a token each behind them."""
    _, _, seen = executed
    assert seen[-1] == (3 * (40 + 5), 3 * (40 + 5))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_compared_means_are_those_of_the_records(executed):
    result, comparison, _ = executed
    steps = result.steps
    taken = (steps.end_s - steps.start_s)[(steps.num_chunks == 0) & (steps.num_decodes > 0)]
    assert comparison.means["mean decode step"][1] == pytest.approx(taken.mean(), rel=1e-6)
    assert comparison.means["mean TTFT"][1] == pytest.approx(result.summary["mean_ttft_ms"] / 1e3)
    assert comparison.means["mean TPOT"][0] == pytest.approx(comparison.simulated.summary["mean_tpot_ms"] / 1e3)
    assert "Largest miss of a step: " in comparison.worst


def test_a_timeline_has_both_runs_with_a_process_each(executed):
    result, comparison, _ = executed
    events = timeline_json(result, comparison.simulated)["traceEvents"]
    names = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert set(names) == {"replica 0", "requests", "replica 0, predicted", "requests, predicted"}
    assert len(set(names.values())) == 4
    alone = timeline_json(result)["traceEvents"]
    assert [event for event in events if event["pid"] < 20_000] == alone


def test_a_run_that_is_cut_keeps_what_was_answered():
    scenario = load_scenario("tiny-llama-cpu", ["traffic.num_requests=100000", *FEW[1:]])
    result = execute_scenario(scenario, max_seconds=3.0)
    assert 0 < result.summary["completed"] < 100_000
    assert any("Stopped after 3 s" in note for note in result.notes)
    with pytest.raises(WorkloadError, match="no request was answered within --max-seconds"):
        execute_scenario(scenario, max_seconds=1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """As the Hub has them: weights, configuration, tokenizer and chat template."""
    path = tmp_path_factory.mktemp("tiny-chat")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=MARKS, initial_alphabet=letters)
    tokenizer.train_from_iterator(["a few words of text", "words of a text"], trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    sizes = {"vocab_size": tokenizer.get_vocab_size()}
    build(replace(REFERENCES["llama"], fields=sizes)).save_pretrained(path)
    return path


def test_a_folder_of_the_hub_works_by_path_with_its_own_template(folder):
    assert load_model(folder).weights_path == str(folder / "model.safetensors")
    vocabulary = load_tokenizer(folder / "model.safetensors")
    assert vocabulary.decode(vocabulary.encode("words of text")) == "words of text"
    assert [*vocabulary.around.before, *vocabulary.around.after] == [0, 2, 3]  # <s> <|user|> ... <|bot|>
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no turn') }}", encoding="utf-8")
    with pytest.raises(PerfmodelError, match=r"chat template cannot be filled in \(no turn\)"):
        load_tokenizer(folder / "model.safetensors")
    (folder / "chat_template.jinja").unlink()


def test_text_is_what_the_model_said(folder):
    settings = (f"model={folder}", "engine.max_model_len=256", "traffic.prompts=pydoc", *FEW)
    answer = ExecuteRequest("tiny-llama-cpu", print_text=True, overrides=settings).answer()
    texts = {text["request_id"]: text for text in answer.data["texts"]}
    assert set(texts) == {0, 1, 2}
    assert all(text["prompt"] and text["answer"] for text in texts.values())
    assert any(line.startswith("request 0\n> ") for line in answer.closing)


def test_random_weights_say_nothing():
    with pytest.raises(SpecError, match="its text would mean nothing"):
        ExecuteRequest("tiny-llama-cpu", print_text=True).answer()
