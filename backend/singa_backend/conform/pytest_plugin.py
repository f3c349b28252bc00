"""One pytest item per ONNX case, for any backend class, under the strict verdict; the options are in sonnx_pytest/plugin.py.

Cases that are known to fail are listed in the gaps file under a reason (the layout of conform/gaps.py): a listed case that
passes is an error until its line is deleted.  Without files on the command line only the cases run.  Items are named
onnx::KIND::NAME (onnx::data::FOLDER for test data), can be selected by that name, and are distributed by pytest-xdist.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import onnx
import pytest

from ..comparison.tolerances import CASES
from ..errors import SonnxError
from ..proto import test_data
from . import cases, gaps, worker

PREFIX = "onnx::"


class NotPassed(Exception):
    """A case did not pass; the message is that of the verdict."""


class Item(pytest.Item):
    """One case."""

    def __init__(self, *, load: Callable[[], cases.Case], engine: Callable[[], Any], device: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._load, self._engine, self._device = load, engine, device

    def runtest(self) -> None:
        result = worker.run_case(self._load(), self._engine(), self._device)
        if result.opted_out:
            pytest.skip(result.reason)
        if result.strict != "passed":
            raise NotPassed(f"{result.strict}: {result.reason}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, (NotPassed, SonnxError)):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[os.PathLike[str] | str, int | None, str]:
        return self.path, None, self.nodeid


class CaseGroup(pytest.Collector):
    """The cases of one kind; no file names them, so the plugin adds this group to the session."""

    def __init__(self, *, make: Callable[[CaseGroup], list[Item]], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._make = make

    def collect(self) -> Iterable[pytest.Item]:
        return self._make(self)


class Plugin:
    """Adds the items to what pytest collects."""

    def __init__(self, config: pytest.Config) -> None:
        option = config.option
        self._backend: str = option.onnx_backend
        self._device: str = option.onnx_device
        known = CASES.bounds["float32"]
        self._rtol = known.rtol if option.onnx_rtol is None else option.onnx_rtol
        self._atol = (known.atol or 0.0) if option.onnx_atol is None else option.onnx_atol
        self._folders = [_folder(text, config) for text in option.onnx_data]
        self._kinds = _kinds(option.onnx_suite)
        self._gaps = self._read_gaps(option.onnx_gaps, config)
        here = str(config.invocation_params.dir)
        if here not in sys.path:  # the backend may be part of the tested project, also for pytest-xdist's workers
            sys.path.insert(0, here)
        self._check_backend()
        named = [a for a in config.args if a.startswith(PREFIX)]
        if named:  # pytest-xdist's workers see it too
            option.onnx_only = named
        self._only: list[str] = getattr(option, "onnx_only", None) or []
        explicit = config.args_source == pytest.Config.ArgsSource.ARGS
        config.args = [a for a in config.args if not a.startswith(PREFIX)] if explicit else []

    def _read_gaps(self, file: str | None, config: pytest.Config) -> dict[str, str]:
        try:
            path = config.invocation_params.dir / file if file else cases.data_file("gaps.txt")
            return gaps.read(path, self._device) if file or self._backend == worker.OURS else {}
        except (SonnxError, OSError) as error:
            raise pytest.UsageError(f"--onnx-gaps: {error}") from None

    def _check_backend(self) -> None:
        try:
            engine = worker.resolve(self._backend)
        except SonnxError as error:
            raise pytest.UsageError(f"--onnx-backend: {error}") from None
        supports = getattr(engine, "supports_device", None)
        if supports is not None and not supports(self._device):
            raise pytest.UsageError(
                f"--onnx-device: {self._backend} does not support the device {self._device!r} on this machine"
            )

    # --- the items

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Add the groups to what the command line names, before -k, --last-failed and similar options apply."""
        report = yield
        if isinstance(collector, pytest.Session) and report.passed:
            kinds = [*self._kinds, *(["data"] if self._folders else [])]
            report.result = [*(report.result or ()), *(
                CaseGroup.from_parent(collector, name=kind, nodeid=f"{PREFIX}{kind}", make=self._items)
                for kind in kinds if not self._only or any(n.startswith(f"{PREFIX}{kind}") for n in self._only)
            )]  # fmt: skip
        return report

    def _items(self, group: CaseGroup) -> list[Item]:
        engine = cache(lambda: worker.resolve(self._backend))
        made: list[Item] = []
        for name, load in self._data() if group.name == "data" else _suite(group.name):
            item: Item = Item.from_parent(group, name=name, load=load, engine=engine, device=self._device)
            if name in self._gaps:
                item.add_marker(pytest.mark.xfail(reason=self._gaps[name], strict=True))
            if not self._only or item.nodeid in self._only or group.nodeid in self._only:
                made.append(item)
        return made

    def _data(self) -> list[tuple[str, Callable[[], cases.Case]]]:
        found: dict[str, Callable[[], cases.Case]] = {}
        for folder in self._folders:
            for place in model_folders(folder):
                name = place.relative_to(folder).as_posix() if place != folder else folder.name
                if name in found:
                    name = f"{folder.name}/{name}"
                found[name] = _read(place, name, self._rtol, self._atol)
        return list(found.items())

    def pytest_report_header(self) -> str:
        what = [*self._kinds, *map(str, self._folders)]
        return f"onnx {onnx.__version__}: {', '.join(what)} against {self._backend} on {self._device}"


