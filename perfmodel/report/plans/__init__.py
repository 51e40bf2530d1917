"""Plans: on a terminal, pictures, the page."""
