"""The embedded text: seeded tasks and pieces of the standard library."""
