"""What prompts are cut from where a scenario wants real text (`traffic.prompts`)."""

from perfmodel.errors import SpecError
from perfmodel.specs.scenario import Scenario
from perfmodel_executors.quality.tokenizer import load_tokenizer, read_text


def text_of(scenario: Scenario) -> list[int]:
    """Token ids of the text; none where prompts are random.

    Raises SpecError for a model without a tokenizer: one with random weights, or from another file than .gguf.
    """
    source, model = scenario.traffic.prompts, scenario.model
    if source is None:
        return []
    path = model.weights_origin
    if path is None or not path.endswith(".gguf"):
        raise SpecError(
            f"traffic.prompts: found {source!r}, but {model.name} is read from no .gguf file, so there is no tokenizer "
            f"to cut it into tokens; leave it out, or name a .gguf file as the model."
        )
    return load_tokenizer(path).encode(read_text(source))
