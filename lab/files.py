"""Writes result files: the tables of the benches, and plain JSON values."""

import csv
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from training.files import FILES, replacing
from training.machine import about

DOCS = Path(__file__).parents[1] / "docs"
ROUNDED = ("ms", "tflops", "peak_mib")  # to four digits in a table


class Results:
    """A bench's rows, and the CSV file in the folder `out` to which it appends them.

    Makes the folder, and raises ValueError for a file of other columns: both before anything is measured.
    """

    def __init__(self, out: Path, name: str, columns: Sequence[str]):
        self.path, self.columns = out / name, columns
        self.facts: dict[str, Any] = {}  # cells of every row
        self.rows: list[dict[str, Any]] = []
        out.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            with open(self.path, newline="", encoding="utf-8") as file:
                if next(csv.reader(file), columns) != columns:  # from another version; rows would not fit its header
                    raise ValueError(
                        f"{self.path} has other columns than this bench writes; move it away or use another out="
                    )

    def begin(self, device: torch.device, dtype: str) -> None:
        """Prints what is measured on, and puts it in every row."""
        self.facts = about(device) | {"dtype": dtype}
        print("{device}, {dtype}, torch {torch}, triton {triton}".format(**self.facts), flush=True)

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Appends rows at once: a bench that is cut short keeps what it has. Leaves out cells that have no column."""
        rows = [{key: row[key] for key in self.columns if key in row} for row in (self.facts | row for row in rows)]
        self.rows += rows
        with open(self.path, "a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns)
            if not file.tell():
                writer.writeheader()
            for row in rows:
                writer.writerow(row | {key: f"{row[key]:.4g}" for key in ROUNDED if row.get(key) is not None})

    def end(self, **more: Any) -> None:
        """Prints where the rows and pictures are. Into a pipe or a file it prints one line of JSON, with the rows."""
        files = {"results": str(self.path), **more}
        if not sys.stdout.isatty():
            print(json.dumps(files | {"rows": self.rows}))
            return
        for name, paths in files.items():
            print(f"{name}: {paths if isinstance(paths, str) else ', '.join(paths)}")


def write(path: Path, text: str) -> None:
    """Writes text as UTF-8 and makes the folders above it. Raises ValueError with the file's name if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.name in FILES:  # a run's own
            with replacing(path) as file:
                file.write(text.encode())
        else:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"out={path} cannot be written: {error.strerror}") from error


def fill(out: Path, name: str, content: dict) -> int:
    """Writes a page that loads no other file: docs/NAME.template.html with the content as JSON. Returns its length."""
    data = json.dumps(plain(content), separators=(",", ":")).replace("</", "<\\/")  # no </script> inside the data
    page = (DOCS / f"{name}.template.html").read_text(encoding="utf-8").replace("{{data}}", data)
    write(out, page)
    return len(page)


def plain(value):
    """value in types that JSON has. Arrays become lists, ranges [start, stop]. Floats keep six digits; those that are
    not finite become "nan", "inf" and "-inf"."""
    match value:
        case np.ndarray():
            return plain(value.tolist())
        case float():
            number = float(f"{value:.6g}")
            if not math.isfinite(number):
                return f"{number}"
            return int(number) if number == round(number) and abs(number) < 1e6 else number
        case range():
            return [value.start, value.stop]
        case dict():
            return {key: plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [plain(inner) for inner in value]
    return value
