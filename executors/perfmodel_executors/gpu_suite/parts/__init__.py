"""What the suite measures, a module for each part: its tasks, the most informative first, and their records."""
