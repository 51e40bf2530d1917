"""Figures: plain data that plotly draws, and their stills as SVG."""
