"""Tools and theory beside the pipeline: greedy comparison, replay, what the papers predict."""
