"""The options of the pytest plugin; a pytest run without any of them imports neither onnx nor NumPy.

pytest --onnx-suite --onnx-backend mypackage.backend:MyBackend
pytest --onnx-suite=node,simple -k softmax
pytest --onnx-data tests/models --onnx-gaps gaps.txt -n auto
"""

from __future__ import annotations

import pytest

DEFAULT = "singa_backend:SingaBackend"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("onnx", "test an ONNX backend with ONNX's suite or test data (sonnx)")
    group.addoption("--onnx-suite", nargs="?", const="all", metavar="KIND,...",
                    help="run the suite of the installed onnx, or only these kinds: node, real, simple, pytorch-converted, "
                         "pytorch-operator")  # fmt: skip
    group.addoption("--onnx-data", action="append", default=[], metavar="FOLDER",
                    help="run every folder below FOLDER that contains a model and test_data_set_* (repeatable)")  # fmt: skip
    group.addoption("--onnx-backend", default=DEFAULT, metavar="MODULE:CLASS", help=f"the backend under test ({DEFAULT})")
    group.addoption("--onnx-device", default="CPU", metavar="DEVICE", help="the backend's device (CPU)")
    group.addoption("--onnx-gaps", metavar="FILE",
                    help="known failing cases, under their reasons; one that passes is an error")  # fmt: skip
    group.addoption("--onnx-rtol", type=float, help="relative tolerance for --onnx-data (1e-3)")
    group.addoption("--onnx-atol", type=float, help="absolute tolerance for --onnx-data (1e-7)")


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin if one of its options is used."""
    if config.option.onnx_suite or config.option.onnx_data:
        from singa_backend.conform.pytest_plugin import Plugin

        config.pluginmanager.register(Plugin(config), "sonnx-cases")
