"""What is written at build time: into which pages of docs/, and beside README on the first page.

A page says where by `<!-- generated: MODULE -->`; what stands there until `<!-- end -->` is for code hosts.
"""

__all__ = ["filled", "pages", "with_questions"]

import re

from docs_site.accuracy_page import accuracy_page, setups_page
from docs_site.cli_reference import cli_page
from docs_site.kernel_models_reference import forms_page
from docs_site.metrics_reference import metrics_page
from docs_site.not_modelled_page import not_modelled_page
from docs_site.python_reference import python_page
from docs_site.scenario_reference import scenario_page
from docs_site.techniques_gallery import techniques_table
from docs_site.telemetry_reference import telemetry_page

_QUESTIONS = """
<div class="questions" markdown>

- **[Start in five minutes](docs/start.md)** from an installation to a plan
- **[How right is it?](docs/how-right.md)** every report, with its worst rows
- **[Which GPU?](docs/guides/which-gpu.md)** devices ranked by what they cost you
- **[How many?](docs/guides/how-many.md)** replicas for a rate and its peaks
- **[Which arguments?](docs/guides/which-arguments.md)** batch, budget, parallelism
- **[Why is it slow?](docs/guides/why-slow.md)** what bounds a step, and what would help
- **[What would FP8 bring?](docs/guides/fp8.md)** speed, room, and its price
- **[A server without a GPU](docs/emulator.md)** that answers as late as the real one

</div>

"""
_BEFORE = "## Two commands\n"


_PLACE = re.compile(r"<!-- generated: .*?<!-- end -->\n", re.DOTALL)


def filled(page: str, body: str) -> str:
    """A page with what is generated for it in its place."""
    return _PLACE.sub(lambda _: body, page, count=1)


def pages() -> dict[str, str]:
    """What is generated, by the page below docs/."""
    return {
        "how-right.md": accuracy_page(),
        "accuracy-by-setup.md": setups_page(),
        "not-modelled.md": not_modelled_page(),
        "techniques/README.md": techniques_table(),
        "reference/cli.md": cli_page(),
        "reference/scenario.md": scenario_page(),
        "reference/metrics.md": metrics_page(),
        "reference/emulator-metrics.md": telemetry_page(),
        "reference/python.md": python_page(),
        "reference/forms.md": forms_page(),
    }


def with_questions(readme: str) -> str:
    """README with the questions that the guides answer, after what the project is."""
    return readme.replace(_BEFORE, _QUESTIONS.lstrip("\n") + _BEFORE, 1)
