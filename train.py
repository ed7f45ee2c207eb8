"""Train a GPT: the whole run, read top to bottom.

    python train.py                                                    a small GPT on Python's standard library
    python train.py data=text data.path=FILE_OR_FOLDER tokenizer=bpe   your own text
    python train.py model=gpt2 tokenizer=gpt2 data=text data.path=...  GPT-2's size, for one GPU
    python train.py attention=naive                                    the same run through another attention
    python train.py break_it=no_max break_it.score_gain=100            take a line out and see what it was for
    python train.py experiment=shakespeare                             a recipe whose result is known
    python train.py -m optimizer.lr=1e-3,2e-3 optimizer=adamw,muon     every combination, in one table and one picture
    python train.py resume=auto                                        go on where the last run stopped
    python train.py --cfg job                                          every key and its value

Everything a run makes lies in runs/NAME: config.yaml, metrics.jsonl, loss.png, samples.txt, checkpoints, wandb.
"""

import copy
import math
import os
import shlex
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path

import torch

from data.loader import Loader, open_data, validation_batches
from data.prepare import DataConfig
from data.tokenizer import END_OF_TEXT, TextStream, TokenizerConfig, to_json
from model.attention import AttentionConfig, resolve
from model.break_it import BreakIt
from model.generate import NotFinite, Sampler, generate
from model.gpt import GPT, GPTConfig
from model.probe import ProbeConfig, find, reading, record
from training import checkpoint, config
from training.machine import about, keep_memory, memory_gib, peak_flops, pick_device
from training.metrics import Metrics, WandbConfig, show, stamp
from training.optimizer import OptimizerConfig, base_rate, build_optimizers, learning_rate
from training.sweep import sweep

# ---------------------------------------------------------------------------------------------------------------------
# Configuration. The groups' dataclasses stand beside the code that they configure; conf/ only overrides.


@dataclass
class Config:
    model: GPTConfig = field(default_factory=GPTConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    break_it: BreakIt = field(default_factory=BreakIt)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)

    name: str | None = None  # of the run; None: date, size and attention
    runs: str = "runs"  # the folder that runs lie in
    resume: str | None = None  # auto: the last checkpoint of run `name`, or of the newest run; or a path. It brings its
    # configuration: what the command line does not say stays as it was
    seed: int = 1337

    steps: int = 700  # updates of the weights
    batch_size: int = 16  # sequences that go through the model at once: lower it when memory runs out
    tokens_per_step: int | None = None  # of one update, in as many passes as it takes; None: one pass
    z_loss: float = 0.0  # weight of mean(logsumexp(logits)^2) beside the loss; 1e-4 is usual, 0 leaves it out
    ema_decay: float = 0.0  # validate, sample and keep a moving average of the weights, over about 1 / (1 - ema_decay)
    # steps, and the last ninth of the steps at first; 0: the weights themselves
    eval_every: int = 100  # steps
    eval_tokens: int = 65536  # about as many validation tokens, always the same ones
    sample_every: int = 200  # steps; 0: never
    sample_tokens: int = 200
    checkpoint_every: int = 100  # steps; the best is chosen among those that were evaluated too
    keep_last: int = 2  # checkpoints; the best is kept besides
    log_every: int = 1  # steps

    device: str = "auto"  # auto | cpu | cuda | cuda:1 | mps
    dtype: str = "auto"  # bf16 | fp16 (both autocast, fp16 with a gradient scaler) | float32; auto: bf16 on a GPU that
    # has it
    compile: str = "auto"  # true | false; auto: on a GPU, but not for tiled, whose loop would be unrolled
    stop_on_nan: bool = True  # false lets a broken run go on, to see where it ends

    def __post_init__(self):
        for name in ("steps", "batch_size", "eval_every", "eval_tokens", "checkpoint_every", "keep_last", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("name", "runs", "resume"):
            if getattr(self, name) == "":
                raise ValueError(f"{name}= is empty; give it a value or leave it out")
        if self.name and (
            self.name in (".", "..", "latest", "auto") or "/" in self.name or not self.name.isprintable()
        ):
            raise ValueError(
                f"name={self.name!r} cannot name a run; use letters, digits and - (runs= chooses the folder)"
            )
        if self.tokens_per_step is not None and self.tokens_per_step < 1:
            raise ValueError(f"tokens_per_step={self.tokens_per_step} must be at least 1; null takes one pass")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} is outside [0, 2**63)")
        for name in ("sample_every", "sample_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        if not 0 <= self.z_loss < math.inf:
            raise ValueError(f"z_loss={self.z_loss} must be finite and at least 0; 1e-4 is usual, 0 leaves it out")
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay={self.ema_decay} is outside [0, 1); 0.999 is usual, 0 averages nothing")
        self.compile = self.compile.lower()  # True, as Python and YAML spell it, is a text here
        for name, known in {"dtype": ("auto", "bf16", "fp16", "float32"), "compile": ("auto", "true", "false")}.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)} is not known; choose {', '.join(known)}")


