"""What a distribution, a rollout, a label and a stored shard are: the base layer."""

__version__ = "0.1.0"
