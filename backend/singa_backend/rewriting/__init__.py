"""Rewrites of graphs, each rule once: they see a graph through a `GraphView`, and know neither messages nor plans."""
