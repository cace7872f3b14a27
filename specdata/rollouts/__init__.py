"""Stage 1: completions by the target."""
