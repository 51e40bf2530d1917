"""Many scenarios at once, and the numbers that are asked of each. Each module imports those before it only.

    metrics, points   the registry of metrics; a scenario with overrides and the metrics wanted of it -> a record
    workers, sweep    many points, in processes or on Ray, kept on disk; findings: what many records say
    axes, whatif      a path of a scenario and values for it: what they do to metrics, where orders change; load
    study             a study's file -> its points; their records by variant and axis
    space             the candidates of a plan and why others are none
    surfaces, service what steps take and how requests wait, in closed form; screen: the highest rates of candidates
    runs, choice      the simulator on finalists; which is best, and how sure (finalist, result); export: what starts it
    jobs              the same for offline jobs, which have a deadline and no rate
    search            the plan: which of the two, and the steps from a space to an answer

A point knows nothing of what asks for it.
"""
