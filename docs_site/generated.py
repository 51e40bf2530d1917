"""All pages that are written at build time, by where they stand; and what the first page has beside README."""

__all__ = ["pages", "with_questions"]

from docs_site.accuracy_page import accuracy_page
from docs_site.cli_reference import cli_page
from docs_site.forms_reference import forms_page
from docs_site.metrics_reference import metrics_page
from docs_site.python_reference import python_page
from docs_site.scenario_reference import scenario_page
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


def pages() -> dict[str, str]:
    """Markdown by its place below docs/."""
    return {
        "how-right.md": accuracy_page(),
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
