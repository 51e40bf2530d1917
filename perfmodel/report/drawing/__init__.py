"""Charts and figures: SVG, and the plain data that plotly draws."""
