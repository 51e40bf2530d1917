"""The weights of a changed model (`model_changes`), made of those of the model in its file."""

__all__ = ["changed_weights"]

from perfmodel_executors.models.changed.apply import changed_weights
