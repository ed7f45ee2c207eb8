"""Which bits does a change move? Runs, samples and kernels of a tree are recorded, and compared with an earlier record.

    python -m tests.bits before.json                 in the tree as it was, a clone for example
    python -m tests.bits after.json before.json      in the changed one; exit code 1 if anything differs
    python -m tests.bits after.json before.json ptx  the entries whose names begin so, alone

An entry of a run is each step's loss and gradient norm, the hash of every tensor of its last checkpoint, and its
samples. An entry of ptx is a kernel's code as Triton compiles it, without line numbers. Bits belong to a machine and
its versions: both records have to be made on one. Takes about ten minutes on two cores.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[1]
DROPOUT = "model.dropout_p=0.1 attention.dropout_p=0.1"
SMALL = f"experiment=smoke steps=50 sample_every=25 checkpoint_every=25 {DROPOUT}"
OPTIONS = (
    "tokenizer=bpe tokenizer.vocab_size=400 attention.documents=true attention.windows=[24,null] "
    "attention.softcap=20 model.n_head=4 model.n_kv_head=2 model.position=rope model.norm=rmsnorm model.mlp=swiglu "
    "model.bias=false tokens_per_step=512 ema_decay=0.9 optimizer=muon z_loss=1e-4 "
    "model.activation_checkpointing=selective length_warmup_steps=10 length_warmup_from=16"
)
TRITON = {"TRITON_INTERPRET": "1"}
# {entry: (processes, arguments of train.py, environment)}
RUNS: dict[str, tuple[int, str, dict[str, str]]] = {
    "default": (1, f"steps=50 eval_every=50 eval_tokens=4096 sample_every=50 {DROPOUT}", {}),
    "naive": (1, f"{SMALL} attention=naive", {}),
    "tiled": (1, f"{SMALL} attention=tiled attention.block_m=16 attention.block_n=32", {}),
    "tiled-keys": (1, f"{SMALL} attention=tiled attention.order=keys_outside", {}),
    "sdpa": (1, f"{SMALL} attention=sdpa", {}),
    "triton": (1, f"{SMALL} steps=2 eval_tokens=64 sample_every=0 attention=triton", TRITON),
    "options-tiled": (1, f"{SMALL} {OPTIONS} attention=tiled", {}),
    "options-naive": (1, f"{SMALL} {OPTIONS} attention=naive model.activation_checkpointing=true", {}),
    "options-chunk": (1, f"{SMALL} {OPTIONS} attention=tiled model.chunk=32", {}),
    "alibi": (1, f"{SMALL} attention=tiled attention.alibi=true model.position=none attention.window=20", {}),
    "broken": (1, f"{SMALL} attention=tiled break_it=no_rescale probe.every=10", {}),
    "data2": (2, f"{SMALL} attention=tiled batch_size=4", {}),
    "data4": (4, f"{SMALL} attention=tiled batch_size=4", {}),
    "context2": (2, f"{SMALL} attention=tiled parallel.context=2", {}),
    # round a ring: there are two heads
    "context4": (4, f"{SMALL} attention=tiled parallel.context=4 attention.dropout_p=0 model.context_length=256", {}),
    "shard2": (2, f"{SMALL} attention=tiled parallel.shard=true", {}),
    "resumed": (1, "resume={runs}/options-tiled/checkpoints/step_000025", {}),
}
SAMPLES = {
    "sample": "run=options-tiled max_new_tokens=150 past_context=half repetition_penalty=1.3 top_k=20",
    "sample-slide": "run=options-tiled max_new_tokens=80 past_context=slide prompt=def num_samples=3",
    "sample-plain": "run=naive max_new_tokens=80 cache=false temperature=0",
    "sample-alibi": "run=alibi max_new_tokens=60 impl=naive",
}
KERNELS = [["bfloat16", D, dropout] for D in (64, 128) for dropout in (False, True)] + [["float32", 64, True]]
KERNELS += [["bfloat16", 50_304, "loss"], ["bfloat16", 768, "norm"], ["bool", 384, "table"], ["bfloat16", 4, "heads"]]
KERNELS += [["bfloat16", D, name] for D in (64, 128) for name in ("decode", "pages")] + [["bfloat16", 768, "token"]]
HOPPER = [["bfloat16", D, name] for D in (64, 128) for name in ("hopper", "hopper_backward")]
ARCHITECTURES = {80: (166_912, KERNELS), 90: (232_448, KERNELS + HOPPER)}


def command(processes: int) -> list[str]:
    if processes == 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node",
            str(processes)]  # fmt: skip


def finished(arguments: list[str], **environment: str) -> str:
    """What a process prints on stdout. RuntimeError if it fails."""
    own = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    ended = subprocess.run(arguments, cwd=ROOT, env=os.environ | own | environment, capture_output=True, text=True)
    if ended.returncode:
        own = [line for line in ended.stderr.splitlines() if line.startswith(("train: ", "sample: "))]
        raise RuntimeError(f"{' '.join(arguments)} ended with {ended.returncode}: {own or ended.stderr[-1000:]}")
    return ended.stdout


def run_of(folder: Path) -> dict[str, str]:
    """What a run computed: {what: its digits or its hash}."""
    found = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for key in ("loss", "grad_norm", "val_loss", "max_score", "error"):
            if key in record:
                found[f"step {record['step']} {key}"] = repr(record[key])
    last = max((folder / "checkpoints").glob("step_*"))
    for file in sorted(last.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in sorted(tensors.keys()):
                found[name] = hashlib.sha256(tensors.get_tensor(name).numpy().tobytes()).hexdigest()[:16]
    if (samples := folder / "samples.txt").exists():
        found["samples.txt"] = samples.read_text()
    return found


def ptx(arch: int) -> dict[str, str]:
    shared, cases = ARCHITECTURES[arch]
    with tempfile.TemporaryDirectory() as cache:
        more = {"TRITON_DISABLE_LINE_INFO": "1", "TRITON_CACHE_DIR": cache, "TRITON_INTERPRET": "0"}
        out = finished([sys.executable, "tests/compile_flash.py", str(arch), str(shared), json.dumps(cases)], **more)
    found: dict[str, str] = {}
    for kernel in json.loads(out.splitlines()[-1]):
        name = f"{kernel['kernel']} {kernel['dtype']} {kernel['D']} {kernel['dropout']}"
        found[f"{name} #{sum(key.startswith(name) for key in found)}"] = kernel["ptx"][:16]
    return found


def entries(runs: Path, only: str) -> Iterator[tuple[str, dict[str, str]]]:
    where = [f"runs={runs}", f"data.cache={runs}/cache"]
    for name, (processes, arguments, environment) in RUNS.items():
        if name.startswith(only):
            typed = arguments.format(runs=runs).split()
            finished([*command(processes), "train.py", *typed, *where, f"name={name}", "device=cpu"], **environment)
            yield name, run_of(next(runs.glob(f"{name}*/checkpoints")).parent)
    for name, arguments in SAMPLES.items():
        if name.startswith(only):
            yield name, {"text": finished([sys.executable, "sample.py", *arguments.split(), where[0], "device=cpu"])}
    for arch in ARCHITECTURES:
        if f"ptx{arch}".startswith(only):
            yield f"ptx{arch}", ptx(arch)


def differences(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> list[str]:
    """A line for each entry of `after` that differs, or is new: the first thing that does, and how many do."""
    lines = [f"{name}: not in the earlier record" for name in after.keys() - before.keys()]
    for name in before.keys() & after.keys():
        old, new = before[name], after[name]
        differ = [key for key in {**old, **new} if old.get(key) != new.get(key)]
        if differ:
            first = differ[0]
            lines.append(
                f"{name}: {len(differ)} of {len(old)} differ, first {first}: {old.get(first)} -> {new.get(first)}"
            )
    return sorted(lines)


def main() -> int:
    record, *rest = sys.argv[1:]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, entry in entries(Path(folder), rest[1] if len(rest) > 1 else ""):
            found[name] = entry
            print(f"{name}: {len(entry)} recorded", file=sys.stderr, flush=True)
    Path(record).write_text(json.dumps(found, indent=1))
    if not rest:
        return 0
    lines = differences(json.loads(Path(rest[0]).read_text()), found)
    print("\n".join(lines) or f"the same: {', '.join(found)}")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
