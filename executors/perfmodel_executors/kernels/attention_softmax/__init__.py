"""Attention whose scores are capped, or share their softmax with a learned sink."""
