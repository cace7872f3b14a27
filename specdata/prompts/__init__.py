"""Prompt sets: where they come from, how rows become prompts, chat templates."""
