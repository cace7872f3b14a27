"""Running forwards: sequences, key-value cache, models, graphs, batches."""
