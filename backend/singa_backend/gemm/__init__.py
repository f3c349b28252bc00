"""Products of matrices by machine code that is made for a kind of weights, not for sizes."""
