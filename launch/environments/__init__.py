"""Environments on the host: what answers between the turns of a completion, in text, and the tools that a model calls."""