def main(cfg: Config) -> int:
    # -----------------------------------------------------------------------------------------------------------------
    # Where it runs, and in what precision.
    keep_memory()
    device = pick_device(cfg.device)
    dtype = cfg.dtype
    if dtype == "auto":
        has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        dtype = "bf16" if has_bf16 else "float32"
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype)
    autocast = torch.autocast(device.type, low) if low else nullcontext()
    torch.set_float32_matmul_precision("high" if low else "highest")
    attention = resolve(cfg.attention, device.type, cfg.break_it)
    compiled = cfg.compile == "true" or (cfg.compile == "auto" and device.type == "cuda" and attention.impl != "tiled")

    T = cfg.model.context_length
    per_pass = cfg.batch_size * T  # tokens that go through the model at once
    tokens_per_step = per_pass if cfg.tokens_per_step is None else cfg.tokens_per_step
    accumulation, rest = divmod(tokens_per_step, per_pass)
    if rest or not accumulation:
        raise ValueError(
            f"tokens_per_step={tokens_per_step} is no multiple of batch_size * model.context_length = {per_pass}; "
            f"use tokens_per_step={max(1, round(tokens_per_step / per_pass)) * per_pass} or another batch_size"
        )

    # -----------------------------------------------------------------------------------------------------------------
    # Name and resume. A broken run carries its fault in its name.
    broken = cfg.break_it.label
    name, runs = cfg.name, Path(cfg.runs)
    if broken and name and broken not in name:
        name = f"{name}-BROKEN-{broken}"
    resumed = None
    if cfg.resume:
        path = checkpoint.find_resume(cfg.resume, runs, name)
        resumed = checkpoint.load(path)
        if path.resolve().parent.name == checkpoint.FOLDER:  # of a run, and not a copy that lies somewhere else
            name = name or path.resolve().parents[1].name
        refuse_another_model(resumed, cfg, broken)

    # -----------------------------------------------------------------------------------------------------------------
    # Data. Prepared at first use, cached by content.
    dataset = open_data(cfg.data, cfg.tokenizer)
    encoding = dataset.encoding
    if cfg.model.vocab_size not in (None, encoding.n_vocab):
        raise ValueError(f"model.vocab_size={cfg.model.vocab_size}, the tokenizer has {encoding.n_vocab}; leave it out")
    cfg.model.vocab_size = encoding.n_vocab
    loader = Loader(dataset.train, dataset.train_documents, batch_size=cfg.batch_size, context_length=T, seed=cfg.seed)
    validation = (dataset.val, dataset.val_documents, cfg.batch_size, T, cfg.eval_tokens)
    validation_batches(*validation)  # refuses a text that is too short now, not at the first evaluation
    bytes_of = torch.from_numpy(dataset.token_bytes).to(device)  # (n_vocab,): makes bits per byte exact for any batch

    # -----------------------------------------------------------------------------------------------------------------
    # Model and optimizer.
    if cfg.optimizer.lr is None:
        cfg.optimizer.lr = base_rate(cfg.model.n_embd)
    torch.manual_seed(cfg.seed)
    try:
        model = GPT(cfg.model, attention, cfg.break_it).to(device)
    except (RuntimeError, TypeError) as error:  # TypeError: a size past 2**63; torch's others are RuntimeErrors
        raise ValueError(
            f"a model of model.n_embd={cfg.model.n_embd}, n_layer={cfg.model.n_layer}, "
            f"{cfg.model.vocab_size} symbols cannot be made here ({str(error).splitlines()[0]}); use smaller ones"
        ) from error
    optimizers = build_optimizers(model, cfg.optimizer)
    # fp16 ends at 6e-8 below, where gradients lie. The scaler multiplies the loss by a power of two, which it doubles
    # when all has gone well for long and halves, leaving out the step, when a gradient has become infinite.
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == "fp16")
    step, val_loss = 0, math.inf
    if resumed:
        step, tensors = resumed.step, resumed.optimizer()
        if "batch.x" in tensors:
            raise ValueError(
                f"{resumed.path} is a fault that was kept, without what training needs: look into it by "
                f"python breakit.py replay={resumed.path}, or resume a checkpoint"
            )
        model.load_state_dict(resumed.model)
        checkpoint.load_optimizer_tensors(optimizers, model.named_parameters(), tensors)
        checkpoint.set_rng_state(tensors)
        loader.load_state_dict(resumed.state["loader"])
        if resumed.state.get("scaler"):  # not there in a checkpoint that was trained in another dtype
            scaler.load_state_dict(resumed.state["scaler"])
        if step >= cfg.steps:
            raise ValueError(f"{resumed.path} is at step {step} of steps={cfg.steps}; give a larger steps= to go on")

    # What is validated, sampled from and kept as the model: a running average, or the weights themselves. Two lines of
    # our own for torch's AveragedModel, whose count of updates and names of weights would have to be saved as well.
    averaged = copy.deepcopy(model) if cfg.ema_decay else model
    if resumed and any(name.endswith(".trained") for name in tensors):
        with torch.no_grad():
            for weight, p in model.named_parameters():
                p.copy_(tensors[f"{weight}.trained"])
    loss_of = torch.compile(model) if compiled else model

    if name is None:
        size = f"{model.parameter_count() / 1e6:.3g}M"
        first = time.strftime("%Y%m%d-%H%M%S") + f"-{size}-{attention.impl}" + (f"-BROKEN-{broken}" if broken else "")
        names = [first, *(f"{first}-{number}" for number in range(2, 100))]  # a sweep's jobs may take under a second
        name = next(name for name in names if not (runs / name).exists())
    folder = runs / name
    same_run = resumed is not None and resumed.path.resolve().is_relative_to(folder.resolve())
    held = checkpoint.lock(folder)
    if folder.exists() and not same_run:
        raise ValueError(f"the run {folder} exists already: go on with it by resume=auto, or use another name=")
    cfg.name = name

    # -----------------------------------------------------------------------------------------------------------------
    # A run explains itself: who, where, what, in its first lines and in its checkpoints.
    facts = {**about(device), "dtype": dtype, "attention": attention.impl}
    as_given = asdict(cfg)
    metrics = Metrics(
        folder,
        cfg.steps,
        config={**as_given, "about": facts},
        wandb_config=cfg.wandb,
        broken=broken,
        resume_step=step if same_run else None,
    )
    (folder / "config.yaml").write_text(config.to_yaml(cfg), encoding="utf-8")
    say = metrics.say
    say(f"run: {folder}" + (f", resumed from {resumed.path}" if resumed else ""))
    if resumed and (changes := changed(config_of(resumed), as_given)):
        say(f"changed since the checkpoint: {', '.join(changes)}")
    say(" | ".join(f"{key} {value}" for key, value in facts.items()))
    tile = f", tiles of {attention.block_m} x {attention.block_n}" if attention.impl == "tiled" else ""
    usual = AttentionConfig(attention.impl, attention.block_m, attention.block_n)
    special = "".join(f", {key} {value}" for key, value in asdict(attention).items() if value != getattr(usual, key))
    say(f"attention: {attention.impl}{tile}{special} (asked for: {cfg.attention.impl}) | compiled: {compiled}")
    say(f"model: {model.parameter_count():,} parameters, {cfg.model.n_layer} layers, context {T}, V {encoding.n_vocab}")
    say(
        f"data: {dataset.folder}, {len(dataset.train):,} training tokens, {len(dataset.val):,} for validation | "
        f"{tokens_per_step:,} tokens a step in {accumulation} passes, {cfg.steps * tokens_per_step:,} in all"
    )
    if broken:
        say(f"{stamp(broken)}attention is broken on purpose ({broken}): this run's numbers and text are worth nothing")

    # -----------------------------------------------------------------------------------------------------------------
    # What the loop calls.
    @torch.no_grad()
    def evaluate() -> dict:
        """Mean loss over the validation windows, in nats a token and in bits a byte."""
        averaged.eval()
        nats = tokens = text_bytes = 0.0
        for batch in validation_batches(*validation):
            x, y, documents = (part.to(device) for part in batch)
            with autocast:
                nats += float(averaged(x, y, documents)) * y.numel()
            tokens += y.numel()
            text_bytes += int(bytes_of[y].sum())
        averaged.train()
        return {"val_loss": nats / tokens, "val_bits_per_byte": nats / (math.log(2) * max(1, text_bytes))}

    def write_sample() -> str:
        """What the model writes after an end-of-text token, that is, as the beginning of a document."""
        averaged.eval()
        generator = torch.Generator(device).manual_seed(cfg.seed)  # its own: sampling must not disturb training's
        end = encoding.encode_single_token(END_OF_TEXT)
        idx = torch.tensor([[end]], device=device)
        stream = TextStream(encoding)
        with autocast:
            tokens = map(int, generate(averaged, idx, cfg.sample_tokens, Sampler(), generator))
            # It may end its document: with attention.documents on, what comes after would see what none has been shown.
            text = "".join(stream.feed(token) for token in takewhile(end.__ne__, tokens)) + stream.flush()
        averaged.train()
        return text

    def save(into: str = checkpoint.FOLDER, batch: dict | None = None) -> Path:
        """A checkpoint; or, with a batch, the weights that met it and no more."""
        tensors = batch
        if tensors is None:
            trained = {f"{name}.trained": p for name, p in model.named_parameters()} if averaged is not model else {}
            tensors = checkpoint.optimizer_tensors(optimizers, model.named_parameters()) | trained
            tensors |= checkpoint.rng_state()
        return checkpoint.save(
            folder / into,
            step,
            model=(averaged if batch is None else model).state_dict(),
            optimizer=tensors,
            state={
                "config": as_given,
                "about": facts,
                "broken": broken,
                "loader": loader.state_dict(),
                "scaler": scaler.state_dict(),
                "val_loss": val_loss if math.isfinite(val_loss) else None,
            },
            tokenizer=to_json(encoding),
            keep_last=cfg.keep_last,
        )

    def look() -> dict:
        """The gauges of attention, on one validation sequence, and the time that they take."""
        started = time.perf_counter()
        x, _, documents = (part[:1].to(device) for part in next(iter(validation_batches(*validation))))
        averaged.eval()
        with autocast:
            found = reading(record(averaged, x, documents=documents))
        averaged.train()
        return found | {"probe_ms": (time.perf_counter() - started) * 1e3}

    def search(batches: list, rng: dict) -> None:
        """Says where the batches of a step that met NaN or infinity first go wrong; keeps the one that does."""
        checkpoint.set_rng_state(rng)  # dropout again as it was, unless a compiled step drew it
        for batch in batches:
            before = checkpoint.rng_state()
            x, y, documents = (part.to(device) for part in batch)
            with autocast:
                place = find(record(model, x, y, documents))
            if place:
                say(f"{stamp(broken)}probe: {place}")
                # The first fault of a run stays; those of its resumptions are pruned as checkpoints are.
                into = "faults/later" if checkpoint.last(folder / "faults") else "faults"
                try:
                    kept = save(into, {"batch.x": x, "batch.y": y, "batch.documents": documents} | before)
                    say(f"  again, with every layer's gauges: python breakit.py replay={kept}")
                except OSError as error:
                    say(
                        f"  its batch and weights are lost: {folder / into} cannot be written "
                        f"({os.strerror(error.errno)}); free some space, and the run, resumed or begun again, meets it"
                    )
                return
        say(
            f"{stamp(broken)}probe: attention is not where it begins, "
            "as far as a second, uncompiled run of the same batch tells"
        )

    # Ctrl-C and SIGTERM let the step end, save and leave; a second one leaves at once.
    stop = []

    def on_signal(number, frame):
        if stop:
            raise KeyboardInterrupt
        stop.append(number)
        print(f"\n{signal.Signals(number).name}: stopping after this step; once more leaves at once", file=sys.stderr)

    handlers = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}

    # -----------------------------------------------------------------------------------------------------------------
    # The loop.
    code = 1
    saved = resumed.path if resumed else None
    flops = model.flops_per_token(T) * tokens_per_step
    peak = peak_flops(device) if low else None
    pace = None  # seconds a step, smoothed, for the time left
    model.train()
    try:
        while step < cfg.steps:
            started = time.perf_counter()
            lr = learning_rate(step + 1, cfg.steps, cfg.optimizer)
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = lr
            rng, batches = checkpoint.rng_state() if cfg.probe.every else {}, []
            total, text_bytes = torch.zeros((), device=device), torch.zeros((), dtype=torch.int64, device=device)
            for _ in range(accumulation):
                batch = loader.next()
                batches += [batch] if cfg.probe.every else []
                if device.type == "cuda":  # pinned memory lets the copy run beside the computation
                    batch = [part.pin_memory() for part in batch]
                x, y, documents = (part.to(device, non_blocking=True) for part in batch)
                with autocast:
                    loss = loss_of(x, y, documents, z_loss=cfg.z_loss) / accumulation
                scaler.scale(loss).backward()
                total += loss.detach()
                text_bytes += bytes_of[y].sum()
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.optimizer.grad_clip or math.inf)

            # Reading the loss waits for the device, once a step. That is its price for stopping before a bad update and
            # not after: from NaN weights there is no way back.
            loss, norm = float(total), float(norm)
            # Infinite gradients are the scaler's daily work while there is a scale to blame. It is 1 without a scaler,
            # and once it has fallen to 1 nothing is scaled and the infinity is the model's own.
            scale = scaler.get_scale()
            spoilt = cfg.stop_on_nan and not (math.isfinite(loss) and (math.isfinite(norm) or scale > 1))
            # Not by scaler.step(optimizer), which of two optimizers leaves out only the one whose gradient is infinite.
            skipped = scaler.is_enabled() and not math.isfinite(norm)
            if not spoilt and not skipped:
                for optimizer in optimizers:
                    optimizer.step()
                if averaged is not model:
                    # shorter at first: with 0.999 alone half of the first, random weights would be in it at step 700
                    average(averaged, model, min(cfg.ema_decay, (1 + step) / (10 + step)))
            scaler.update()
            model.zero_grad(set_to_none=True)
            step += 1

            seconds = time.perf_counter() - started
            pace = seconds if pace is None else 0.9 * pace + 0.1 * seconds
            if step % cfg.log_every == 0 or step == cfg.steps or spoilt:
                metrics.log({
                    "step": step,
                    "loss": loss,
                    "bits_per_byte": loss * tokens_per_step / (math.log(2) * max(1, int(text_bytes))),
                    "lr": lr,
                    "grad_norm": norm,
                    "ms": seconds * 1e3,
                    "tokens_per_second": tokens_per_step / seconds,
                    "mfu": flops / seconds / peak if peak else None,
                    "memory_gib": memory_gib(device),
                    "eta_s": pace * (cfg.steps - step),
                    **({"loss_scale": scale} if scaler.is_enabled() else {}),
                })  # fmt: skip
            if spoilt:
                say(stamp(broken) + what_to_try(step, loss, norm, cfg, dtype, saved))
                if cfg.probe.every:
                    search(batches, rng)
                return 1
            if cfg.probe.every and step % cfg.probe.every == 0:
                metrics.log({"step": step, **look()})

            last = step == cfg.steps
            val_loss = math.inf  # of this step's weights: unknown unless it is measured now
            if step % cfg.eval_every == 0 or last:
                found = evaluate()
                val_loss = found["val_loss"]
                metrics.log({"step": step, **found})
            if cfg.sample_every and cfg.sample_tokens and (step % cfg.sample_every == 0 or last):
                try:
                    metrics.sample(step, write_sample())
                except NotFinite:  # of the weights that this step made; the next step's loss will say so too
                    say(f"{stamp(broken)}no sample at step {step}: the logits are NaN")
                    averaged.train()
            if step % cfg.checkpoint_every == 0 or last or stop:
                saved = save()
            if val_loss < math.inf:
                metrics.picture()
            if stop and not last:
                say(f"stopped at step {step}, saved {saved}; to go on: {again(name, cfg.runs)}")
                code = 128 + stop[0]
                return code
        code = 0
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"out of GPU memory with batch_size={cfg.batch_size} sequences of {T} tokens; "
            f"use batch_size={max(1, cfg.batch_size // 2)} tokens_per_step={tokens_per_step}, which learns the same"
        ) from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        try:
            if step:
                metrics.picture()
        finally:
            metrics.close(code)
            held.close()

    # -----------------------------------------------------------------------------------------------------------------
    # What there is now, and what to do next.
    best_loss, best_step = metrics.best or (math.nan, step)
    show(f"{stamp(broken)}done: best validation loss {best_loss:.4f} at step {best_step}")
    show(f"  picture      {folder / 'loss.png'}\n  metrics      {folder / 'metrics.jsonl'}")
    show(f"  samples      {folder / 'samples.txt'}\n  checkpoints  {folder / checkpoint.FOLDER}")
    where = [] if cfg.runs == "runs" else [f"runs={cfg.runs}"]
    show("next:\n  " + shlex.join(["python", "sample.py", f"run={name}", *where, "prompt=def "]))
    show(f"  {again(name, cfg.runs)} steps={2 * cfg.steps}  # the rate rises again")
    return 0


