"""A table of runs, the fewest bits per byte first and broken ones last, with what was typed for each.

python -m training.runs                  the runs in runs/
python -m training.runs runs/sweep-DATE  those of a sweep
"""

import json
import math
import sys
from pathlib import Path


def row(folder: Path) -> dict[str, str | float]:
    """What one run was and has reached."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    evaluated = [record for record in records if "val_loss" in record and math.isfinite(record["val_loss"])]
    best = min(evaluated, key=lambda record: record["val_loss"], default=None)
    return {
        "run": folder.name,
        "step": records[-1]["step"] if records else 0,
        "best val loss": round(best["val_loss"], 4) if best else "-",
        "bits per byte": round(best["val_bits_per_byte"], 4) if best else "-",
        "at step": best["step"] if best else 0,
        "minutes": round(evaluated[-1]["seconds"] / 60, 1) if evaluated else "-",
        "typed": (folder / "typed.txt").read_text(encoding="utf-8"),
    }


if __name__ == "__main__":
    parent = Path(sys.argv[1] if len(sys.argv) > 1 else "runs")
    rows: list[dict] = [row(path.parent) for path in sorted(parent.glob("*/metrics.jsonl"))]
    if not rows:
        sys.exit(f"{parent} has no runs: python -m training.runs FOLDER")
    widths = {name: max(len(name), *(len(str(r[name])) for r in rows)) for name in rows[0]}
    rows.sort(key=lambda r: ("BROKEN" in r["run"], r["at step"] == 0, r["bits per byte"]))
    for line in (dict(zip(widths, widths, strict=True)), *rows):
        print("  ".join(str(line[name]).ljust(width) for name, width in widths.items()).rstrip())
