"""The target's largest logits along its rollouts, stored so that later stages need no target."""
