"""Speculative decoding, executed: who drafts, what is verified, which tokens stay."""

from perfmodel_executors.speculation.build import build_speculator, check_speculation
from perfmodel_executors.speculation.measured import AcceptanceCounts
from perfmodel_executors.speculation.speculator import Speculator

__all__ = ["AcceptanceCounts", "Speculator", "build_speculator", "check_speculation"]
