"""One stage per file: typed configuration in, artefact folder out."""
