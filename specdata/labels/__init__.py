"""Stage 3a: what a draft would have proposed along a rollout, and its acceptance."""
