"""Files that were dropped: their names, their sizes, where they lie, and that their place is not told."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("jinja2", reason="pages need jinja2, of the extra web")

from perfmodel.commands.runs import MemoryRequest
from perfmodel.errors import SpecError
from perfmodel.files.catalog import find_file
from perfmodel.web import results as drops_module
from perfmodel.web.results import Uploads, field_of, hidden, resolved, with_files, without_marks
from perfmodel.web.service import QueryService
from perfmodel.web.state import read_state, request_of
from perfmodel.web.views import DEPLOYMENT, MEMORY

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "tests" / "data"


@pytest.fixture
def uploads():
    found = Uploads()
    yield found
    found.close()


def kept(uploads):
    return [path for path in uploads.folder.rglob("*") if path.is_file()]


@given(st.text(max_size=300), st.sampled_from([".json", ".gguf", ".YAML", "", ".exe", ".json/..", "\\..\\x.json"]))
def test_whatever_a_file_is_called_it_lies_in_its_folder(name, suffix):
    uploads = Uploads()
    try:
        try:
            mark = uploads.take(name + suffix, b"{}")
        except SpecError:
            assert not kept(uploads)
            return
        (path,) = kept(uploads)
        assert resolved(mark, uploads.folder) == str(path)
        assert path.resolve().is_relative_to(uploads.folder)
        assert len(path.relative_to(uploads.folder).parts) == 2
        assert without_marks(f"model {mark}.") == f"model {path.name}." or path.name.endswith(".")
        assert read_state(f"model={mark}").get("model") == mark
        assert hidden(f"in {path}: no", uploads.folder) == f"in {path.name}: no"
    finally:
        uploads.close()


def test_the_same_file_has_the_same_mark_and_another_has_another(uploads):
    first = uploads.take("a/config.json", b"{}")
    assert uploads.take("config.json", b"{}") == first
    assert uploads.take("config.json", b"{ }") != first
    assert len(kept(uploads)) == 2


def test_of_a_header_the_file_has_its_full_size_as_a_hole(uploads):
    mark = uploads.take("m.gguf", b"GGUF" * 100, full_size=40_000_000_000)
    path = Path(resolved(mark, uploads.folder))
    assert path.stat().st_size == 40_000_000_000
    assert path.stat().st_blocks * 512 < 1_000_000
    assert uploads.take("m.gguf", b"GGUF" * 100) != mark


@pytest.mark.parametrize(
    ("name", "content", "size", "said"),
    [
        ("virus.exe", b"MZ", None, "got .exe; expected .json"),
        ("", b"", None, "no suffix"),
        ("..", b"", None, "no suffix"),
        (".json", b"", None, "no suffix"),
        ("config.json", b"{}", 100_000_000, "100,000,000 bytes; expected at most 64,000,000"),
        ("config.json", b"{}", 10**15, "expected at most 64,000,000"),
        ("config.json", b"{}", 1000, "2 of its 1,000 bytes came"),
        ("m.gguf", b"", 10**16, "expected at most 10,000,000,000,000"),
    ],
)
def test_what_is_no_such_file_is_refused_and_leaves_nothing(uploads, name, content, size, said):
    with pytest.raises(SpecError, match=said):
        uploads.take(name, content, size)
    assert not kept(uploads)


def test_what_was_sent_is_bounded_for_headers_too(uploads, monkeypatch):
    monkeypatch.setattr(drops_module, "MAX_BYTES", 10)
    with pytest.raises(SpecError, match="11 bytes"):
        uploads.take("m.gguf", bytes(11))


def test_a_full_disk_is_answered_in_words(uploads, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(SpecError, match="No space left on device"):
        uploads.take("config.json", b"{}")
    assert not list(uploads.folder.iterdir())


def test_old_files_go_by_number_and_by_bytes(uploads, monkeypatch):
    monkeypatch.setattr(drops_module, "_MAX_FILES", 3)
    monkeypatch.setattr(drops_module, "_MAX_TOGETHER", 1000)
    marks = [uploads.take("a.json", b"%d" % n) for n in range(3)]
    uploads.take("a.json", b"0")  # again: it is the newest now
    marks.append(uploads.take("a.json", b"9"))
    assert [(uploads.folder / mark[5:21]).exists() for mark in marks] == [True, False, True, True]
    uploads.take("a.json", b" " * 999)
    assert len(kept(uploads)) == 2
    with pytest.raises(SpecError, match="drop the file on the page again"):
        with_files(MemoryRequest(flags=(("model", marks[1]),)), uploads.folder)


def test_marks_lead_nowhere_else(uploads):
    for text in ("drop:../x", "drop:0123456789abcdef/../x", "drop:0123456789abcdef/..", "drop:0123456789ABCDEF/x.json"):
        assert resolved(text, uploads.folder) == text  # stands for nothing; names that are paths are refused later
    with pytest.raises(SpecError):
        resolved("drop:0123456789abcdef/x.json", uploads.folder)


def test_a_file_that_is_dropped_again_answers_again_and_its_place_is_not_told():
    desk = QueryService()
    try:
        content = (CONFIG / "qwen3-config.json").read_bytes() if (CONFIG / "qwen3-config.json").exists() else _config()
        mark = desk.take("config.json", content)
        question = request_of(MemoryRequest, read_state(f"model={mark}&hardware=h100"))
        shown = desk.answer(question).shown
        assert shown is not None, desk.answer(question).refusal
        assert str(desk.uploads.folder) not in str(shown)
        assert shown.request == question
        (file,) = kept(desk.uploads)
        os.remove(file)
        other = request_of(MemoryRequest, read_state(f"model={mark}&hardware=a100"))
        assert "drop the file on the page again" in desk.answer(other).refusal
        file.write_bytes(content)
        desk.take("config.json", content)
        assert desk.answer(other).shown is not None
        broken = desk.take("config.json", b"{]")
        refusal = desk.answer(request_of(MemoryRequest, read_state(f"model={broken}"))).refusal
        assert "config.json" in refusal
        assert str(desk.uploads.folder) not in refusal
        assert broken[5:21] not in refusal
    finally:
        desk.uploads.close()


@pytest.mark.parametrize(
    ("file", "field"),
    [
        (("hardware_specs", "l4.yaml"), "hardware"),
        (("workloads", "traffic", "azure-code.yaml"), "traffic"),
        (("workloads", "scenarios", "llama-3.1-8b-a100.yaml"), "scenario"),
        (("workloads", "models", "llama-3.1-8b.yaml"), "model"),
    ],
)
def test_what_a_file_is_for_follows_from_its_keys_and_it_answers_there(file, field):
    content = ROOT.joinpath(*file).read_bytes()
    assert field_of(file[-1], content) == field
    desk = QueryService()
    try:
        state = read_state(f"{field}={desk.take(file[-1], content)}")
        for view in (DEPLOYMENT, MEMORY):
            findings = [desk.answer(each) for part in view.parts for each in part.ask(state)]
            assert findings
            assert not [each.refusal for each in findings if each.refusal]
            assert not any(str(desk.uploads.folder) in str(each.shown) for each in findings)
    finally:
        desk.uploads.close()


def _config():
    import json

    return json.dumps(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "torch_dtype": "bfloat16",
        }
    ).encode()


def test_a_file_of_the_catalogue_is_said_without_its_place(tmp_path):
    path = find_file("traffic", "azure-conversation")
    assert hidden(f"{path}:8: input_tokens: fixed needs `value`.", tmp_path).startswith(
        "workloads/traffic/azure-conversation.yaml:8: "
    )
