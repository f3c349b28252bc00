"""`python -m singa.cli`."""

from ._main import main

main()
