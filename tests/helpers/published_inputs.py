"""Inputs with a known answer for the programs with published weights: a page, speech, files of many kinds, and a melody."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import plistlib
import sqlite3
import struct
import tarfile
import wave
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper
from PIL import Image, ImageDraw, ImageFont

# --- a page ---------------------------------------------------------------------------------------------------------------

PAGE: list[list[tuple[str, int, int]]] = [
    [("Invoice 2047", 40, 44)],
    [("Delivered on 12 March", 60, 34)],
    [("Please pay within thirty days", 60, 32)],
    [("Grand total", 80, 36), ("1,385.60", 420, 36)],
    [("www.example.com", 120, 32)],
]
"""The rows of the page: pieces of text, their left edges, and the sizes of the font."""


def page() -> tuple[Image.Image, dict[str, tuple[float, float, float, float]]]:
    """Return the page, and the place of each piece of text: left, top, right, bottom."""
    image, places = Image.new("RGB", (640, 400), "white"), {}
    draw = ImageDraw.Draw(image)
    for i, row in enumerate(PAGE):
        for text, left, size in row:
            font = ImageFont.load_default(size)
            draw.text((left, 30 + 72 * i), text, fill="black", font=font)
            places[text] = draw.textbbox((left, 30 + 72 * i), text, font=font)
    return image, places


# --- speech ---------------------------------------------------------------------------------------------------------------

VOWELS = {"a": (730, 1090, 2440), "e": (530, 1840, 2480), "i": (270, 2290, 3010), "o": (570, 840, 2410), "u": (300, 870, 2240)}
"""The first three formants of American English vowels, in Hz (Peterson and Barney 1952, men)."""

PHRASES = (("aieou", 150, 110, 0.7), ("oaie", 130, 90, 1.0), ("uaeioa", 220, 180, 0.8))
"""Vowels, the pitch at the beginning and at the end, and the seconds of the pause after them."""


def resonance(x: np.ndarray, frequency: float, bandwidth: float, rate: int) -> np.ndarray:
    """Return a signal through a resonator of two poles."""
    radius = np.exp(-np.pi * bandwidth / rate)
    c, d = 2 * radius * np.cos(2 * np.pi * frequency / rate), radius**2
    out, y1, y2 = np.empty(len(x)), 0.0, 0.0
    for i, value in enumerate(((1 - c + d) * x).tolist()):
        y1, y2 = value + c * y1 - d * y2, y1
        out[i] = y1
    return out


def syllable(generator: np.random.Generator, vowel: str, seconds: float, high: float, low: float, rate: int) -> np.ndarray:
    """Return a hiss of 60 ms and a vowel with falling pitch: pulses through its formants."""
    n = int(seconds * rate)
    pitch = np.linspace(high, low, n) * (1 + 0.01 * np.sin(10 * np.pi * np.arange(n) / rate))
    x = resonance(np.diff(np.floor(np.cumsum(pitch) / rate), prepend=0), 0, 100, rate)
    for frequency, bandwidth in zip((*VOWELS[vowel], 3500), (80, 90, 120, 200), strict=True):
        x = resonance(x, frequency, bandwidth, rate)
    x = np.diff(x, prepend=0)
    ramp = np.minimum(1, np.minimum(np.arange(n), np.arange(n)[::-1]) / (0.03 * rate))
    hiss = int(0.06 * rate)
    noise = np.diff(generator.standard_normal(hiss), prepend=0) * 0.15 * np.hanning(hiss)
    return np.concatenate([noise, x / np.abs(x).max() * ramp])


def speech(rate: int = 16000) -> tuple[np.ndarray, list[tuple[float, float]]]:
    """Return phrases with pauses, with quiet noise in the pauses, and the start and end of each phrase in seconds."""
    generator = np.random.default_rng(0)
    parts, spans = [0.001 * generator.standard_normal(int(0.8 * rate))], []
    for vowels, high, low, pause in PHRASES:
        pitches = np.linspace(high, low, len(vowels) + 1)
        said = np.concatenate([
            syllable(generator, v, 0.2 + 0.05 * (i % 2), 1.05 * pitches[i], pitches[i + 1], rate) for i, v in enumerate(vowels)
        ])  # fmt: skip
        begun = sum(map(len, parts)) / rate
        spans.append((begun, begun + len(said) / rate))
        parts += [0.5 * said, 0.001 * generator.standard_normal(int(pause * rate))]
    return np.concatenate(parts).astype(np.float32), spans


def wav(x: np.ndarray, rate: int, width: int = 2) -> bytes:
    """Return a WAV file of samples between -1 and 1, [samples] or [samples, channels], with `width` bytes each."""
    whole = np.clip(
        np.round(np.asarray(x, np.float64) * 2.0 ** (8 * width - 1)), -(2.0 ** (8 * width - 1)), 2.0 ** (8 * width - 1) - 1
    )
    values = whole.astype(np.int64).reshape(len(x), -1)
    if width == 1:
        data = (values + 128).astype(np.uint8).tobytes()
    else:
        data = values.astype("<i8")[..., None].view(np.uint8)[..., :width].tobytes()
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(values.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(data)
    return out.getvalue()


# --- a melody -------------------------------------------------------------------------------------------------------------

MELODY = ((60, 0.4), (62, 0.4), (64, 0.4), (67, 0.6), (64, 0.4), (60, 0.8), (72, 0.5), (55, 0.7))
"""MIDI pitches, and their durations in seconds."""


def tone(pitch: int, seconds: float, rate: int) -> np.ndarray:
    """Return a note with harmonics up to half of the sample rate, struck and fading."""
    t, frequency = np.arange(int(seconds * rate)) / rate, 440 * 2 ** ((pitch - 69) / 12)
    x = sum(np.sin(2 * np.pi * frequency * k * t + k * k) / k**1.5 for k in range(1, int(rate / 2 / frequency)))
    return x * np.minimum(1, t / 0.008) * np.exp(-t) * np.minimum(1, (seconds - t) / 0.03)  # type: ignore[no-any-return]


def melody(rate: int = 22050) -> tuple[np.ndarray, list[tuple[float, float, int]]]:
    """Return notes with pauses of 0.1 s on pink noise, and their starts, ends and pitches.

    The noise fills every band: without it, bands far from the notes are differences of large numbers, of which any two
    engines keep other digits, and the model takes their logarithm.
    """
    x, notes, now = np.zeros(6 * rate), [], 0.5
    for pitch, seconds in MELODY:
        at, y = int(now * rate), 0.3 * tone(pitch, seconds, rate)
        x[at : at + len(y)] += y
        notes.append((now, now + seconds, pitch))
        now += seconds + 0.1
    spectrum = np.fft.rfft(np.random.default_rng(1).standard_normal(len(x)))
    spectrum[1:] /= np.sqrt(np.arange(1, len(spectrum)))
    spectrum[0] = 0
    noise = np.fft.irfft(spectrum, len(x))
    return (x + 0.1 * noise / noise.std()).astype(np.float32), notes


# --- files of many kinds --------------------------------------------------------------------------------------------------

PROSE = "The quick brown fox jumps over the lazy dog near the river bank. " * 20

TEXTS = {
    "python": '''\
"""Count words."""
from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path


class Reader:
    def __init__(self, path: Path) -> None:
        self.path = path

    def words(self) -> list[str]:
        return [w.lower() for w in self.path.read_text().split()]


def main() -> None:
    for name in sys.argv[1:]:
        counts = Counter(Reader(Path(name)).words())
        for word, count in counts.most_common(10):
            print(f"{count:5d} {word}")


if __name__ == "__main__":
    main()
''',
    "c": """\
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX 128

