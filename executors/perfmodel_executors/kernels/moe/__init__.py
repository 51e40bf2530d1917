"""Mixture of experts: routing and grouped experts."""
