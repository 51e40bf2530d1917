"""Many scenarios at once, and the numbers that are asked of each.

metrics.py    one number of a scenario, by name: of a run, of a step, of memory
capacity.py   the highest arrival rate that meets an SLO
"""

__all__: list[str] = []
