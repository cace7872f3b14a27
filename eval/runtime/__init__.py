"""How forwards run: sequences, key-value cache, models, graphs, batches."""