struct node {
    int value;
    struct node *next;
};

static struct node *push(struct node *head, int value) {
    struct node *n = malloc(sizeof(*n));
    if (n == NULL)
        exit(EXIT_FAILURE);
    n->value = value;
    n->next = head;
    return n;
}

int main(int argc, char **argv) {
    struct node *head = NULL;
    for (int i = 1; i < argc && i < MAX; i++)
        head = push(head, atoi(argv[i]));
    for (struct node *n = head; n; n = n->next)
        printf("%d\\n", n->value);
    return 0;
}
""",
    "html": """\
<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>Results</title><link rel="stylesheet" href="style.css"></head>
<body>
<h1>Results</h1>
<p>All tests <strong>passed</strong>.</p>
<table><tr><th>name</th><th>time</th></tr><tr><td>first</td><td>0.1</td></tr></table>
<script src="main.js"></script>
</body>
</html>
""",
    "javascript": """\
"use strict";
const fs = require("fs");

function load(path, done) {
  fs.readFile(path, "utf8", (error, text) => {
    if (error) return done(error);
    const rows = text.split("\\n").map((line) => line.split(","));
    done(null, rows.filter((row) => row.length > 1));
  });
}

module.exports = { load };
load(process.argv[2], (error, rows) => {
  if (error) throw error;
  console.log(`${rows.length} rows`);
});
""",
    "java": """\
