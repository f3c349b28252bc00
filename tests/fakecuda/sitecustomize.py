"""Installs the emulated devices when CuPy is imported, in every process of `python -m fakecuda`."""

import importlib.abc
import importlib.machinery
import os
import sys


class _Loader(importlib.abc.Loader):
    """Executes CuPy's module inside the installation."""

    def __init__(self, loader):
        self.loader = loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        from fakecuda import installation

        with installation.around_import():
            self.loader.exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds CuPy as Python does, and puts the emulation around its import."""

    def find_spec(self, name, path=None, target=None):
        if name != "cupy":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


if os.environ.get("SONNX_FAKECUDA"):
    sys.meta_path.insert(0, _Finder())