# ---------------------------------------------------------------------------------------------------------------------


def resumed_config(cfg) -> dict | None:
    """What a resumed run has instead of the defaults: its checkpoint's configuration, and the checkpoint's own path
    for resume=. None for a new run. ValueError where there is nothing to resume."""
    if cfg.resume is None:
        return None
    path = checkpoint.find_resume(cfg.resume, Path(cfg.runs), cfg.name)
    # Which run this is, and where it lies, is what was asked for now: a run may have been renamed or moved.
    found = {key: value for key, value in checkpoint.load_state(path)["config"].items() if key not in ("name", "runs")}
    return found | {"resume": str(path)}


@torch.no_grad()
def average(averaged: GPT, model: GPT, decay: float) -> None:
    """averaged = decay * averaged + (1 - decay) * model, weight by weight, in one pass over them."""
    torch._foreach_lerp_(list(averaged.parameters()), list(model.parameters()), 1 - decay)


def config_of(resumed: checkpoint.Checkpoint) -> dict:
    """The checkpoint's configuration; a key that did not exist when it was written has its default."""
    return asdict(config.from_dict(Config, resumed.state["config"]))


def refuse_another_model(resumed: checkpoint.Checkpoint, cfg: Config, broken: str) -> None:
    """ValueError when the checkpoint's model, tokenizer, optimizer or faults are not this run's."""
    theirs, ours = config_of(resumed), asdict(cfg)
    for group in ("model", "tokenizer"):
        for key, value in ours[group].items():
            other = theirs[group][key]
            if value != other and key not in ("vocab_size", "dropout_p", "activation_checkpointing"):
                raise ValueError(
                    f"{resumed.path} is of another model: {group}.{key} is {other} there and {value} here; "
                    f"use {group}.{key}={other}, or start a new run without resume="
                )
    kind = theirs["optimizer"]["kind"]
    if kind != cfg.optimizer.kind:
        raise ValueError(
            f"{resumed.path} has the state of optimizer.kind={kind}, this run has {cfg.optimizer.kind}; "
            f"use optimizer={kind}, or start a new run without resume="
        )
    for key in ("window", "windows", "softmax_scale", "softcap", "alibi", "documents", "block_mask", "block_mask_size"):
        value, other = ours["attention"][key], theirs["attention"][key]
        if value != other:
            raise ValueError(
                f"{resumed.path} was trained with attention.{key}={other}, this run has {value}; "
                "resume with the same, or start a new run without resume="
            )
    if resumed.state["broken"] != broken:
        raise ValueError(
            f"{resumed.path} was trained with break_it: {resumed.state['broken'] or 'none'}, this run has "
            f"{broken or 'none'}; resume with the same, or start a new run without resume="
        )


