"""Storage of data: atomic files, schemas, manifests, datasets made of shards."""
