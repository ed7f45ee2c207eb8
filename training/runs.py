"""A table of runs.

python -m training.runs                  the runs in runs/
python -m training.runs runs/sweep-DATE  a sweep's, the best first
"""

import json
import math
import sys
from pathlib import Path

import yaml


def row(folder: Path) -> dict[str, str | float]:
    """What one run was and has reached."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    evaluated = [record for record in records if "val_loss" in record and math.isfinite(record["val_loss"])]
    best = min(evaluated, key=lambda record: record["val_loss"], default=None)
    return {
        "run": folder.name,
        "step": records[-1]["step"] if records else 0,
        "best val loss": round(best["val_loss"], 4) if best else math.inf,
        "bits per byte": round(best["val_bits_per_byte"], 4) if best else math.inf,
        "at step": best["step"] if best else 0,
        "minutes": round(evaluated[-1]["seconds"] / 60, 1) if evaluated else 0.0,
    }


def flat(config: dict, prefix: str = "") -> dict[str, str]:
    """A configuration by its dotted keys: {"optimizer.lr": "0.01", ...}."""
    found: dict[str, str] = {}
    for name, value in config.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: str(value)}
    return found


def differing(folders: list[Path]) -> dict[str, dict[str, str]]:
    """Of each run the keys in which the runs' configurations differ, but for their names."""
    configs = {folder.name: flat(yaml.safe_load((folder / "config.yaml").read_text())) for folder in folders}
    keys = sorted({key for config in configs.values() for key in config} - {"name", "resume", "runs"})
    varied = [key for key in keys if len({config.get(key) for config in configs.values()}) > 1]
    return {name: {key: config.get(key, "") for key in varied} for name, config in configs.items()}


if __name__ == "__main__":
    parent = Path(sys.argv[1] if len(sys.argv) > 1 else "runs")
    found = [path.parent for path in sorted(parent.glob("*/metrics.jsonl"))]
    if not found:
        sys.exit(f"{parent} has no runs: python -m training.runs FOLDER")
    more = differing(found) if "sweep" in parent.name else {}
    rows: list[dict] = [{**row(folder), **more.get(folder.name, {})} for folder in found]
    widths = {name: max(len(name), *(len(str(r[name])) for r in rows)) for name in rows[0]}
    for line in (dict(zip(widths, widths, strict=True)), *sorted(rows, key=lambda r: r["best val loss"])):
        print("  ".join(str(line[name]).ljust(width) for name, width in widths.items()))
