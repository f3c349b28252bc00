"""Run a command on the emulated devices: `python -m fakecuda python -c "import cupy; print(cupy.arange(3) + 1)"`."""

import os
import sys

from . import Unavailable, environment

if len(sys.argv) < 2:
    sys.exit("usage: python -m fakecuda COMMAND [ARGUMENT ...]")
try:
    from .build import libraries

    libraries()
except Unavailable as error:
    sys.exit(f"fakecuda: {error}")
try:
    os.execvpe(sys.argv[1], sys.argv[1:], environment())
except OSError as error:
    sys.exit(f"fakecuda: {sys.argv[1]}: {error.strerror}")
