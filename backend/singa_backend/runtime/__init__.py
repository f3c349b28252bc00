"""Run a graph: the executor, and the conversion of what a caller passes to `run`."""
