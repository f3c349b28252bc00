"""`python -m singa.cli`."""

from . import main

main()
