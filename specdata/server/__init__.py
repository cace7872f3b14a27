"""A server that runs the target in a process of its own: where it is, and how it is asked."""
