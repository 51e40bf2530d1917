"""What-ifs: words, tables, pictures, the page."""