package com.example.shop;

import java.util.ArrayList;
import java.util.List;

public class Basket {
    private final List<Integer> prices = new ArrayList<>();

    public void add(int price) {
        prices.add(price);
    }

    public int total() {
        int sum = 0;
        for (int price : prices) {
            sum += price;
        }
        return sum;
    }

    public static void main(String[] args) {
        Basket basket = new Basket();
        basket.add(3);
        System.out.println(basket.total());
    }
}
""",
    "rust": """\
use std::collections::HashMap;
use std::env;
use std::fs;

#[derive(Debug, Clone)]
struct Row {
    name: String,
    count: usize,
}

fn count(text: &str) -> Vec<Row> {
    let mut seen: HashMap<&str, usize> = HashMap::new();
    for word in text.split_whitespace() {
        *seen.entry(word).or_insert(0) += 1;
    }
    seen.into_iter().map(|(name, count)| Row { name: name.to_string(), count }).collect()
}

fn main() {
    let path = env::args().nth(1).expect("a path");
    for row in count(&fs::read_to_string(path).unwrap()) {
        println!("{:?}", row);
    }
}
""",
    "go": """\
package main

import (
\t"bufio"
\t"fmt"
\t"os"
)

func main() {
\tcounts := make(map[string]int)
\tscanner := bufio.NewScanner(os.Stdin)
\tfor scanner.Scan() {
\t\tcounts[scanner.Text()]++
\t}
\tif err := scanner.Err(); err != nil {
\t\tfmt.Fprintln(os.Stderr, err)
\t\tos.Exit(1)
\t}
\tfor line, n := range counts {
\t\tfmt.Printf("%d %s\\n", n, line)
\t}
}
""",
    "sql": """\
CREATE TABLE people (
    id INTEGER PRIMARY KEY,
    name VARCHAR(80) NOT NULL,
    born DATE
);

INSERT INTO people (id, name, born) VALUES (1, 'Ada', '1815-12-10');
INSERT INTO people (id, name, born) VALUES (2, 'Alan', '1912-06-23');

SELECT p.name, COUNT(*) AS total
FROM people AS p
LEFT JOIN orders AS o ON o.person = p.id
WHERE p.born < '1900-01-01'
GROUP BY p.name
ORDER BY total DESC;
""",
    "shell": """\
#!/bin/bash
set -euo pipefail

usage() {
    echo "usage: $0 FOLDER" >&2
    exit 2
}

