"""Charts as SVG text: axes, lines, bars, fronts, scatter plots, waterfalls; their colours."""
