"""The measuring programme of one device: `python -m perfmodel_executors.gpu_suite --out DIR --budget-s 480`. Ceilings,
kernels, whole steps and served scenarios, the most informative first, until the budget is spent. Its files are
described in `perfmodel.evidence.sources.measured`, which reads them anywhere."""
