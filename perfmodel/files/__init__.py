"""From a file to checked data: names and paths, YAML with positions, units, validation in sentences."""
