"""Name the types of files by their content with Magika: python file_type.py FILE...

The model is a file of a PyPI package: pip install --no-deps magika==1.0.3
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from packaged import Package, load, options
from published import start

from singa_backend.errors import InvalidModel
from singa_backend.io.archives import open_file, typed
from singa_backend.io.documents import read_document

MAGIKA = Package("magika", "1.0.3")
FILE, CONFIG, KINDS = "model.onnx", "config.min.json", "content_types_kb.min.json"

MODES = ("high", "medium", "best")
"""A label is believed above its own threshold, above the threshold of all labels, or always."""

BATCH = 64


@dataclass(frozen=True)
class Config:
    """What the model was trained with: config.min.json."""

    beginning: int
    end: int
    padding: int
    block: int
    fewest: int
    labels: Sequence[str]
    threshold: float
    thresholds: dict[str, float]
    renamed: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> Config:
        """Read the settings of a model.

        Raises:
            InvalidInput: the file is not such a document.
            InvalidModel: the model needs bytes from the middle of a file, or at fixed offsets.
        """
        found = read_document(path, "SX307").mapping()
        with typed(str(path), "SX307"):
            if found["mid_size"] or found["use_inputs_at_offsets"]:
                raise InvalidModel("the model must read the beginning and the end of files only", hint="use that of magika 1.0.3")
            return cls(
                found["beg_size"], found["end_size"], found["padding_token"], found["block_size"], found["min_file_size_for_dl"],
                found["target_labels_space"], found["medium_confidence_threshold"], found["thresholds"], found["overwrite_map"],
            )  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """The type of a file; `guess` is the label with the highest score, "" if the model was not needed."""

    label: str
    score: float = 1.0
    guess: str = ""


def features(head: bytes, tail: bytes, config: Config) -> np.ndarray:
    """Return the model's input for the first and the last block of a file, without the white space around it."""
    first, last = head.lstrip()[: config.beginning], tail.rstrip()
    last = last[max(0, len(last) - config.end) :]
    out = np.full(config.beginning + config.end, config.padding, np.int32)
    out[: len(first)] = list(first)
    out[len(out) - len(last) :] = list(last)
    return out


def without_model(path: Path, config: Config) -> Verdict | np.ndarray:
    """Return the verdict on a folder or a very short file, otherwise the features of the file."""
    if path.is_dir():
        return Verdict("directory")
    with open_file(path, "SX307") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(config.block)
        file.seek(max(0, size - config.block))
        tail = file.read(config.block)
    if not head:
        return Verdict("empty")
    if len(head.lstrip()) < config.fewest:
        return Verdict("txt" if _is_text(head) else "unknown")
    return features(head, tail, config)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def judged(scores: np.ndarray, config: Config, kinds: dict[str, Any], mode: str = "high") -> Verdict:
    """Return the verdict for the scores of a file; a label that is not believed becomes txt or unknown."""
    guess = config.labels[int(scores.argmax())]
    score, label = float(scores.max()), config.renamed.get(guess, guess)
    threshold = {"high": config.thresholds.get(guess, config.threshold), "medium": config.threshold, "best": 0.0}[mode]
    if score < threshold:
        label = "txt" if kinds[label]["is_text"] else "unknown"
    return Verdict(label, score, guess)


def verdicts(rep: Any, paths: Iterable[Path], config: Config, kinds: dict[str, Any], mode: str = "high") -> list[Verdict]:
    """Return the type of each file; the model runs on batches."""
    found = [without_model(path, config) for path in paths]
    places = [i for i, f in enumerate(found) if isinstance(f, np.ndarray)]
    for k in range(0, len(places), BATCH):
        part = places[k : k + BATCH]
        for i, scores in zip(part, rep.run([np.stack([found[i] for i in part])])[0], strict=True):
            found[i] = judged(scores, config, kinds, mode)
    return found  # type: ignore[return-value]  # no features are left


def main() -> None:
    parser = options(__doc__, MAGIKA, FILE)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--config", type=Path, help=f"{CONFIG} of the model; by default next to --model, or of the package")
    parser.add_argument("--kinds", type=Path, help=f"{KINDS}; by default of the package")
    parser.add_argument("--mode", choices=MODES, default="high", help="how sure a label must be (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the verdicts as JSON")
    args = parser.parse_args()
    beside = Path(args.model).parent / CONFIG if args.model and "://" not in args.model else None
    config = Config.read(args.config or (beside if beside and beside.is_file() else MAGIKA.file(CONFIG)))
    kinds = read_document(args.kinds or MAGIKA.file(KINDS), "SX307").mapping()
    found = verdicts(load(args, MAGIKA, FILE), args.files, config, kinds, args.mode)
    if args.json:
        print(json.dumps([{"path": str(p), **vars(v)} for p, v in zip(args.files, found, strict=True)], indent=1))
        return
    for path, verdict in zip(args.files, found, strict=True):
        about = kinds[verdict.label]
        print(f"{path}: {verdict.label} ({about['description'] or 'no description'}, {about['mime_type'] or 'no MIME type'}), "
              f"{verdict.score:.3f}")  # fmt: skip


if __name__ == "__main__":
    start(main)
