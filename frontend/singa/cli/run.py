"""`sonnx run`: run a model once."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from singa_backend.choices import CASE_ATOL, CASE_RTOL
from singa_backend.errors import InvalidInput
from singa_backend.io.places import check

from . import _feeds
from ._common import (
    NO,
    OUTPUT_PATH,
    SECONDS,
    TOLERANCE,
    adapter_option,
    device_option,
    echo,
    exit_codes,
    json_option,
    limit_option,
    plan_options,
    show,
    write_json,
    wrote,
)
from ._inputs import InputOptions, model_options
from ._tables import NAME, NUMBER, WORDS, Columns

if TYPE_CHECKING:
    from singa_backend import Limits, SingaRep
    from singa_backend.runtime.origins import Origin

_OUTPUTS = Columns({"output": NAME, "type": WORDS, "min": NUMBER, "max": NUMBER, "NaN": NUMBER, "Inf": NUMBER,
                    "first values": WORDS})  # fmt: skip


@dataclass(frozen=True)
class RunOptions:
    """The arguments of the command, by the names of its options."""

    model: Path
    inputs: InputOptions
    adapters: tuple[Path, ...]
    target: Path | None
    save_inputs: Path | None
    against: str | None
    program: str | None
    timeout: float
    aux: tuple[str, ...]
    rtol: float
    atol: float
    validate: bool
    device: str
    threads: int | None
    precision: str
    optimize: int
    limits: Limits
    as_json: bool

    @property
    def other(self) -> bool:
        """Whether the outputs are compared with those of another engine."""
        return self.against is not None or self.program is not None


@dataclass(frozen=True)
class _Result:
    """The outputs of the run, and their comparison.

    Attributes:
        outputs: The outputs by name.
        compared: Whether there were expected outputs.
        difference: The first difference from them; "" without one.
        both_nan: The number of values that are NaN in both.
        origin: The first node that makes NaN or infinity, if the run looked for it.
    """

    outputs: dict[str, Any]
    compared: bool
    difference: str
    both_nan: int
    origin: Origin | None


@click.command("run")
@model_options
@click.option(
    "--output",
    "-o",
    "--save-outputs",
    "target",
    type=OUTPUT_PATH,
    help="Write the outputs by name to this .npz file.",
)
@click.option("--save-inputs", type=OUTPUT_PATH, help="Write the inputs by name to this .npz file.")
@click.option(
    "--against", metavar="ENGINE|FILE", help="Compare the outputs with those of an engine of `sonnx compare`, or in an .npz file."
)
@click.option("--against-command", "program", metavar="CMD", help="Compare the outputs with those of a program.")
@click.option("--timeout", default=60.0, show_default=True, type=SECONDS, help="Seconds that another engine may take.")
@click.option("--aux", multiple=True, metavar="NAME", help="Return this intermediate value too (repeatable).")
@click.option("--rtol", type=TOLERANCE, default=CASE_RTOL, show_default=True, help="Relative tolerance for --data and --against.")
@click.option("--atol", type=TOLERANCE, default=CASE_ATOL, show_default=True, help="Absolute tolerance for --data and --against.")
@click.option(
    "--validate", is_flag=True, help="Name the first node that makes NaN or infinity; the exit code is 1 if there is one."
)
@adapter_option
@device_option
@plan_options
@limit_option
@json_option
@exit_codes
def command(**given: Any) -> None:
    """Run MODEL once and show or save its outputs; with --data, compare them with those in the folder.

    With --against or --against-command, compare them with those of another engine, or of an .npz file.
    """
    from singa_backend import SingaBackend
    from singa_backend.io.files import write_npz
    from singa_backend.proto.named_arrays import named_arrays

    options = RunOptions(**given)
    _check(options)
    rep = SingaBackend.prepare(
        options.model,
        options.device,
        limits=options.limits,
        threads=options.threads,
        precision=options.precision,
        optimize=options.optimize,
        adapter=options.adapters or None,
    )
    feeds, expected = _feed(options, rep)
    if options.save_inputs:
        write_npz(options.save_inputs, named_arrays(feeds))
    result = _run(options, rep, feeds, expected)
    if options.as_json:
        _write(options, result)
    else:
        _tell(options, result)
    if result.difference or (options.validate and result.origin):
        sys.exit(NO)


def _check(options: RunOptions) -> None:
    """Raise for files that cannot be written, and for options that contradict each other."""
    for path in filter(None, (options.target, options.save_inputs)):
        check(path, keeps=(options.model,))
    if options.other and options.adapters and not (options.against or "").endswith(".npz"):
        raise click.UsageError("--against compares with the model without adapters: write one with them by sonnx merge first")
    if options.other and options.inputs.data:
        raise click.UsageError("--data has expected outputs: use --inputs or --input with --against and --against-command")


def _feed(options: RunOptions, rep: SingaRep) -> tuple[dict[str, Any], list[Any] | None]:
    """Return the inputs by name, and the expected outputs of --data; the files are read under the limits of the run."""
    from onnx import ModelProto

    from singa_backend.limits import Budget, spend
    from singa_backend.proto import test_data
    from singa_backend.proto.load import load_model

    inputs = options.inputs
    with spend(Budget(options.limits)):
        proto = load_model(options.model)[0] if inputs.data else ModelProto()
        needed = [v for v in rep.inputs if v.kind != "optional"]
        if needed and inputs.seed is None and not inputs.given:
            raise InvalidInput(
                f"the inputs {', '.join(map(str, needed))} must be passed, got none",
                code="SX301",
                hint="--random 0 draws them; arrays are passed by --input NAME=FILE, --inputs FILE.npz or --data FOLDER",
            )
        feeds = inputs.gather(proto, rep.inputs, draw=False, optional=rep.graph.declared_optional_inputs)
        return feeds, test_data.data_set(inputs.data, proto)[1] if inputs.data else None


def _run(options: RunOptions, rep: SingaRep, feeds: dict[str, Any], expected: list[Any] | None) -> _Result:
    """Run the model, write its outputs, and compare them with the expected ones or with those of another engine."""
    from singa_backend.comparison import finite, verdict
    from singa_backend.io.files import write_npz
    from singa_backend.proto.named_arrays import named_arrays
    from singa_backend.runtime.origins import NonFinite

    origin = None
    try:
        made = rep.run(feeds, aux_output=options.aux, validate=options.validate or expected is not None)
    except NonFinite as error:
        made, origin = error.outputs, error.origin
    outputs = made.to_dict()
    if options.target:
        write_npz(options.target, named_arrays(outputs))
    found = list(made)[: len(expected)] if expected is not None else []
    if options.other:
        from singa_backend.debug.compare import outputs_of

        from .compare import trusted

        engine = trusted(options.against, options.program, options.device)
        theirs = outputs_of(options.model, feeds, outputs, engine, timeout=options.timeout)
        found, expected = [outputs[n] for n in theirs], list(theirs.values())
    why = verdict.strict(found, expected, options.rtol, options.atol) if expected is not None else ""
    return _Result(outputs, expected is not None, why, 0 if why else finite.shared_nan(list(made), expected), origin)


def _write(options: RunOptions, result: _Result) -> None:
    """Print the result as JSON."""
    document = {"outputs": _rows(result), "compared": result.compared, "difference": result.difference}
    if options.validate or result.compared:
        document |= {"both_nan": result.both_nan, "nonfinite": result.origin.to_dict() if result.origin else None}
    write_json(document)


def _tell(options: RunOptions, result: _Result) -> None:
    """Print the result as text."""
    from singa_backend.comparison import finite

    _show_outputs(_rows(result))
    wrote(options.target)
    why, both = result.difference, result.both_nan
    if result.compared:
        echo(f"differs: {why}" if why else "equal to the expected outputs", style="red" if why else "green")
    if both:
        echo(f"NaN in the outputs and in the expected outputs: {both} value{'s' * (both != 1)}", style="yellow")
    if result.origin and (options.validate or why or both):
        echo(f"first NaN or infinity: {result.origin}", style="red" if options.validate else "yellow")
    elif options.validate:
        given = any(map(any, map(finite.counts, result.outputs.values())))
        rest = "; those of the outputs come from inputs or constants" if given else ""
        echo(f"no node makes NaN or infinity{rest}", style="green")


def _rows(result: _Result) -> list[dict[str, Any]]:
    return [_feeds.summary(n, v) for n, v in result.outputs.items()]


def _show_outputs(rows: list[dict[str, Any]]) -> None:
    table = _OUTPUTS.table()
    for r in rows:
        kind = f"{r['dtype']}{r['shape']}" if r["kind"] == "tensor" else f"{r['kind']} of {r['length']}"
        table.add(r["name"], kind, *(r.get(k) for k in ("min", "max", "nan", "inf")), " ".join(map(_six, r.get("first", []))))
    show(table)


def _six(text: str) -> str:
    """Return a value of at most six significant digits if it is a float; other values stay as they are."""
    return f"{float(text):.6g}" if re.fullmatch(r"-?\d+\.\d*(e[-+]\d+)?|-?\d+e[-+]\d+", text) else text
