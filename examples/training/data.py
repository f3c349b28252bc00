"""The sets that the programs train on: CIFAR-10 from its files, scikit-learn's digits, and labelled sentences."""

from __future__ import annotations

import hashlib
import io
import itertools
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

MEAN, STD = (np.array(v, np.float32).reshape(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@dataclass
class Samples:
    """Targets, and what all sets have in common."""

    y: np.ndarray
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.y)

    def identity(self) -> str:
        """The digest of all arrays."""
        found = hashlib.sha256()
        for array in (v for v in vars(self).values() if isinstance(v, np.ndarray)):
            found.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
        return found.hexdigest()


@dataclass
class Images(Samples):
    """Images (N, 3, H, W) of bytes. `batch` resizes them to `size` and normalizes them as the published models require."""

    x: np.ndarray
    size: int
    flip: bool

    def batch(self, rows: np.ndarray, rng: np.random.Generator | None = None) -> list[np.ndarray]:
        x = self.x[rows]
        if rng is not None:
            x = augmented(x, rng, self.flip)
        return [(resized(x.astype(np.float32), self.size) / 255 - MEAN) / STD]


@dataclass
class Texts(Samples):
    """Ids (N, L) and a mask of the same shape; `names` of the inputs of the model decide what it is fed."""

    ids: np.ndarray
    mask: np.ndarray
    inputs: Sequence[str]

    def batch(self, rows: np.ndarray, rng: np.random.Generator | None = None) -> list[np.ndarray]:
        def value(name: str) -> np.ndarray:
            name = name.lower()
            if "mask" in name:
                return self.mask[rows]
            if "unique" in name:
                return np.arange(len(rows))
            return np.zeros_like(self.ids[rows]) if any(w in name for w in ("segment", "type", "kind")) else self.ids[rows]

        return [value(n) for n in self.inputs]


Set = TypeVar("Set", bound=Samples)


def part(samples: Set, rows: Any) -> Set:
    """Some rows of a set."""
    return replace(samples, **{n: v[rows] for n, v in vars(samples).items() if isinstance(v, np.ndarray)})


def augmented(x: np.ndarray, rng: np.random.Generator, flip: bool) -> np.ndarray:
    """Each image moved by up to an eighth of its size, the border filled with zeros; half of them flipped."""
    count, _, height, width = x.shape
    pad = max(1, height // 8)
    padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    made = np.empty_like(x)
    corners, flipped = rng.integers(0, 2 * pad + 1, (count, 2)), rng.random(count) < 0.5
    for i, (top, left) in enumerate(corners):
        image = padded[i, :, top : top + height, left : left + width]
        made[i] = image[..., ::-1] if flip and flipped[i] else image
    return made


def resized(x: np.ndarray, size: int) -> np.ndarray:
    """Bilinear interpolation between the centres of the pixels."""
    if x.shape[-2:] == (size, size):
        return x

    def weights(n: int) -> np.ndarray:
        place = np.clip((np.arange(size) + 0.5) * n / size - 0.5, 0, n - 1)
        low = place.astype(int)
        made = np.zeros((size, n), np.float32)
        np.add.at(made, (np.arange(size), low), 1 - (place - low))
        np.add.at(made, (np.arange(size), np.minimum(low + 1, n - 1)), place - low)
        return made

    return np.matmul(np.matmul(weights(x.shape[2]), x), weights(x.shape[3]).T)


# --- images ------------------------------------------------------------------------------------------------------------


def images(folder: Path | None, size: int | None, samples: int | None) -> tuple[Images, Images, Images]:
    """CIFAR-10 if a folder is given, otherwise the digits, as sets for training, validation and test.

    Args:
        folder: The folder of the files of CIFAR-10.
        size: The size of the images of the model; None for 32.
        samples: The largest number of samples for training.
    """
    if folder is None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        x = np.repeat((digits.images[:, None] * 255 / 16).astype(np.uint8), 3, axis=1)
        whole = Images(digits.target.astype(np.int32), tuple("0123456789"), x, size or 32, flip=False)
        order = np.random.default_rng(0).permutation(len(whole))
        test, rest = part(whole, order[:360]), part(whole, order[360:])
    else:
        rest, test = (Images(y, CIFAR10, x, size or 32, flip=True) for x, y in cifar10(folder))
    return (*_split(rest, samples), test)


def _split(rest: Set, samples: int | None) -> tuple[Set, Set]:
    held = max(1, len(rest) // 8)
    return part(rest, slice(held, None if samples is None else held + samples)), part(rest, slice(held))


def cifar10(folder: Path) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """The images and labels for training and for test, from the binary or the Python version of CIFAR-10."""
    for place in (folder, folder / "cifar-10-batches-bin", folder / "cifar-10-batches-py"):
        for ending, read in ((".bin", _binary), ("", _pickled)):
            names = [f"{n}{ending}" for n in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")]
            there = [n for n in names if (place / n).is_file()]
            if there and len(there) < len(names):
                raise SystemExit(f"{place} must have {', '.join(names)}; it lacks {', '.join(sorted(set(names) - set(there)))}")
            if there:
                *parts, test = [read(place / n) for n in names]
                return (np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])), test
    raise SystemExit(f"{folder} must have the files of CIFAR-10: data_batch_1.bin, ... (binary) or data_batch_1, ... (Python)")


def _binary(path: Path) -> tuple[np.ndarray, np.ndarray]:
    stored = np.frombuffer(path.read_bytes(), np.uint8)
    if not stored.size or stored.size % 3073:
        raise SystemExit(f"{path} must be records of 3073 bytes, got {stored.size} bytes")
    rows = stored.reshape(-1, 3073)
    return _checked(path, rows[:, 1:], rows[:, 0])


class _Arrays(pickle.Unpickler):
    """Reads containers, numbers and NumPy arrays; a file that names anything else is refused before it is called."""

    allowed = frozenset(
        {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}
        | {(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")}
        | {(f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")}
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        return super().find_class(module.replace("numpy.core.", "numpy._core."), name)


def _pickled(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        stored = _Arrays(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        found = {k.decode() if isinstance(k, bytes) else k: v for k, v in stored.items()}
        return _checked(path, np.asarray(found["data"]), np.asarray(found["labels"]))
    except (pickle.UnpicklingError, AttributeError, KeyError, TypeError, ValueError, EOFError, IndexError) as error:
        raise SystemExit(f"{path} must be a batch of CIFAR-10: {error}") from None


def _checked(path: Path, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    right = x.dtype == np.uint8 and x.ndim == 2 and x.shape[1] == 3072 and y.shape == (len(x),) and y.dtype.kind in "iu"
    if not right or len(x) == 0 or y.min() < 0 or y.max() > 9:
        raise SystemExit(f"{path} must have rows of 3072 bytes and labels 0 to 9, got {x.dtype}{x.shape}, {y.dtype}{y.shape}")
    return x.reshape(-1, 3, 32, 32), y.astype(np.int32)


# --- text --------------------------------------------------------------------------------------------------------------

THINGS = ("film", "book", "meal", "song", "play", "game", "show", "trip", "walk", "talk", "dish", "tour", "view", "room", "food",
          "poem", "cast", "plot", "tale", "match")  # fmt: skip
GOOD, BAD = ("good", "great", "lovely", "fine", "superb"), ("bad", "poor", "dull", "awful", "weak")


def sentences(seed: int = 0) -> tuple[list[str], np.ndarray]:
    """800 different sentences about things, which are praised or not; "not" turns the label around."""
    made = [
        (" ".join(["the", thing, "was", *["not"] * negated, *["very"] * strong, word]), (word in GOOD) ^ negated)
        for thing, negated, strong, word in itertools.product(THINGS, (0, 1), (0, 1), GOOD + BAD)
    ]
    order = np.random.default_rng(seed).permutation(len(made))
    return [made[i][0] for i in order], np.array([made[i][1] for i in order], np.int32)


def texts(
    path: Path | None, vocabulary: Path | None, inputs: Sequence[str], length: int, samples: int | None
) -> tuple[Texts, Texts, Texts, int]:
    """Lines of `label<TAB>text` if a file is given, otherwise sentences; and the number of words of the vocabulary."""
    if path is None:
        lines, y = sentences()
        names: tuple[str, ...] = ("negative", "positive")
    else:
        rows = [line.split("\t", 1) for line in path.read_text("utf-8").splitlines() if line.strip()]
        bad = next((i for i, r in enumerate(rows) if len(r) != 2), None)
        if not rows or bad is not None:
            raise SystemExit(f"{path} must have lines of label, tab, text; line {(bad or 0) + 1} differs")
        names, lines = tuple(sorted({label for label, _ in rows})), [text for _, text in rows]
        y = np.array([names.index(label) for label, _ in rows], np.int32)
    ids, mask, words = encoded(lines, vocabulary, length)
    whole = Texts(y, names, ids, mask, inputs)
    order = np.random.default_rng(0).permutation(len(whole))
    held = max(1, len(whole) // 5)
    return (*_split(part(whole, order[held:]), samples), part(whole, order[:held]), words)


def encoded(lines: Sequence[str], vocabulary: Path | None, length: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Ids and mask: WordPiece by a vocabulary file of BERT, otherwise whole words in the order of the alphabet."""
    if vocabulary is None:
        known = {w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *sorted({w for s in lines for w in s.split()})])}
        rows = [[2, *(known[w] for w in s.split()), 3] for s in lines]
        count = len(known)
    else:
        try:
            from tokenizers import BertWordPieceTokenizer
        except ImportError:
            raise SystemExit("--vocab needs the tokenizers library: pip install tokenizers") from None
        tokenizer = BertWordPieceTokenizer(str(vocabulary))
        rows, count = [tokenizer.encode(s).ids for s in lines], tokenizer.get_vocab_size()
    longest = max(map(len, rows))
    if longest > length:
        raise SystemExit(f"a text has {longest} tokens, and --length is {length}: pass --length {longest}, or shorten the text")
    ids, mask = (np.zeros((len(rows), length), np.int64) for _ in range(2))
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = row, 1
    return ids, mask, count
