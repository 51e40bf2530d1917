"""Evaluates many scenarios and compares their metrics. Each module imports only those above it.

metrics, points: the metric registry; a scenario with overrides and metrics -> a record
workers, sweep: many points, on local processes or Ray, cached on disk; findings: comparisons of records
axes, whatif: sensitivities and crossovers along a scenario's field; load: offered load
study: a study file -> its points; their records by variant and axis
space: a plan's candidates and why others were ruled out
surfaces, service: step times and queueing in closed form; screen: candidates' highest rates
runs, choice, finalist, result: simulate finalists, rank them, quantify confidence; export: deployment files
jobs: the same for offline jobs; search: the entry point"""
