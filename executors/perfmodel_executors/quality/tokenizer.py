"""Real text (what Python's own help says, or a file), the tokenizer that cuts it, and the prompts that come of it. The
tokenizer is made of the vocabulary and the merges that a GGUF file carries with its weights."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from perfmodel.errors import MissingExtraError, PerfmodelError, SpecError
from perfmodel.specs.scenario import Scenario

PYDOC = "pydoc"
# A fixed stretch from the middle of a section: a text's first pages are often titles and lists.
_START, _LENGTH = 20_000, 12_000


def read_text(source: str = PYDOC) -> str:
    """12,000 characters from character 20,000 on, or from the start of a shorter text. source: `pydoc` (the topics of
    `help()`, an empty line between them), or the path of a text file."""
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


def load_tokenizer(path: str | Path) -> Callable[[str], list[int]]:
    """A function from text to token ids, byte-level BPE of GPT-2's kind, by the vocabulary of a GGUF file. Raises
    MissingExtraError, or PerfmodelError for other kinds of vocabularies."""
    for package in ("gguf", "tokenizers"):
        if find_spec(package) is None:
            raise MissingExtraError(
                f"cutting text into the tokens of {Path(path).name} needs {package}, which is not installed: pip "
                f"install '.[weights]' in the checkout."
            )
    from gguf import GGUFReader
    from tokenizers import Tokenizer, models, pre_tokenizers

    fields = GGUFReader(path).fields
    facts = {
        name: fields[f"tokenizer.ggml.{name}"].contents()
        for name in ("model", "pre", "tokens", "merges")
        if f"tokenizer.ggml.{name}" in fields
    }
    if facts.get("model") != "gpt2" or "merges" not in facts:
        raise PerfmodelError(
            f"{Path(path).name}: its vocabulary is {facts.get('model', 'missing')}; tokenizers are made of byte-level "
            f"BPE (gpt2) vocabularies only."
        )
    vocabulary = {token: index for index, token in enumerate(facts["tokens"])}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in facts["merges"])]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    digits = [pre_tokenizers.Digits(individual_digits=True)] if facts.get("pre") in _DIGITS_APART else []
    steps = [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text).ids
        return ids

    return encode


def text_of(scenario: Scenario) -> list[int]:
    """Token ids of the text that prompts are cut from (`traffic.prompts`); none where they are random. Raises SpecError
    for a model without a tokenizer: one with random weights, or from another file than .gguf."""
    source, model = scenario.traffic.prompts, scenario.model
    if source is None:
        return []
    path = model.weights_origin
    if path is None or not path.endswith(".gguf"):
        raise SpecError(
            f"traffic.prompts: got {source!r}, but {model.name} is read from no .gguf file, so there is no tokenizer "
            f"to cut it into tokens; leave it out, or name a .gguf file as the model."
        )
    return load_tokenizer(path)(read_text(source))
