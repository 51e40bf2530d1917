"""Studies: words, tables, pictures, the page."""
