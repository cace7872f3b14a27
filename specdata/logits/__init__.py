"""The target's largest logits along its rollouts, kept so that later stages need no target."""
