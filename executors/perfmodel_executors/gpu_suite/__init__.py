"""The measuring programme of one device: `python -m perfmodel_executors.gpu_suite --out DIR --budget-s 480`.

Ceilings, every kernel against its reference and the best library call, whole steps of three models, and served
scenarios, the most informative first, until the budget is spent. What it writes is described in
`perfmodel.evidence.sources.measured`; `perfmodel calibrate --from DIR` and `perfmodel validate executor --measured DIR`
read it anywhere.
"""