def _kinds(text: str | None) -> list[str]:
    if not text:
        return []
    chosen = list(cases.KINDS) if text == "all" else text.split(",")
    unknown = [k for k in chosen if k not in cases.KINDS]
    if unknown:
        raise pytest.UsageError(f"--onnx-suite: unknown kind {', '.join(unknown)}; there are {', '.join(cases.KINDS)}")
    return chosen


def _folder(text: str, config: pytest.Config) -> Path:
    folder = (config.invocation_params.dir / text).resolve()
    if not model_folders(folder):
        raise pytest.UsageError(f"--onnx-data: {folder} contains no folder with a model and test_data_set_*")
    return folder


def model_folders(folder: Path) -> list[Path]:
    """Return this folder and those below it that contain test_data_set_* and a model.onnx (or a single .onnx file)."""
    places = sorted({p.parent for p in folder.glob("**/test_data_set_*") if p.is_dir()})
    return [p for p in places if _model(p)]


def _model(place: Path) -> Path | None:
    found = sorted(place.glob("*.onnx"))
    return place / "model.onnx" if place / "model.onnx" in found else found[0] if len(found) == 1 else None


@cache
def _loaded(kind: str) -> dict[str, cases.Case]:
    return {c.name: c for c in cases.load([kind])}


def _suite(kind: str) -> list[tuple[str, Callable[[], cases.Case]]]:
    """Return the names of a kind's cases, and how to load each.

    Node cases take seconds to generate: their names come from the manifest if it is for the installed onnx, and the cases
    are generated when the first of them runs.
    """
    manifest = cases.manifest_file()
    if kind != "node" or manifest["onnx"] != onnx.__version__:
        names = list(_loaded(kind))
    else:
        others = {name for other in cases.KINDS if other != "node" for name in _loaded(other)}
        names = [name for name in manifest["cases"] if name not in others]
    return [(name, partial(_load, kind, name)) for name in names]


def _load(kind: str, name: str) -> cases.Case:
    return _loaded(kind)[name]


def _read(place: Path, name: str, rtol: float, atol: float) -> Callable[[], cases.Case]:
    def load() -> cases.Case:
        path = _model(place)
        assert path is not None
        model = onnx.load(path)  # external data included
        folders = sorted((p for p in place.glob("test_data_set_*") if p.is_dir()), key=lambda p: (len(p.name), p.name))
        data = [test_data.data_set(p, model) for p in folders]
        return cases.Case(name, "data", model.SerializeToString(), data, rtol, atol)

    return load
