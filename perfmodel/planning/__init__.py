"""Many scenarios at once, and the numbers that are asked of each. Each room imports those before it only.

    sweeps       a scenario with overrides and the metrics wanted of it -> a record (points.py, metrics.py), for many of
                 them, in processes or on Ray (workers.py), kept on disk (sweep.py, store.py); findings of many records
    studies      a study's file -> its points; their records by variant and axis
    sensitivity  a path of a scenario and values for it: what they do to metrics, where orders change
    screening    the candidates of a plan and why others are none (space.py), their highest rates in closed form
    deployments  the simulator on finalists (runs.py), the choice, its doubt, what starts it
    jobs         the same for offline jobs, which have a deadline and no rate
    search.py    the plan: which of the two, and the steps from a space to an answer

A point knows nothing of what asks for it.
"""
