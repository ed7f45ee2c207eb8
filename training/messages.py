"""What a run says when it begins and when it ends."""

import math
import shlex
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from data.loader import fingerprint
from data.text import counted
from model.abilities import wanted, why_not
from model.attention import AttentionConfig, sdpa_kernel
from parallel.processes import bytes_sent
from training import checkpoint
from training.machine import DTYPES
from training.metrics import show, stamp
from training.record import Numbers
from training.resume import again, changed, config_of
from training.run import Run, passes


def introduce(run: Run, resumed: checkpoint.Checkpoint | None, parent: checkpoint.Checkpoint | None, way: str) -> None:
    """Prints the first lines of a run: folder, versions, device, attention, model and data. way: how a step is run."""
    lines = [
        *origin(run, resumed, parent),
        " | ".join(f"{key} {value}" for key, value in run.facts.items()),
        attention_line(run, way),
        *data_lines(run),
        *([parallel_line(run)] if run.ranks.size > 1 else []),
        *schedule_lines(run.cfg),
        *warnings(run),
    ]
    for line in lines:
        run.metrics.say(line)


def origin(run: Run, resumed: checkpoint.Checkpoint | None, parent: checkpoint.Checkpoint | None) -> Iterator[str]:
    """Where the run's weights come from, and what has changed since."""
    cfg = run.cfg
    yield f"run: {run.folder}" + (f", resumed from {resumed.path}" if resumed else "")
    if cfg.init_from:
        yield f"begun with the weights of {cfg.init_from}"
    ours = asdict(cfg)
    if parent and (changes := changed(config_of(parent), {key: ours[key] for key in ("model", "attention")})):
        yield f"changed since these weights: {', '.join(changes)}"
    if parent and parent.state["broken"]:
        yield f"{stamp(parent.state['broken'])}these weights were trained with attention broken on purpose"
    if resumed and (changes := changed(config_of(resumed), ours)):
        yield f"changed since the checkpoint: {', '.join(changes)}"
    if resumed and (other := resumed.other_attention(cfg.attention, run.model)):
        yield other
    if resumed and (other := resumed.other_text(fingerprint(run.dataset.val, run.dataset.val_documents))):
        yield other


def attention_line(run: Run, way: str) -> str:
    """Which attention runs, with which kernels and options."""
    cfg, attention, dtype = run.cfg, run.model.attention_config, DTYPES[str(run.facts["dtype"])]
    detail = ""
    if attention.impl == "tiled":
        detail = f", tiles of {attention.block_m} x {attention.block_n}"
    elif attention.impl == "sdpa":
        detail = f", PyTorch's {sdpa_kernel(cfg.model, dtype, run.device, attention.dropout_p)} kernel"
    elif attention.impl == "triton":
        asked = wanted(attention, cfg.break_it), run.device, dtype, cfg.model.head_size
        positions = "it has no positions" if run.ranks.part.ring and (attention.window or attention.windows) else ""
        detail = kernels_of(positions or why_not("hopper forward", *asked), why_not("hopper backward", *asked))
    usual = AttentionConfig(attention.impl, attention.block_m, attention.block_n, kernel=attention.kernel)
    special = "".join(f", {key} {value}" for key, value in asdict(attention).items() if value != getattr(usual, key))
    return f"attention: {attention.impl}{detail}{special} (asked for: {cfg.attention.impl}) | step: {way}"


def data_lines(run: Run) -> Iterator[str]:
    """The model's size, the data's, and how documents are packed."""
    cfg, dataset = run.cfg, run.dataset
    yield (
        f"model: {run.model.parameter_count():,} parameters, {counted(cfg.model.n_layer, 'layer')}, "
        f"context {cfg.model.context_length}, V {cfg.model.vocab_size}"
    )
    yield (
        f"data: {dataset.folder}, {len(dataset.train):,} training tokens, {len(dataset.val):,} for validation | "
        f"{run.tokens_per_step:,} tokens a step in {counted(passes(cfg), 'pass', 'passes')}, "
        f"{'at most ' * bool(cfg.max_minutes)}{cfg.steps * run.tokens_per_step:,} in all"
    )
    if packing := run.batches.loader.packing:
        share = packing.repeated / (len(packing) * cfg.model.context_length)
        yield (
            f"packing: {counted(len(packing), 'window')}, {share:.2%} of their tokens are in two of them; a token sees "
            f"{packing.seen:,.0f} tokens of its document on average, without packing {packing.seen_cut:,.0f}"
        )


