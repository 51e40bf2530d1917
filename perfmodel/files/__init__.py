"""From files to validated data: catalogue names, YAML with positions, units."""
