"""Simulate training steps: rollout, stages, and how sure the answer is."""
