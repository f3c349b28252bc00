"""Files that appear whole or not at all, archives of arrays that are read with limits, and child processes."""
