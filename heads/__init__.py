"""The acceptance head as an artefact: architecture, token mixing, loss, training."""
