"""Pictures of data: pure functions from a command's JSON to plotly's data and layout, one file per theme.

Paper, ink and grid are the page's, in light and in dark.
"""

__all__: list[str] = []
