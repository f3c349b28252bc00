"""`python -m singa.cli`."""

from ._start import start

start()
