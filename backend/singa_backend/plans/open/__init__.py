"""What grows between runs: caches of generated text, and products whose sizes differ."""
