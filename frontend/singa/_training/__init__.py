"""The training loop, and the search for the first NaN."""
