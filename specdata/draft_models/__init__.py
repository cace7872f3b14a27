"""What drafts read and propose beside transformers' own models: states, layouts, vocabularies."""
