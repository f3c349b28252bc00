"""Shared by the programs whose published models are files of PyPI packages.

Only the files are used: the packages are installed without their requirements, and their code is never imported.

    VOICES = Package("silero-vad", "6.2.3")
    parser = options(__doc__, VOICES, "silero_vad.onnx")
    rep = load(args, VOICES, "silero_vad.onnx")       # the file of the installed package, unless --model names another
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import published

from singa_backend.errors import MissingDependency


@dataclass(frozen=True)
class Package:
    """A package, and the version for which the program was written; `flags` are further options of pip."""

    name: str
    version: str
    flags: str = ""

    @property
    def command(self) -> str:
        """The command that installs it."""
        return " ".join(["pip install --no-deps", *self.flags.split(), f"{self.name}=={self.version}"])

    def file(self, name: str) -> Path:
        """Return the path of a file of the installed package, by the end of its path in the package.

        Raises:
            MissingDependency: the package is not installed, or this version has no such file, or several.
        """
        hint = f"{self.command}, or --model PATH"
        try:
            files = metadata.files(self.name) or []
        except metadata.PackageNotFoundError:
            raise MissingDependency(f"{name} is a file of the package {self.name}, which is not installed", hint=hint) from None
        wanted = name.split("/")
        found = [path for f in files if list(f.parts[-len(wanted) :]) == wanted and (path := Path(str(f.locate()))).is_file()]
        if len(found) != 1:
            what = f"{self.name} {metadata.version(self.name)} has {len(found)} files {name}, expected one"
            raise MissingDependency(what, hint=hint)
        return found[0]


def options(about: str | None, package: Package, file: str) -> argparse.ArgumentParser:
    """Return a parser with the options of all programs; --model is by default the file of the package."""
    return published.options(about, file, package=f"{package.name} {package.version}")


def load(args: argparse.Namespace, package: Package, file: str) -> Any:
    """Return the model of the options, by default the one of the package, as a SingaRep."""
    args.model = args.model or str(package.file(file))
    return published.load(args)
