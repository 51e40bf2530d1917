"""A document on a terminal, as Markdown, as one HTML page, as JSON. Each renderer knows all kinds of blocks."""
