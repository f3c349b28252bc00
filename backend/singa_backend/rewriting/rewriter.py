"""What rules of rewriting work with: a graph, what is known of its values, and how calls are replaced in it."""
