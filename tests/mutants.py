"""Sixty planted faults: wrong lines that the tests have to notice.

    make mutants                       plants one fault after the other: a quarter of an hour
    make mutants ARGS="clip dropout"   those whose name contains one of these words

Each fault is planted in a copy of the tree, where its tests run until one fails. Exits with 1 if one goes unnoticed.
tests/test_mutants.py checks that every text to replace is found once: after an edit, the table follows.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Fault(NamedTuple):
    file: str
    name: str
    old: str  # a part of the file that stands in it once
    new: str
    tests: str  # files of tests/ without test_ and .py, or FILE::TEST; with "slow", also tests marked slow


TABLE = {
    "model/attention.py": [
        ("sdpa aligns the first rows", "if causal and T != T_k:", "if False:", "attention"),
        ("few queries lose a window", "config.window < max(T, T_k) else", "config.window < T else", "attention"),
        ("kept weights are not scaled up", "* problem.keep_scale\n", "\n", "attention")],
    "model/op.py": [
        ("lse has no gradient", "lse2, do, dlse, *options), q, k)", "lse2, do, None, *options), q, k)", "attention")],
    "model/tiled.py": [
        ("tiled does not rescale l", "else alpha * l) + p.sum", "else l) + p.sum", "attention"),
        ("tiled holds T x T floats", "o = empty_heads(q)", "o, t = empty_heads(q), q.new_empty(B, H, T, T)", "bench"),
        ("dk lacks the scale", "dk *= problem.scale", "dk *= 1.0", "attention"),
        ("lse is half in base 2", "(m / LOG2E + l.log())", "(m + l.log())", "attention")],
    "model/mask.py": [
        ("a window shows one key more", "(i - j).abs() < problem.window", "(i - j).abs() <= problem.window", "mask")],
    "kernels/problem.py": [
        ("triton's window shows one key more", "else 1 - self.window", "else -self.window", "flash"),
        ("a tile at a window's far edge is whole", "whole & (left > bottom - ", "whole & (left > top - ", "mask"),
        ("a tile of two documents is whole", "(left >= bottom_first)", "(left >= top_first)", "mask"),
        ("a tile where a document may end is whole", "whole & (problem.spans is None)", "whole", "flash")],
    "model/dropout.py": [
        ("Philox has six rounds", "ROUNDS = 7", "ROUNDS = 6", "dropout"),
        ("all heads have one dropout mask", "c2 = torch.arange(heads,", "c2 = 0 * torch.arange(heads,", "dropout")],
    "model/gpt.py": [
        ("a bigram is of two documents", "before = before.where(", "before.where(", "gpt"),
        ("rope turns one half the wrong way", "b * cos + a * sin", "b * cos - a * sin", "gpt"),
        ("all layers have one window", "attention_config.layer(i), break_it)", "attention_config.layer(0), break_it)",
         "gpt"),
        ("first weights lack 1 / sqrt(2 L)", "if adds else 0.02)", "if False else 0.02)", "gpt"),
        ("SwiGLU gates the wrong half", "self.act(self.gate(x)) * y", "self.act(y) * self.gate(x)", "gpt")],
    "model/loss.py": [
        ("ignored targets count in the mean", "return total / count", "return total / len(targets)", "loss")],
    "model/cache.py": [
        ("a new token is a position late", "at + (self.length if", "at + (self.length + 1 if", "generate"),
        ("a cache forgets the last token", "self.last.copy_(idx[:, -1:])", "pass", "generate")],
    "model/generate.py": [
        ("top_p keeps one too few", "cumsum(-1) - ordered >= self.top_p", "cumsum(-1) >= self.top_p", "generate"),
        ("a full cache is not cleared", "self.cache.advance(-self.cache.length)", "pass", "generate")],
    "kernels/launch.py": [
        ("Hopper takes softcap and ignores it", '"dropout_p", "broken"}', '"dropout_p", "broken", "softcap"}',
         "hopper::test_which_kernels_compute_what")],
    "kernels/flash.py": [
        ("triton does not rescale l", "else l * alpha) + tl.sum(p, 1)", "else l) + tl.sum(p, 1)", "flash"),
        ("triton adds lse's gradient", "delta_i -= tl.load(dlse", "delta_i += tl.load(dlse", "attention"),
        ("dk has one query head of a group", "(h_kv + 1) * task.G):", "h_kv * task.G + 1):", "flash"),
        ("softcap has no slope in triton", "softcap_grad = 1 - t * t", "softcap_grad = 1.0", "flash"),
        ("all sequences have one's documents", "task.spans + b.to(tl.int64) * task.T_k * 2", "task.spans", "flash")],
    "kernels/decode.py": [
        ("splits are not rescaled", "tl.sum(alpha * tl.load(l_of", "tl.sum(tl.load(l_of", "decode"),
        ("the cache keeps no new token", "if split == 0:", "if split == splits:", "decode")],
    "kernels/loss.py": [
        ("the loss kernel does not rescale l", "l = l * tl.exp2((m - m_new) * LOG2E) +", "l = l +", "loss")],
    "kernels/hopper/forward.py": [
        ("Hopper does not rescale l", "l * alpha + gl.sum(p, 1)", "l + gl.sum(p, 1)", "hopper")],
    "kernels/hopper/backward.py": [
        ("dq of a later launch goes to wrong heads", "begin * G, H, T, blind_rows", "begin, H, T, blind_rows",
         "hopper::test_heads_that_are_not_computed_at_once_take_turns"),
        ("no adder waits for its turn", "while acquired(added) != before:", "while False:",
         "hopper::test_no_order_of_jobs_and_copies_changes_a_bit slow")],
    "training/step.py": [
        ("gradients are never clipped", "if self.grad_clip:", "if False:", "arithmetic"),
        ("the loss is not divided by the passes", "(len(batch.x) * self.ranks.size)", "self.ranks.size", "arithmetic"),
        ("fp16 takes infinite gradients", "self.stopped | overflow", "self.stopped", "step")],
    "training/checkpoint.py": [
        ("best is the highest loss", "return min(losses,", "return max(losses,", "checkpoint"),
        ("random numbers begin anew on resume", 'if len(rng["rng.cpu"]) == ranks.size:', "if False:", "checkpoint")],
    "training/optimizer.py": [
        ("betas are swapped", "(config.beta1, config.beta2)", "(config.beta2, config.beta1)", "arithmetic"),
        ("norms and biases decay", '"weight_decay": 0.0}', '"weight_decay": config.weight_decay}', "optimizer")],
    "training/metrics.py": [
        ("the resumed step's record is lost", 'record["step"] <= step]', 'record["step"] < step]', "metrics")],
    "training/config.py": [
        ("the warm-up may take all the time", "elapsed / (0.2 * limit))", "elapsed / limit)", "config")],
    "training/parallel.py": [
        ("gradients are not summed", "dist.all_reduce(flat)", "dist.all_reduce(flat.clone())", "parallel"),
        ("each rank has the first positions", "at + self.rank * len(at)", "at", "parallel"),
        ("each rank has a first token", "if self.rank:\n            b", "if False:\n            b", "parallel")],
    "training/probe.py": [
        ("headroom forgets 16 bits", "math.log(torch.finfo(call.q.dtype).max)", "math.log(3e38)", "probe"),
        ("a broken call is compared with itself", "replace(call.break_it, broken=broken)", "call.break_it", "awake")],
    "training/huggingface.py": [
        ("logits are not compared", "if not difference <= 1e-3 * spread:", "if False:", "huggingface")],
    "training/context.py": [
        ("a standard error is a deviation", "float(gain.std()) / math.sqrt(windows)", "float(gain.std())", "context")],
    "train.py": [
        ("validation has dropout", "run.train_step.model.eval()\n", "pass\n", "train"),
        ("bits per byte are per token", "nats / math.log(2) / size", "nats / math.log(2) / tokens", "train"),
        ("the data begins anew on resume", "loader.load_state_dict(", "str(", "resume")],
    "sample.py": [("all samples have one seed", "prompt, cfg.seed + number)", "prompt, cfg.seed)", "sample")],
    "data/dataset.py": [("a later file's documents have its own starts", "[begin + found for", "[found for", "data")],
    "data/loader.py": [
        ("all ranks have one batch", "self.position + self.rank * self.batch_size", "self.position", "data"),
        ("the last window is left out", "// (stride or T) + 1", "// (stride or T)", "data")],
    "data/prepare.py": [
        ("bpe learns from validation text", "for document in train for piece", "for document in train + val for piece",
         "data")],
    "data/tokenizer.py": [
        ("a text's end-of-text ends a document", "disallowed_special=())", 'allowed_special="all")', "tokenizer")],
    "lab/prediction.py": [("the lab's stale seed is the right one", "self.seed + 1", "self.seed", "breakit")],
}  # fmt: skip
FAULTS = [Fault(file, *row) for file, rows in TABLE.items() for row in rows]


def plant(fault: Fault) -> str:
    """Runs the fault's tests on a copy of the tree that has it. Returns the test that failed, or NOT NOTICED."""
    names = [name.partition("::") for name in fault.tests.split() if name != "slow"]
    tests = [f"tests/test_{file}.py{colons}{test}" for file, colons, test in names]
    marks = "slow or not slow" if fault.tests.endswith("slow") else "not slow"
    left_out = shutil.ignore_patterns(".*", "__pycache__", "runs", "cache")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(shutil.copytree(ROOT, Path(folder) / "tree", ignore=left_out))
        text = (tree / fault.file).read_text(encoding="utf-8")
        (tree / fault.file).write_text(text.replace(fault.old, fault.new), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-qx", "-n0", "-p", "no:cacheprovider", "-m", marks, *tests]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, cwd=tree, env=env, stdout=subprocess.PIPE, text=True)
    if ended.returncode not in (0, 1):  # such as a fault that cannot be imported, which any test would notice
        return f"NOT NOTICED, pytest ended with {ended.returncode}: {ended.stdout[-500:]}"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.MULTILINE)
    return f"noticed by {failed[1]}" if failed else "NOT NOTICED"


if __name__ == "__main__":
    chosen = [fault for fault in FAULTS if not sys.argv[1:] or any(word in fault.name for word in sys.argv[1:])]
    unnoticed = 0
    for fault in chosen:
        print(f"{fault.file}: {fault.name}: ", end="", flush=True)
        print(outcome := plant(fault), flush=True)
        unnoticed += outcome.startswith("NOT")
    sys.exit(f"{unnoticed} of {len(chosen)} faults were not noticed" if unnoticed else 0)
