"""Environments on the host, in text: what answers between the turns of a completion, and tools that a model calls."""
