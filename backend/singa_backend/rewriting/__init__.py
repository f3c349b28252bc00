"""Rewrites of graphs, each rule once: they work on nodes and values, and ask a `Rewriter` what depends on a plan or a file."""
