"""Prompts in natural English, written from a seed: what people ask a chat model."""
