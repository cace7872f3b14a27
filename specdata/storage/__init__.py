"""How data is stored: atomic files, schemas, manifests, datasets made of shards."""
