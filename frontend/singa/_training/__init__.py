"""The loop over a data set, and the search for the first NaN."""
