"""The version of perfmodel, which results, stores and reports carry."""

__all__ = ["__version__"]

__version__ = "0.1.0"