def changed(theirs: dict, ours: dict, prefix: str = "") -> list[str]:
    """What of the configuration differs from the checkpoint's, as "key old -> new": a resumed run is the same run only
    where nothing that matters does."""
    found = []
    for key, value in ours.items():
        old, path = theirs[key], prefix + key
        if isinstance(value, dict):
            found += changed(old, value, f"{path}.")
        elif value != old and path not in ("name", "runs", "resume"):
            found.append(f"{path} {old} -> {value}")
    return found


def what_to_try(step: int, loss: float, norm: float, cfg: Config, dtype: str, saved: Path | None) -> str:
    """The message of a run that met NaN or infinity."""
    tries = [f"a lower optimizer.lr (it is {cfg.optimizer.lr:g})", "a longer optimizer.warmup_steps"]
    if cfg.attention.impl != "naive":
        tries.append("attention=naive, to see whether attention does it")
    if dtype != "float32":
        tries.append("dtype=float32")
    if not cfg.probe.every:
        tries.append("probe.every=100, to be told the layer, the head and the tile that it comes from")
    if cfg.break_it.label:
        tries = ["break_it=none: attention is broken on purpose", "stop_on_nan=false, to watch it go on"]
    kept = f"the last good checkpoint is {saved}" if saved else "no checkpoint had been saved yet"
    return (
        f"step {step}: loss {loss}, gradient norm {norm}: stopped before the optimizer step; {kept}.\n"
        f"try: {'; '.join(tries)}"
    )


def again(name: str, runs: str) -> str:
    """The command line that goes on with this run; the checkpoint has the rest of its configuration."""
    where = [] if runs == "runs" else [f"runs={runs}"]
    return shlex.join(["python", "train.py", "resume=auto", f"name={name}", *where])


if __name__ == "__main__":
    config.run(main, Config, "config", resumed=resumed_config, jobs_of=sweep)
