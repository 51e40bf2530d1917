"""What a terminal would show, as text or as HTML for a notebook: results print themselves with it."""

__all__ = ["Print", "as_html", "as_text"]

import io
from collections.abc import Callable

from rich.console import Console

Print = Callable[[Console], None]
_WIDTH = 140
_PAGE = '<pre style="line-height:normal;font-family:monospace;white-space:pre;overflow-x:auto">{code}</pre>'


def as_text(show: Print) -> str:
    """What `show` prints, without colours or an empty line at the end."""
    written = io.StringIO()
    show(Console(file=written, width=_WIDTH, soft_wrap=True, no_color=True, force_terminal=False))
    return "\n".join(line.rstrip() for line in written.getvalue().strip("\n").splitlines())


def as_html(show: Print) -> str:
    """The same as one element of HTML, in colours."""
    console = Console(file=io.StringIO(), width=_WIDTH, record=True, force_terminal=True, force_jupyter=False)
    show(console)
    return console.export_html(inline_styles=True, code_format=_PAGE)
