"""What `sonnx conform` prints below its table: why the counts differ, gaps, failures by reason, what the figures mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from singa_backend.conform import results
from singa_backend.conform.gaps import Judgement
from singa_backend.conform.worker import Result

from ._common import echo

_GROUPS = 40
"""Groups of failures that are listed."""

_NAMES = 6
"""Names of cases that a line lists."""


def names(of: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    return ", ".join(of[:_NAMES]) + (f" and {len(of) - _NAMES} more" if len(of) > _NAMES else "")


def counted(count: int, what: str) -> str:
    """Return "1 case", "2 cases"."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def show_counts(found: Sequence[Result], judged: Judgement, path: Path) -> None:
    """Print in one line each why the counts of the two verdicts differ, and what the known gaps are.

    path: the file of the gaps.
    """
    official = [r.name for r in found if r.strict == "passed" and r.official != "passed"]
    lenient = [r.name for r in found if r.strict != "passed" and r.official == "passed"]
    if official:
        verb = "pass" if len(official) > 1 else "passes"
        echo(f"{counted(len(official), 'case')} {verb} the strict verdict, but not ONNX's own comparison: {names(official)}")
    if lenient:
        verb = "pass" if len(lenient) > 1 else "passes"
        echo(f"{counted(len(lenient), 'case')} {verb} ONNX's own comparison, but not the strict verdict: {names(lenient)}")
    out = sum(r.opted_out for r in found)
    if out:
        echo(f"{counted(out, 'case')} not supported: the backend raises BackendIsNotSupposedToImplementIt")
    if len(judged.explained) > out:
        other = sum(name.startswith("official:") for name in judged.explained)
        parts = [f"{counted(n, 'case')} {why}" for n, why in (
            (len(judged.explained) - other - out, "not passed"),
            (other, "that only ONNX's own comparison fails"),
        ) if n]  # fmt: skip
        echo(f"known gaps: {len(judged.explained) - out} ({', '.join(parts)}), each with its reason in {path}")


def show_failures(judged: Judgement, release: str = "") -> None:
    """Print the failures that no gap explains, by verdict and reason, and the gaps that are closed.

    release: the release whose cases ran; "" for the installed onnx.
    """
    groups = results.by_reason(judged.unexpected)
    count = {verdict: 0 for verdict, _, _ in groups}
    for verdict, _, members in groups:
        count[verdict] += len(members)
    shown = ""
    for verdict, reason, members in groups[:_GROUPS]:
        if verdict != shown:
            echo(f"{verdict}: {counted(count[verdict], 'case')}" + (f" of onnx {release}" if release else ""), style="red")
            shown = verdict
        echo(f"  {members[0]}: {reason[:400]}")
        if members[1:]:
            echo(f"    likewise {len(members) - 1}: {names(members[1:])}")
    if len(groups) > _GROUPS:
        rest = sum(len(members) for _, _, members in groups[_GROUPS:])
        echo(f"... and {counted(rest, 'case')} with {len(groups) - _GROUPS} other reasons; --results FILE lists all of them")
    for name in judged.closed:
        place = f"{release} {name}" if release else name
        echo(f"closed gap {place}: it passes now; delete its line from gaps.txt", style="red")


def show_meaning(judged: Judgement, offers_report: bool) -> None:
    """Print what the verdicts are, and what the cases are that do not pass.

    Args:
        judged: The cases that do not pass.
        offers_report: Whether to name the option that writes a report: the whole suite ran, and none is written.
    """
    echo("strict: the expected values, dtypes and shapes, and the same bits in a second run")
    echo("official: ONNX's own comparison, which checks less")
    by_reason = Counter((reason.rstrip("."), name.startswith("official:")) for name, reason in judged.explained.items())
    for (reason, official), count in by_reason.most_common():
        what = "that only ONNX's own comparison fails" if official else "not passed"
        echo(f"explained, {counted(count, 'case')} {what}: {reason}")
    if judged.unexpected:
        echo(f"not explained, {counted(len(judged.unexpected), 'case')} not passed: listed above by verdict and reason")
    if not judged.unexpected and not by_reason:
        echo("every case passes both verdicts")
    if offers_report:
        echo("--report FOLDER writes a page that answers: does an operator work at an opset?")
