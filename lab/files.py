"""Writes result files, and turns results into plain JSON values."""

import math
from pathlib import Path

import numpy as np


def write(path: Path, text: str) -> None:
    """Writes text as UTF-8 and makes the folders above it. Raises ValueError with the file's name if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"out={path} cannot be written: {error.strerror}") from error


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
