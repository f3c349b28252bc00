"""Other engines, and this one, as peers for comparisons."""