def parallel_line(run: Run) -> str:
    """What each process takes and sends."""
    cfg, ranks, N, width = run.cfg, run.ranks, run.cfg.parallel.context, DTYPES[str(run.facts["dtype"])].itemsize
    sent = bytes_sent(ranks, run.model, run.tokens_per_step, width, passes(cfg) // ranks.turns)
    gradients, exchanged = (f"{size / 1e6:,.1f} MB" for size in sent)
    of_step = cfg.batch_size * passes(cfg)
    return (
        f"parallel: {ranks.size} processes, each {f'keeps 1/{ranks.size} of the weights, ' * cfg.parallel.shard}takes "
        f"{of_step // (ranks.turns * ranks.part.shares)} of a step's {counted(of_step, 'sequence')} "
        f"and sends {gradients} of {'weights and ' * cfg.parallel.shard}gradients a step"
        + (f" and {exchanged} in attention; each sequence is on {N} of them" if N > 1 else "")
        + (", and its keys and values go round" if ranks.part.ring else "")
    )


def schedule_lines(cfg: Any) -> Iterator[str]:
    """The lengths of a length warm-up, and what the run is too short to reach. cfg: train.Config."""
    if cfg.length_warmup_steps:
        steps, (short, *longer) = cfg.length_warmup_steps, cfg.lengths
        begins = [1 - (-i * steps // len(longer)) for i in range(1, len(longer) + 1)]  # where length_at() rises
        yield f"length warm-up: sequences of {short} tokens, " + ", ".join(
            f"{length} from step {step}" for length, step in zip(longer, begins, strict=True)
        )
        if cfg.steps < begins[-1]:
            yield (
                f"the sequences never reach model.context_length={cfg.model.context_length}: steps={cfg.steps} is not "
                f"more than length_warmup_steps={steps}"
            )
    if cfg.steps < cfg.optimizer.warmup_steps:
        yield (
            f"the learning rate never reaches optimizer.lr={cfg.optimizer.lr:g}: steps={cfg.steps} is less than "
            f"optimizer.warmup_steps={cfg.optimizer.warmup_steps}"
        )


def warnings(run: Run) -> Iterator[str]:
    """What is allowed, and hardly wanted."""
    alibi, position, broken = run.model.attention_config.alibi, run.cfg.model.position, run.cfg.break_it.label
    if alibi and position != "none":
        yield f"attention.alibi=true beside model.position={position}: the model has positions twice"
    if not alibi and position == "none":
        yield "model.position=none without attention.alibi=true: only the causal mask tells the model where a token is"
    if broken:
        yield f"{stamp(broken)}attention is broken on purpose ({broken}): this run's numbers and text are worth nothing"


def kernels_of(forward: str, backward: str) -> str:
    """Which kernels attention=triton runs. forward, backward: why it is not that of hopper/forward.py and
    hopper/backward.py; empty if it is."""
    if forward and forward == backward:
        return f", portable kernels (not hopper/forward.py: {forward})"
    first = f"portable forward (not hopper/forward.py: {forward})" if forward else "forward of hopper/forward.py"
    second = f"portable backward (not hopper/backward.py: {backward})" if backward else "backward of hopper/backward.py"
    return f", {first}, {second}"


def less_memory(run: Run) -> str:
    """The message for a run whose memory ran out: the keys of one that takes less and learns the same."""
    cfg, model = run.cfg, run.model.config
    form = "true" if run.model.attention_config.impl == "naive" else "selective"
    use = f"model.chunk={max(32, (model.chunk or model.context_length) // 64 * 32)}"
    if model.activation_checkpointing == "false":
        use = f"model.activation_checkpointing={form}"
    if cfg.batch_size > 1:
        use = f"batch_size={cfg.batch_size // 2} tokens_per_step={run.tokens_per_step}"
    return (
        f"out of {'' if run.device.type == 'cpu' else 'GPU '}memory with batch_size={cfg.batch_size} sequences of "
        f"{cfg.model.context_length} tokens; use {use}, which learns the same"
    )


def what_to_try(run: Run, numbers: Numbers) -> str:
    """The message for a run that stopped at NaN or infinity. close() says it if there is no checkpoint."""
    cfg = run.cfg
    stopped = f"step {run.step}: loss {numbers.loss}, gradient norm {numbers.norm}: stopped before the update"
    if cfg.break_it.label:
        kept = f"; last checkpoint {run.saved.name}" if run.saved else ""
        return f"{stopped}{kept}; try break_it=none or stop_on_nan=false"
    tries = [f"a lower optimizer.lr (it is {cfg.optimizer.lr:g})", "a longer optimizer.warmup_steps"]
    if cfg.attention.impl != "naive":
        tries.append("attention=naive, to compare")
    if run.facts["dtype"] != "float32":
        tries.append("dtype=float32")
    if not cfg.probe.every and run.ranks.size == 1:
        tries.append("probe.every=100, to find the tile")
    kept = f"; last good checkpoint: {run.saved}" if run.saved else ""
    return f"{stopped}{kept}\ntry: {'; '.join(tries)}"


def where_time_went(run: Run) -> str:
    """The run's time in five parts. A cold step, in which kernels are compiled, counts as training for as long as the
    others take."""
    total, took = time.perf_counter() - run.started, run.took
    longer = max(0.0, took["cold steps"] - run.cold * run.pace)
    parts = {
        "starting": took["starting"],
        "warming up" if run.train_step.way == "eager" else "compiling": longer,
        "training": took["steps"] + took["cold steps"] - longer,
        "evaluations, samples and checkpoints": took["between steps"],
    }
    parts["the rest"] = max(0.0, total - sum(parts.values()))
    return f"{total:.1f} s: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items())


def say_what_is_there(run: Run) -> None:
    """Prints the last lines of a run that reached its end: its files, and the commands to try next."""
    cfg, folder = run.cfg, run.folder
    broken = stamp(cfg.break_it.label)
    onwards = f"{again(cfg)} steps={2 * cfg.steps}"
    if cfg.max_minutes:
        onwards += f" max_minutes={2 * cfg.max_minutes:g}"
        limit, by_steps = f"max_minutes={cfg.max_minutes:g}", f"steps={run.step} max_minutes=null"
        end = f"stopped by {limit} at step {run.step} of {cfg.steps}; {by_steps} makes about the same run by steps"
        if run.step == cfg.steps:
            end = f"steps={cfg.steps} took {run.spent / 60:.3g} minutes of {limit}; more steps= would use the rest"
        show(f"{broken}{end}")
    best_loss, best_step = run.metrics.best or (math.nan, run.step)
    show(f"{broken}done: best validation loss {best_loss:.4f} at step {best_step}")
    show(f"  picture      {folder / 'loss.png'}\n  metrics      {folder / 'metrics.jsonl'}")
    samples = folder / "samples.txt"
    if samples.exists() and samples.stat().st_size:
        show(f"  samples      {samples}")
    show(f"  checkpoints  {folder / checkpoint.FOLDER}")
    show(f"  time         {where_time_went(run)}")
    where = [] if cfg.runs == "runs" else [f"runs={cfg.runs}"]
    space = " " * (run.dataset.encoding.name == "byte")  # tokens of several bytes begin with the space before a word
    usual = {"pystdlib": f"def{space}", "pypackages": f"def{space}", "tinystories": "Once upon a time"}
    begin = [f"prompt={usual[cfg.data.source]}"] if cfg.data.source in usual else []
    show("next:\n  " + shlex.join(["python", "sample.py", f"run={cfg.name}", *where, *begin]))
    show(f"  {onwards}  # trains on")
