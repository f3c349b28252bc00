"""Run a graph: the executor, and the conversion of inputs passed to `run`."""
