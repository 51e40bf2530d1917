"""What lies in device memory."""

__all__ = ["MEMORY"]

from perfmodel.web.questions import Question
from perfmodel.web.views.view import View, ViewPart

MEMORY = View(
    "memory",
    "Memory",
    "Does it fit, and how many tokens can it keep?",
    (ViewPart("plan", lambda state: (Question.of("memory", state),), is_kept=True),),
)
