"""Fast implementations of operators: libraries, and which nodes they compute."""
