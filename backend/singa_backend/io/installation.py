"""The version of sonnx, and whether the package `singa` is that of this distribution: Apache SINGA's package has the same name.

Installing the other package overwrites files of this distribution, or it precedes them on the path. The import of
`singa_backend` then warns, and that of `sonnx` raises ImportError.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from pathlib import Path

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"
"""The file of the project, if this file is in a checkout."""


def version() -> str:
    """The version of sonnx: that of the installed distribution, otherwise that of the checkout.

    Returns:
        The version; "unknown" if sonnx is neither installed nor a checkout.
    """
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed_version

    try:
        return installed_version("sonnx")
    except PackageNotFoundError:
        pass
    import tomllib

    try:
        project = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]
    except (OSError, ValueError, KeyError):
        return "unknown"
    return str(project["version"]) if project.get("name") == "sonnx" else "unknown"


def _other_singa() -> str:
    """The folder of a package `singa` that is not that of this distribution; "" if there is none."""
    try:
        spec = importlib.util.find_spec("singa")  # does not run it
    except (ImportError, ValueError):
        return ""
    if spec is None:
        return ""
    folder = os.path.dirname(spec.origin) if spec.origin else ", ".join(spec.submodule_search_locations or ())
    read = getattr(spec.loader, "get_source", None)  # pytest's loader of the files of a plugin's distribution has none
    try:
        if read is not None:
            source = read("singa")
        else:
            source = Path(spec.origin).read_text("utf-8") if spec.origin else ""
    except (ImportError, OSError, ValueError):
        return ""
    return "" if source is None or "from ._lazy import" in source else folder or "an unknown place"


def _text(folder: str) -> str:
    return (
        f"the package singa in {folder} is not that of sonnx: Apache SINGA's own package has the same name, and was installed "
        "over it or precedes it on sys.path; remove it, then install sonnx again: "
        "pip uninstall singa && pip install --force-reinstall --no-deps sonnx"
    )


def check_singa() -> None:
    """Check that `import singa` imports the package of this distribution.

    Raises:
        ImportError: it would import another one.
    """
    if folder := _other_singa():
        raise ImportError(_text(folder), name="singa")


if _found := _other_singa():
    warnings.warn(_text(_found), RuntimeWarning, stacklevel=2)
