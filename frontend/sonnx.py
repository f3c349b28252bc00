"""The module `singa.sonnx` under its short name: `import sonnx`."""

import sys

from singa_backend.io.installation import check_singa

check_singa()

from singa import sonnx as _sonnx  # noqa: E402
from singa.sonnx import *  # noqa: E402, F403

sys.modules[__name__] = _sonnx  # `sonnx` and `singa.sonnx` are one module
