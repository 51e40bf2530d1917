"""Work of libraries on the host: grammars of required shapes, and suffix decoding's trees.

    compile_s, again_s   a grammar that the server has not compiled yet, and one that it has, by one thread
    mask_s               the mask of a token that an answer may have next, and taking that token in
    step_s               of a sequence: its newest tokens enter its tree, which is asked for a draft
    prompt_token_s       of a prompt, whose tree is made with the request's first token

Measured by `benchmarks/host_libraries.py` on one core; a vocabulary of another size is taken to cost the same."""

from collections.abc import Mapping
from functools import cache

from pydantic import Field

from perfmodel.files.base import Spec
from perfmodel.files.catalog import data_dir
from perfmodel.files.fitted import CommittedFits, load_fitted
from perfmodel.specs.scenario import Scenario


class GrammarFit(Spec):
    """Seconds of one backend, which of vLLM's `auto` is xgrammar; library: and its version."""

    library: str
    compile_s: float = Field(ge=0, le=10)
    again_s: float = Field(ge=0, le=1)
    mask_s: float = Field(ge=0, le=1e-2)


class SuffixFit(Spec):
    """Seconds of suffix decoding."""

    library: str
    step_s: float = Field(ge=0, le=1e-3)
    prompt_token_s: float = Field(ge=0, le=1e-4)


class HostWork(CommittedFits):
    """grammars: by the backend's name in vLLM"""

    grammars: Mapping[str, GrammarFit]
    suffix: SuffixFit


@cache
def load_host_work() -> HostWork:
    """The committed measurements. Raises SpecError for a file that is missing or malformed."""
    return load_fitted(HostWork, data_dir("calibrations") / "host_libraries.yaml")


def grammar_fit(scenario: Scenario) -> GrammarFit | None:
    """What shapes of the scenario's answers cost its engine's host; None where none has one."""
    shapes = scenario.traffic.structured_outputs
    if shapes is None:
        return None
    backend = scenario.engine.structured_outputs_config.backend
    fit = load_host_work().grammars["xgrammar" if backend == "auto" else backend]
    given = {"compile_s": shapes.compile_s, "mask_s": shapes.mask_s}
    return fit.model_copy(update={name: value for name, value in given.items() if value is not None})
