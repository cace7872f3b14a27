"""Drafts and heads as folders that can be published: their cards, settings for engines, uploads."""
