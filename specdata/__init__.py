"""The base layer: distributions, rollouts, labels and stored shards."""

__version__ = "0.1.0"
