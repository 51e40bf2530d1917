"""`files_of`: what an answer can be taken along as: of a plan what `--export` writes, and its report."""

__all__ = ["REPORT", "files_of"]

from perfmodel.answers.answer import Answer

REPORT = "report.html"


def files_of(command: str, answer: Answer) -> dict[str, str]:
    """File name -> text."""
    if command != "plan":
        return {}
    from perfmodel.planning.deployments.export import plan_files
    from perfmodel.planning.deployments.result import PlanResult
    from perfmodel.report.pages import render_page

    starts = plan_files(answer.result) if isinstance(answer.result, PlanResult) else {}
    return {**starts, REPORT: render_page(answer.document)}
