"""The simulator against published numbers."""