[ $# -eq 1 ] || usage
for file in "$1"/*.txt; do
    if [[ -f "$file" ]]; then
        lines=$(wc -l < "$file")
        echo "$file: $lines"
    fi
done
""",
    "css": """\
body {
  margin: 0 auto;
  max-width: 60em;
  font-family: Georgia, serif;
  color: #222;
}

h1, h2 {
  font-weight: normal;
  border-bottom: 1px solid #ccc;
}

a:hover { text-decoration: underline; }

@media (max-width: 600px) {
  .sidebar { display: none; }
}
""",
    "markdown": """\
# A small library

A library that counts words. See the [manual](docs/manual.md).

## Installation

```sh
pip install words
```

## Usage

* `count(text)` returns a *dictionary*.
* `top(text, 10)` returns the **ten** most frequent words.

| function | result |
|---|---|
| `count` | a dict |
""",
    "yaml": """\
name: build
on:
  push:
    branches: [main]
jobs:
  test:
    runs-on: ubuntu-latest
    strategy:
      matrix:
        python: ["3.11", "3.12"]
    steps:
      - uses: actions/checkout@v4
      - name: Test
        run: |
          pip install tox
          tox
""",
    "toml": """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "words"
version = "1.0.0"
dependencies = ["numpy>=2"]

[tool.ruff]
line-length = 100
""",
    "xml": """\
<?xml version="1.0" encoding="UTF-8"?>
<catalog>
  <book id="1"><author>Ada</author><title>Notes</title><price>12.50</price></book>
  <book id="2"><author>Alan</author><title>Numbers</title><price>9.00</price></book>
</catalog>
""",
    "svg": """\
<?xml version="1.0" encoding="UTF-8"?>
<svg xmlns="http://www.w3.org/2000/svg" width="200" height="100" viewBox="0 0 200 100">
  <rect x="10" y="10" width="80" height="60" fill="#4a90d9" stroke="black"/>
  <circle cx="150" cy="50" r="30" fill="none" stroke="red" stroke-width="3"/>
  <path d="M10 90 L190 90" stroke="gray"/>
</svg>
""",
    "ini": """\
[server]
host = localhost
port = 8080
debug = false

[database]
user = shop
name = orders

; times in seconds
[limits]
timeout = 30
""",
    "diff": """\
diff --git a/words.py b/words.py
index 3b18e51..9f4b6d2 100644
--- a/words.py
+++ b/words.py
@@ -1,5 +1,6 @@
 import sys
+from pathlib import Path
 # Count the words of a file.
 def main():
-    text = open(sys.argv[1]).read()
+    text = Path(sys.argv[1]).read_text()
     print(len(text.split()))
@@ -12,3 +13,3 @@
 if __name__ == "__main__":
-    run()
+    main()
""",
    "dockerfile": """\
FROM python:3.11-slim
WORKDIR /app
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt
COPY . .
EXPOSE 8000
CMD ["python", "-m", "app"]
""",
    "makefile": """\
CC = gcc
CFLAGS = -Wall -O2
OBJECTS = main.o list.o

all: program

program: $(OBJECTS)
\t$(CC) $(CFLAGS) -o $@ $^

%.o: %.c
\t$(CC) $(CFLAGS) -c $<

clean:
\trm -f program $(OBJECTS)

.PHONY: all clean
""",
    "csv": "id,name,age,city\n" + "".join(f"{i},name{i},{20 + i},London\n" for i in range(30)),
    "json": json.dumps({"name": "words", "version": [1, 0], "items": [{"id": i, "ok": True} for i in range(20)]}, indent=2),
    "txt": PROSE,
}


def _picture(kind: str) -> bytes:
    y, x = np.mgrid[:64, :64]
    out = io.BytesIO()
    Image.fromarray(np.stack([x * 4, y * 4, (x + y) * 2], -1).astype(np.uint8)).save(out, kind)
    return out.getvalue()


def _zip() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as pack:
        for i in range(5):
            pack.writestr(zipfile.ZipInfo(f"folder/note{i}.txt", (2024, 1, 1, 0, 0, 0)), PROSE + str(i))
    return out.getvalue()


def _tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as pack:
        for i in range(3):
            member = tarfile.TarInfo(f"folder/note{i}.txt")
            member.size, member.mtime, member.uname, member.gname = len(PROSE), 1_700_000_000, "user", "user"
            pack.addfile(member, io.BytesIO(PROSE.encode()))
    return out.getvalue()


def _sqlite() -> bytes:
    base = sqlite3.connect(":memory:")
    base.execute("create table people(id integer primary key, name text, age int)")
    base.executemany("insert into people(name, age) values(?, ?)", [(f"name {i}", i) for i in range(100)])
    base.commit()
    return base.serialize()


def _elf() -> bytes:
    """A program for Linux on x86-64 that ends at once, with a section of code and one of names."""
    code, names, at = bytes.fromhex("48c7c03c0000004831ff0f05"), b"\0.text\0.shstrtab\0", 0x1000
    sections = at + len(code) + len(names) + 4
    head = b"\x7fELF" + bytes([2, 1, 1, 0]) + bytes(8)
    head += struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, 0x401000, 64, sections, 0, 64, 56, 1, 64, 3, 2)
    head += struct.pack("<IIQQQQQQ", 1, 5, at, 0x401000, 0x401000, len(code), len(code), 0x1000)
    table = bytes(64) + struct.pack("<IIQQQQIIQQ", 1, 1, 6, 0x401000, at, len(code), 0, 0, 16, 0)
    table += struct.pack("<IIQQQQIIQQ", 7, 3, 0, 0, at + len(code), len(names), 0, 0, 1, 0)
    return head.ljust(at, b"\0") + code + names + bytes(4) + table


def _pdf() -> bytes:
    text = b"BT /F1 24 Tf 72 720 Td (Hello, world) Tj ET"
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R /Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(text), text),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    out, places = b"%PDF-1.4\n", []
    for i, body in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (i, body)
    table = b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1) + b"".join(b"%010d 00000 n \n" % p for p in places)
    return out + table + b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, len(out))


def _midi() -> bytes:
    track = b"".join(bytes([0, 0x90, 60 + i, 100, 0x60, 0x80, 60 + i, 0]) for i in range(12)) + b"\0\xff\x2f\0"
    return b"MThd" + struct.pack(">IHHH", 6, 0, 1, 96) + b"MTrk" + struct.pack(">I", len(track)) + track


def _arrays(save: Callable[..., None], *arrays: np.ndarray) -> bytes:
    out = io.BytesIO()
    save(out, *arrays)
    return out.getvalue()


def _onnx(weights: Sequence[float]) -> bytes:
    nodes = [helper.make_node("Relu", ["x"], ["h"]), helper.make_node("MatMul", ["h", "w"], ["y"])]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", 8]) for n in "xy"]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], [helper.make_tensor("w", TensorProto.FLOAT, [8, 8], weights)])
    return helper.make_model(graph, producer_name="sonnx").SerializeToString()


def kinds() -> dict[str, bytes]:
    """Return the bytes of a file of each kind, by Magika's name of the kind."""
    generator = np.random.default_rng(0)
    square, prose = generator.standard_normal((20, 20)), PROSE.encode() * 5
    return {name: text.encode() for name, text in TEXTS.items()} | {
        "zip": _zip(), "tar": _tar(), "gzip": gzip.compress(prose, mtime=0), "xz": lzma.compress(prose),
        "bzip": bz2.compress(generator.bytes(4000) + prose), "png": _picture("PNG"), "jpeg": _picture("JPEG"),
        "gif": _picture("GIF"), "bmp": _picture("BMP"), "tiff": _picture("TIFF"), "midi": _midi(),
        "wav": wav(np.sin(np.arange(16000) / 5) / 4, 16000),
        "pdf": _pdf(), "elf": _elf(), "sqlite": _sqlite(), "npy": _arrays(np.save, square),
        "npz": _arrays(np.savez, square, np.arange(9)), "pickle": pickle.dumps({"a": list(range(200)), "b": PROSE}, 4),
        "onnx": _onnx(square.ravel()[:64].tolist()), "applebplist": plistlib.dumps({"a": [1, 2] * 15}, fmt=plistlib.FMT_BINARY),
        "appleplist": plistlib.dumps({"a": [1, 2], "b": "text"}),
    }  # fmt: skip


def write_kinds(folder: Path) -> dict[str, Path]:
    """Write a file of each kind, under names that do not tell it."""
    paths = {}
    for i, (name, data) in enumerate(kinds().items()):
        paths[name] = folder / f"file{i}.dat"
        paths[name].write_bytes(data)
    return paths
