"""The module `singa.sonnx` under its short name: `import sonnx`."""

import sys
from typing import TYPE_CHECKING

from singa_backend.io.installation import check_singa

check_singa()

from singa import sonnx as _sonnx  # noqa: E402

if TYPE_CHECKING:  # at run time, the line below is enough, and imports no more than is used
    from singa.sonnx import *  # noqa: F403

sys.modules[__name__] = _sonnx  # `sonnx` and `singa.sonnx` are one module
