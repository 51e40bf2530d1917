"""What the machine at hand is: its processor, its memory by a copy test, its GPUs by their own tools."""
