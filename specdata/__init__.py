"""What a distribution, a rollout, a label and a stored shard are: the base layer."""
