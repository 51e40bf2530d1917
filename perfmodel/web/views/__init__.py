"""The views of the page: each says which questions its parts ask of a state, and which templates show the answers."""

__all__ = ["VIEWS", "View", "ViewPart", "find_part", "find_view"]

from perfmodel.web.views.compare import COMPARE
from perfmodel.web.views.deployment import DEPLOYMENT
from perfmodel.web.views.memory import MEMORY
from perfmodel.web.views.plan import PLAN
from perfmodel.web.views.step import STEP
from perfmodel.web.views.techniques import TECHNIQUES
from perfmodel.web.views.traffic import TRAFFIC
from perfmodel.web.views.view import View, ViewPart
from perfmodel.web.views.whatif import WHATIF

VIEWS: tuple[View, ...] = (
    *(DEPLOYMENT, MEMORY, STEP),
    *(TRAFFIC, COMPARE),
    *(WHATIF, PLAN, TECHNIQUES),
)


def find_view(name: str) -> View | None:
    """The view of a name."""
    return next((view for view in VIEWS if view.name == name), None)


def find_part(view: View, name: str) -> ViewPart | None:
    """The part of a view by its name."""
    return next((part for part in view.parts if part.name == name), None)
