"""Everything that makes a language model: the embedded pair and draft distillation."""
