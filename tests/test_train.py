"""train.py: one curve whatever the attention, what a run records and says, and how it ends when something fails."""

import ast
import copy
import math
import os
import re
import shutil
import signal
import time
from concurrent import futures
from contextlib import ExitStack
from dataclasses import asdict
from functools import cache
from itertools import count
from pathlib import Path

import pytest
import torch

import sample
import train
import training.step
from data.dataset import open_data, open_dataset
from data.loader import Loader, validation_batches
from model.attention import AttentionConfig, attention
from model.gpt import GPTConfig
from model.recompute import RecomputingGPT
from tests.processes import HANGS
from tests.reference import assert_within_budget
from tests.runs import composed, full, last, losses, records, tiled
from training import activities, checkpoint, config, metrics
from training.files import lock
from training.machine import is_out_of_memory
from training.metrics import Metrics, read_metrics
from training.resume import make_room
from training.writer import Writer

ROOT = Path(__file__).resolve().parents[1]

# --- one curve, whatever the attention ------------------------------------------------------------------------------

NAIVE = ["attention=naive"]
CURVE = ["model.context_length=128", "batch_size=2", "tokens_per_step=256", "attention.dropout_p=0.1"]


@pytest.fixture(scope="module")
def curve(call, small, tmp_path_factory):
    """curve(steps, arguments): the losses of a run in float64, or in dtype, as it recorded them, in float32."""

    @cache
    def curve(steps: int, *arguments: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        runs = tmp_path_factory.mktemp("curve")
        with pytest.MonkeyPatch.context() as patch:
            # There is no such switch, float64 is for tests. The initial weights are the float32 ones.
            patch.setattr("training.run.RecomputingGPT", lambda *options: RecomputingGPT(*options).to(dtype))
            assert call(train, *small, *CURVE, f"runs={runs}", f"steps={steps}", *arguments).code == 0
        return torch.tensor(losses(next(runs.iterdir())))

    return curve


SAME = [tiled(64), tiled(16), [*NAIVE, "break_it=no_max"], [*tiled(64), "break_it=no_max"]]
CURVES = [pytest.param(100, arguments, marks=pytest.mark.slow) for arguments in SAME]


@pytest.mark.parametrize(("steps", "arguments"), [(3, tiled(64)), *CURVES])
def test_every_attention_trains_on_one_curve(curve, steps, arguments):
    """With dropout, whatever the tiles, and without the maximum while scores are small. In float32 rounding would part
    the curves; in float64 it is 2**29 times smaller, too small for the float32 in which losses are recorded. A wrong
    term of relative size 1e-7 would show here."""
    found = curve(steps, *arguments)
    assert torch.equal(found, curve(steps, *NAIVE))
    assert steps < 100 or found[-1] < found[0] - 1  # it did learn: two flat lines would lie on each other as well


@pytest.mark.slow
def test_in_float32_tiled_strays_from_the_right_curve_as_little_as_naive(curve):
    """Training multiplies each rounding, so the budget's oracle is the whole training in float64."""
    found, naive = (curve(100, *arguments, dtype=torch.float32) for arguments in (tiled(64), NAIVE))
    assert_within_budget({"loss": found}, {"loss": naive}, {"loss": curve(100, *NAIVE).double()})


# --- what a step trains on, and fp16's scale --------------------------------------------------------------------------


def test_length_warmup_trains_on_shorter_sequences_from_anywhere(small_run, tmp_path, monkeypatch):
    """Of 8 tokens for three steps, of 16 for three, and then whole ones. Each step has as many tokens as without the
    warm-up, and each piece is a sequence that begins at position 0. They were the pieces of whole windows, so alike
    that a model learned half as fast."""
    seen: dict[str, list] = {"whole": [], "warmed": []}
    for name, more in {"whole": "", "warmed": " length_warmup_steps=6 length_warmup_from=8"}.items():
        kept = training.step.TrainStep.__call__

        def look(self, batches, *rest, into=seen[name], kept=kept):
            into.append(batches.each(torch.clone))
            return kept(self, batches, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(training.step.TrainStep, "__call__", look)
            ended = small_run(f"steps=8 tokens_per_step=256 name={name}{more}")
    assert "\nlength warm-up: sequences of 8 tokens, 16 from step 4, 32 from step 7\n" in ended.out
    assert "the sequences never reach" not in ended.out
    lengths = [8] * 3 + [16] * 3 + [32] * 2
    assert [row["sequence_length"] for row in records(tmp_path / "warmed")] == lengths
    for whole, warmed, length in zip(seen["whole"], seen["warmed"], lengths, strict=True):
        assert warmed.x.shape == (2, 4 * 32 // length, length)
        assert torch.equal(warmed.x[..., 1:], warmed.y[..., :-1])
        joined = (warmed.x.flatten(0, 1)[1:, 0] == warmed.y.flatten(0, 1)[:-1, -1]).float().mean()
        assert joined < 0.5  # one that goes on where the other ended
        if length == 32:
            assert torch.equal(warmed.x, whole.x)
    states = [checkpoint.load(last(tmp_path / name)).state["loader"] for name in seen]
    assert states[0] == states[1]


def test_a_length_warmup_may_grow_by_another_factor():
    warm = {"length_warmup_steps": 6, "model": GPTConfig(context_length=512)}
    for by, lengths in {2: [64, 64, 128, 128, 256, 256, 512], 8: [64] * 6 + [512]}.items():
        cfg = train.Config(length_warmup_from=64, length_warmup_by=by, **warm)
        assert [cfg.length_at(step) for step in range(1, 8)] == lengths


@pytest.fixture(scope="module")
def scaled(call, small, tmp_path_factory):
    """A run in fp16 whose scaler begins at 2**28: the first steps overflow, as they do for hours in a model that has
    outgrown it."""
    runs, scaler = tmp_path_factory.mktemp("scaled"), torch.amp.GradScaler
    typed = ["dtype=fp16", "steps=20", "optimizer.warmup_steps=3", "optimizer.min_lr_ratio=1"]
    typed += ["checkpoint_every=1", "keep_last=100"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.amp, "GradScaler", lambda *a, **k: scaler(*a, init_scale=2.0**28, **k))
        ended = call(train, *small, *typed, f"runs={runs}", "name=x")
    assert ended.code == 0
    return ended, runs / "x"


def test_a_step_that_the_scaler_leaves_out_is_no_nan_and_changes_no_weight(scaled):
    ended, run = scaled
    rows = records(run)
    skipped = [row["step"] for row in rows if not math.isfinite(row["grad_norm"])]
    assert skipped == list(range(1, len(skipped) + 1))  # the first ones, until the scale is right
    assert 1 < len(skipped) < 18
    assert [row["loss_scale"] for row in rows[: len(skipped) + 1]] == [2.0 ** (28 - i) for i in range(len(skipped) + 1)]
    weights = {
        step: checkpoint.load(run / f"checkpoints/step_{step:06d}").model["embedding.weight"]
        for step in (1, len(skipped), len(skipped) + 1)
    }
    assert torch.equal(weights[1], weights[len(skipped)])
    assert not torch.equal(weights[1], weights[len(skipped) + 1])
    optimizer = checkpoint.load(last(run)).optimizer()
    assert optimizer["embedding.weight.step"] == 20 - len(skipped)  # what AdamW corrects its bias by
    assert "scale 2.68435e+08 | norm nan" in ended.out


def test_the_norm_that_is_logged_is_the_gradients_and_not_the_scaled_ones(small_run, tmp_path, scaled):
    small_run("steps=1")
    (exact,) = (row["grad_norm"] for row in records(tmp_path / "x"))
    norms = [row["grad_norm"] for row in records(scaled[1]) if math.isfinite(row["grad_norm"])]
    assert exact / 2 < norms[0] < 2 * exact  # of the first weights still


# --- what is recorded and said ----------------------------------------------------------------------------------------


def test_bits_per_byte_are_the_bits_of_the_loss_over_the_bytes_of_the_text_that_was_predicted(small_run, tmp_path):
    """The bytes counted by decoding: end of text stands for none, a merged token for several."""
    ended = small_run("tokenizer=bpe tokenizer.vocab_size=300 steps=8 tokens_per_step=256")
    dataset = open_dataset(Path(re.search(r"^data: (\S+),", ended.out, re.MULTILINE)[1]))
    end = dataset.encoding.eot_token

    def size(y: torch.Tensor) -> int:
        return len(dataset.encoding.decode_bytes([token for token in y.flatten().tolist() if token != end]))

    loader = Loader(dataset.train, dataset.train_documents, batch_size=4, context_length=32, seed=1337)
    sizes = [size(loader.next().y) + size(loader.next().y) for _ in range(8)]  # two passes a step
    for record, text_bytes in zip(records(tmp_path / "x"), sizes, strict=True):
        assert record["bits_per_byte"] == record["loss"] * 256 / (math.log(2) * text_bytes)

    (evaluation,) = records(tmp_path / "x", "val_loss")
    batches = [batch.y for batch in validation_batches(dataset.val, dataset.val_documents, 4, 32, 512)]
    bits = evaluation["val_loss"] * sum(y.numel() for y in batches) / math.log(2)
    # The loss was a quotient before it was multiplied again here: that may cost the last bit or two of 53.
    assert abs(evaluation["val_bits_per_byte"] * sum(map(size, batches)) - bits) <= 2**-51 * bits


def test_only_what_there_is_is_said_at_the_end_and_what_is_never_reached_at_the_beginning(small_run, tmp_path):
    """samples.txt with sample_every=0, and a prompt of Python for a text of any kind."""
    ended = small_run("steps=2 length_warmup_steps=2 length_warmup_from=8")
    assert "samples.txt" not in ended.out
    assert "prompt=" not in ended.out
    assert " in 1 pass, " in ended.out
    assert "the learning rate never reaches optimizer.lr=0.001: steps=2 " in ended.out
    assert "the sequences never reach model.context_length=32: steps=2 " in ended.out
    ended = small_run("steps=2 optimizer.warmup_steps=2 sample_every=2 name=y")
    assert f"  samples      {tmp_path}/y/samples.txt\n" in ended.out
    assert "never reach" not in ended.out


def test_a_run_leaves_the_configuration_that_it_was_given_as_it_was(small, tmp_path):
    """It wrote its name, the size of the vocabulary and the rate into it, and callers came to rely on that. A broken
    run without a name is named after its fault."""
    cfg = composed(*small, "steps=1", "break_it=no_max", "optimizer.lr=null", f"runs={tmp_path}")
    given = copy.deepcopy(cfg)
    assert train.main(cfg) == 0
    assert cfg == given
    assert [run.name.endswith("-BROKEN-no_max") for run in tmp_path.iterdir()] == [True]


# --- samples ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_a_sample_is_written_with_weights_in_the_dtype_of_the_products(small_run, monkeypatch, dtype):
    """Each made once: a tied head stays tied, and in float32 they are the model's own."""
    runs, models, session_of = [], [], activities.session_of

    def spy(run):
        session = session_of(run)
        runs.append(run)
        models.append(session.model)
        return session

    monkeypatch.setattr(activities, "session_of", spy)
    small_run(f"steps=2 sample_every=1 sample_tokens=3 dtype={dtype} compile=false ema_decay=0.5")
    wanted = {"float32": torch.float32, "bf16": torch.bfloat16}[dtype]
    for run, model in zip(runs, models, strict=True):
        assert {p.dtype for p in model.parameters()} == {wanted}
        assert (model.head.weight is model.embedding.weight) == run.cfg.model.tie_head
        own = model.norm.weight.data_ptr() == run.averaged.norm.weight.data_ptr()
        assert own == (dtype == "float32")
        assert run.averaged.training


def test_a_sample_by_what_is_kept_from_the_last_one_is_that_of_todays_weights(small_run, monkeypatch):
    texts, write = [], activities.write_sample

    def twice(run):
        """By what is kept, as where steps are recorded, and by what is made anew."""
        kept, run.train_step.way = run.session, "recorded"
        text, run.session, kept = write(run), None, kept or run.session
        texts.append((text, write(run)))
        run.session, run.train_step.way = kept, "eager"
        return text

    monkeypatch.setattr(activities, "write_sample", twice)
    rate = "optimizer.lr=0.1 optimizer.warmup_steps=0"
    small_run(f"steps=3 sample_every=1 sample_tokens=20 dtype=bf16 compile=false {rate}")
    assert len(texts) == 3
    assert len(set(texts)) > 1
    assert all(kept == anew for kept, anew in texts)


# --- broken on purpose ----------------------------------------------------------------------------------------------

# The largest score is about 30 before the first step, grows at this rate, and passes 88.7 at about the tenth.
OVERFLOW = " ".join(tiled(16)) + " break_it=no_max break_it.score_gain=500 optimizer.lr=1e-2 steps=30 sample_tokens=5"
OVERFLOW_NAME = "x-BROKEN-no_max+gain_500"


def test_nan_stops_the_run_before_the_optimizer_step(small_run, tmp_path):
    """The weights may turn NaN in the very step that is sampled: the loss was finite, what it left behind is not. The
    sampler's error used to end the run, without a stamp and without what to try."""
    ended = small_run(f"{OVERFLOW} sample_every=1 checkpoint_every=1", code=1)
    run = tmp_path / OVERFLOW_NAME
    spoilt = records(run)[-1]["step"]  # the step that met NaN is in the record too
    assert 2 < spoilt < 31
    assert all(map(math.isfinite, losses(run)[:-1]))
    assert math.isnan(losses(run)[-1])
    good = checkpoint.load(last(run))
    assert good.step == spoilt - 1
    assert all(tensor.isfinite().all() for tensor in good.model.values())
    assert f"step {spoilt}: loss nan" in ended.out
    assert f"last checkpoint {good.path.name}; try break_it=none or stop_on_nan=false" in ended.out


def test_with_stop_on_nan_false_a_broken_run_goes_on_to_its_end_and_still_writes_its_samples(small_run, tmp_path):
    """multinomial raises RuntimeError for NaN, so the run died at its first sample."""
    small_run(f"{OVERFLOW} sample_every=10 checkpoint_every=30 stop_on_nan=false")
    found = losses(tmp_path / OVERFLOW_NAME)
    assert len(found) == 30
    assert math.isnan(found[-1])
    assert last(tmp_path / OVERFLOW_NAME).name == "step_000030"


def test_a_run_that_ended_before_its_first_checkpoint_says_what_to_try_and_does_not_block_its_name(small_run, tmp_path):
    """A rate near the largest float32: the first step is finite, what its weights compute is not. And then name=x said
    to go on by resume=auto, and resume=auto said that there is no checkpoint."""
    ended = small_run("steps=2 eval_every=2 optimizer.lr=1e38 optimizer.warmup_steps=0", code=1)
    for tried in ("lower optimizer.lr (it is 1e+38)", "longer optimizer.warmup_steps", "attention=naive"):
        assert tried in ended.out
    assert "no checkpoint was saved" in ended.out.splitlines()[-1]
    dead = (tmp_path / "x/metrics.jsonl").read_bytes()
    ended = small_run("steps=2 eval_every=2")
    assert f"its files are now in {tmp_path}/x-unsaved-1\n" in ended.out
    assert (tmp_path / "x-unsaved-1/metrics.jsonl").read_bytes() == dead
    assert "no checkpoint was saved" not in ended.out


def test_only_what_a_run_has_made_is_moved_out_of_the_way(tmp_path):
    def room(name: str) -> Path | None:
        with ExitStack() as held:
            return make_room(tmp_path / name, held)

    assert room("none") is None
    (tmp_path / "x/checkpoints/.tmp-step_000010-1").mkdir(parents=True)  # killed in its first save
    (tmp_path / "x/.tmp-loss.png").touch()
    (tmp_path / "x-unsaved-1").mkdir()
    with lock(tmp_path / "x"), pytest.raises(ValueError, match="by another process"):
        room("x")
    assert (tmp_path / "x/.tmp-loss.png").exists(), "not moved away under the process that trains there"
    assert room("x") == tmp_path / "x-unsaved-2"
    assert room("x") is None
    (tmp_path / "x/thesis.tex").touch()
    with pytest.raises(ValueError, match=r"thesis\.tex.*name="):
        room("x")
    (tmp_path / "x-unsaved-2/checkpoints/step_000010").mkdir()
    with pytest.raises(ValueError, match=r"resume=auto.*name="):
        room("x-unsaved-2")


def test_a_broken_run_says_so_everywhere(call, small_run, tmp_path):
    every = "eval_every=2 sample_every=2 sample_tokens=5 steps=4 name=mine"
    ended = small_run(f"{' '.join(tiled(8))} break_it=no_rescale {every}")
    run, stamp = tmp_path / "mine-BROKEN-no_rescale", "BROKEN[no_rescale] "
    assert [folder.name for folder in tmp_path.iterdir()] == [run.name]
    assert f"{stamp}attention is broken on purpose" in ended.out
    lines = [line for line in ended.out.splitlines() if re.search(r"(step|sample at step|eval step) +\d|done:", line)]
    assert len(lines) == 4 + 2 + 2 + 1 + 2  # steps, evaluations, samples, the end, and of the first look its two
    assert all(line.removeprefix("===== ").startswith(stamp) for line in lines)
    assert (run / "samples.txt").read_text().count(f"===== {stamp}sample at step") == 2
    assert all(record["broken"] == "no_rescale" for record in read_metrics(run / "metrics.jsonl"))
    assert checkpoint.load(run / "checkpoints/step_000004").state["broken"] == "no_rescale"
    # A whole model is not taken from it. break_it=none has to say that nothing is broken, or it would change nothing.
    ended = call(train, f"runs={tmp_path}", "resume=auto", "steps=8", "break_it=none")
    assert ended.code == 2
    assert "break_it: no_rescale, this run has none" in ended.err


def test_a_name_that_has_the_faults_word_in_it_is_stamped_all_the_same():
    """name=b-local_mask with break_it=local_mask was not."""
    assert metrics.broken_name("b-local_mask", "local_mask") == "b-local_mask-BROKEN-local_mask"
    assert metrics.broken_name("b-BROKEN-local_mask", "local_mask") == "b-BROKEN-local_mask"
    assert metrics.broken_name("b", "") == "b"


# --- configuration --------------------------------------------------------------------------------------------------

CHOICES = [f"{file.parent.name}={file.stem}" for file in sorted((ROOT / "conf").glob("*/*.yaml"))]


@pytest.mark.parametrize("option", CHOICES)
def test_every_option_of_every_group_composes_and_makes_whole_steps(option):
    """model=gpt2 alone was refused: 4,096 tokens a step are no multiple of 16 * 1024."""
    cfg = composed(option)
    assert type(cfg) is train.Config
    assert config.from_dict(train.Config, asdict(cfg)) == cfg  # as a checkpoint keeps it
    per_pass = cfg.batch_size * cfg.model.context_length
    assert (cfg.tokens_per_step or per_pass) % per_pass == 0


def test_the_smoke_recipe_runs_and_learns(call, text, tmp_path):
    data = ["data=text", f"data.path={text}", f"data.cache={tmp_path}/cache", "device=cpu"]
    assert call(train, "experiment=smoke", *data, f"runs={tmp_path}", "name=x").code == 0
    assert losses(tmp_path / "x")[-1] < losses(tmp_path / "x")[0]
    assert last(tmp_path / "x").name == "step_000020"


# --- attention's options, all the way through ------------------------------------------------------------------------

ATTENTION = [
    "attention.documents=true attention.window=9 attention.alibi=true attention.dropout_p=0.1",
    "attention.windows=[5,null] attention.softcap=0.05 attention.softmax_scale=3 attention.order=keys_outside",
    "attention.block_mask=[x...,.x..,..x.,x..x] attention.block_mask_size=16",
]


@pytest.mark.parametrize("options", ATTENTION)
def test_attentions_options_reach_every_layer_in_training_and_validation(
    call, small_run, tmp_path, monkeypatch, options
):
    """What the layers hand to attention(); what that makes of it is tests/test_attention.py's and test_mask.py's.
    Documents are numbered only for an attention that looks at them: numbering took half of the loader's time."""
    seen, handed = [], []

    def spy(q, k, v, given, **options):
        seen.append((given, options["documents"]))
        return attention(q, k, v, given, **options)

    class Spy(RecomputingGPT):
        def forward(self, idx, targets=None, documents=None, **rest):
            handed.append(documents is not None)
            return super().forward(idx, targets, documents, **rest)

    size = "batch_size=8 tokens_per_step=null model.context_length=64"
    with monkeypatch.context() as patch:
        patch.setattr("model.gpt.attention", spy)
        patch.setattr("training.run.RecomputingGPT", Spy)
        small_run(f"attention=tiled steps=1 {size} {options}")
    cfg = config.from_dict(train.Config, checkpoint.load_state(last(tmp_path / "x"))["config"])
    assert cfg.attention != AttentionConfig("tiled")
    assert [given for given, _ in seen] == [cfg.attention.layer(i) for i in range(2)] * (len(seen) // 2)
    dataset = open_data(cfg.data, cfg.tokenizer)
    loader = Loader(dataset.train, dataset.train_documents, batch_size=8, context_length=64, seed=cfg.seed)
    batches = validation_batches(dataset.val, dataset.val_documents, 8, 64, cfg.eval_tokens)
    for number, batch in enumerate([loader.next(), *batches]):
        for _, documents in seen[2 * number : 2 * number + 2]:
            assert torch.equal(documents, batch.documents) if cfg.attention.documents else documents is None
    assert len(seen) == 2 * (number + 1)
    assert handed == [cfg.attention.documents] * (number + 1)
    for more in (["max_new_tokens=80", "device=cpu"], ["max_new_tokens=5", "impl=naive"]):  # 80 is past the context
        if "keys_outside" not in options or "impl=naive" not in more:  # which has no such loops
            assert call(sample, "run=x", f"runs={tmp_path}", *more).code == 0


# --- how a run ends that cannot go on ---------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["to_yaml", "run:"])
def test_what_fails_before_the_first_step_lets_go_of_the_folder_and_of_the_metrics(small, tmp_path, monkeypatch, where):
    """The lock was held, and wandb and the progress bar left open, by a run that could not write its config.yaml or
    print its first line."""
    closed = []
    monkeypatch.setattr(Metrics, "close", lambda self, code: closed.append(code))
    say = Metrics.say
    monkeypatch.setattr(Metrics, "say", lambda self, text: full() if text.startswith(where) else say(self, text))
    if where == "to_yaml":
        monkeypatch.setattr(config, "to_yaml", full)
    with pytest.raises(OSError, match="No space left") as error:  # whose traceback keeps what main() had
        train.main(composed(*small, "steps=1", f"runs={tmp_path}", "name=x"))
    assert error
    assert closed == [1]
    lock(tmp_path / "x").close()


def no_memory(*_, **__):
    return torch.empty(2**60)


# What a checkpoint needs, what fails instead, and what is told.
@pytest.mark.parametrize(
    ("place", "fails", "told"),
    [
        ("training.activities.write_checkpoint", full, "No space left"),  # in the run's own thread
        ("training.checkpoint.save", full, "No space left"),
        ("training.checkpoint.save", no_memory, "while a checkpoint was written"),
        ("training.writer.on_host", no_memory, "while a checkpoint was written"),
    ],
)
def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_is_what_is_told(
    small_run, tmp_path, monkeypatch, place, fails, told
):
    """The picture that a run draws at its end failed too, and its bare error took the place of the first. And for
    memory that a checkpoint lacks, the advice was a smaller batch_size."""
    save = Writer.save

    def save_and_wait(writer, *args, **kwargs):
        path = save(writer, *args, **kwargs)
        futures.wait([writer.written])
        return path

    monkeypatch.setattr(Writer, "save", save_and_wait)
    monkeypatch.setattr(Metrics, "picture", lambda *_, **__: Path("/no/picture").read_text())
    monkeypatch.setattr(place, fails)
    ended = small_run("steps=9 checkpoint_every=3", code=2)
    assert told in ended.err.splitlines()[-1]
    assert "batch_size" not in ended.err
    assert read_metrics(tmp_path / "x/metrics.jsonl")[-1]["step"] == 3


@pytest.mark.parametrize("error", [OSError("disk full"), MemoryError("no memory")], ids=str)
def test_a_run_that_failed_closes_its_metrics_whatever_became_of_its_last_checkpoint(small_run, monkeypatch, error):
    """The last checkpoint fails in its thread after another error has ended the run."""
    codes, close = [], Metrics.close

    def fails(folder, step, **kwargs):
        time.sleep(0.1)
        raise error

    monkeypatch.setattr(checkpoint, "save", fails)
    monkeypatch.setattr(Writer, "raise_error", lambda writer: 1 / 0)
    monkeypatch.setattr(Metrics, "close", lambda metrics, code: codes.append(code) or close(metrics, code))
    with pytest.raises(Exception, match=r"division by zero|no memory"):
        small_run("steps=3 checkpoint_every=1")
    assert codes == [1]


def test_a_nan_is_told_though_the_last_checkpoint_could_not_be_written(small_run, tmp_path, monkeypatch):
    save = checkpoint.save

    def fails(folder, step, **kwargs):
        if step == 2:
            time.sleep(0.2)  # so that the run hears of it at its stop
            raise OSError("checkpoint of step 2 could not be written")
        return save(folder, step, **kwargs)

    monkeypatch.setattr(checkpoint, "save", fails)
    update, made = training.step.TrainStep.update, count(1)

    def third_is_bad(step, batches):
        if next(made) == 3:
            next(step.model.parameters()).data.fill_(math.nan)
        update(step, batches)

    monkeypatch.setattr(training.step.TrainStep, "update", third_is_bad)
    ended = small_run("steps=9 checkpoint_every=1", code=1)
    for told in ("checkpoint of step 2 could", "step 3: loss nan", f"{tmp_path / 'x/checkpoints/step_000001'}"):
        assert told in ended.out


@pytest.mark.parametrize(("end", "code"), [("signal", 143), ("nan", 1)])
def test_a_checkpoint_is_complete_when_the_run_names_it(small_run, monkeypatch, end, code):
    save, say, named = checkpoint.save, Metrics.say, []

    def slow(folder, step, **kwargs):
        if end == "signal" and step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        return save(folder, step, **kwargs)

    def spy(metrics, text):
        named.extend(Path(path).is_dir() for path in re.findall(r"\S*step_\d{6}", text))
        say(metrics, text)

    monkeypatch.setattr(checkpoint, "save", slow)
    monkeypatch.setattr(Metrics, "say", spy)
    bad = "optimizer.lr=1e30 optimizer.warmup_steps=1" if end == "nan" else ""
    small_run(f"steps=9 checkpoint_every=1 {bad}", code)
    assert named
    assert all(named)


@pytest.mark.parametrize("writes", ["log_every=1", "sample_every=3", "eval_every=3", "checkpoint_every=3"])
def test_a_run_whose_folder_is_deleted_ends_with_one_line_and_makes_no_other(small_run, tmp_path, monkeypatch, writes):
    """It went on to a bare [Errno 2], after a checkpoint in a new folder of the same name."""
    send = train.enqueue
    monkeypatch.setattr(train, "enqueue", lambda run: (run.step == 2 and shutil.rmtree(run.folder), send(run)))
    ended = small_run(f"steps=4 log_every=100 sample_every=100 eval_every=100 checkpoint_every=100 {writes}", code=2)
    assert ended.err.count("\n") == 1
    assert f"{tmp_path / 'x'} was deleted or moved" in ended.err
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_its_metrics_ends_with_one_line_and_goes_on_from_its_checkpoint(small_run, tmp_path, monkeypatch):
    """It said that the checkpoints were gone too."""
    send = train.enqueue

    def send_and_delete(run):
        if run.step == 3:
            run.writer.wait()  # for the checkpoint, which a thread writes
            (run.folder / "metrics.jsonl").unlink()
        send(run)

    with monkeypatch.context() as patch:
        patch.setattr(train, "enqueue", send_and_delete)
        ended = small_run("steps=4 checkpoint_every=2", code=2)
    assert f"{tmp_path / 'x/metrics.jsonl'} was deleted or moved" in ended.err.splitlines()[-1]
    assert "resumed from" in small_run("steps=4 resume=auto").out


@pytest.mark.parametrize(
    ("keys", "way_out"),
    [
        ("batch_size=4", "batch_size=2 tokens_per_step=256"),
        ("batch_size=1", "model.activation_checkpointing=selective"),
        ("batch_size=1 attention=naive", "model.activation_checkpointing=true"),
        ("batch_size=1 model.activation_checkpointing=selective", "model.chunk=32"),
        # caught where the batches' memory is made
        ("batch_size=1000000000000 tokens_per_step=null", "batch_size=500000000000"),
        ("batch_size=1000000000000000000 tokens_per_step=null", "batch_size=500000000000000000 "),
    ],
)
def test_out_of_memory_is_one_line_with_what_fits_and_learns_the_same(small_run, monkeypatch, keys, way_out):
    """On a CPU it was a traceback: torch's error there is a RuntimeError like any other."""
    monkeypatch.setattr(train, "enqueue", no_memory)
    ended = small_run(f"tokens_per_step=256 {keys}", code=2)
    assert ended.err.splitlines()[-1].startswith("train: out of memory with " + keys.split()[0])
    assert f"use {way_out}" in ended.err


def test_only_memory_that_is_missing_is_called_out_of_memory():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"))  # pinned memory
    assert not is_out_of_memory(RuntimeError("a bug"))


# --- real processes ---------------------------------------------------------------------------------------------------

WITHOUT = """
import sys
sys.modules |= {"triton": None, "torch._dynamo": None}
import sample, train
from training import config
runs = sys.argv[1]
config.run(train.main, train.Config, "config")
sys.argv += ["resume=auto", "steps=5"]
config.run(train.main, train.Config, "config")
sys.argv[1:] = ["max_new_tokens=3", "device=cpu", runs]
config.run(sample.main, sample.Config, "sample")
"""


@pytest.mark.slow
def test_a_run_on_a_cpu_trains_resumes_and_samples_without_triton_and_without_torch_dynamo(start, small, tmp_path):
    """Triton is not made for Windows and Apple's machines; importing torch._dynamo takes a second or two."""
    process = start("-c", WITHOUT, f"runs={tmp_path}", *small, "optimizer=muon", "steps=3", "name=x")
    _, err = process.communicate(timeout=HANGS)
    assert process.returncode == 0, err
    assert f"{tmp_path}/x/checkpoints/step_000005" in err  # sample.py names what it speaks from


def test_nothing_that_only_some_systems_have_is_imported_before_it_is_needed():
    """At the top of a file such an import ends train.py on Windows or without a GPU's packages, whatever it was for."""
    files = [ROOT / "train.py", ROOT / "sample.py"]
    for file in [*files, *(p for folder in ("model", "training", "data") for p in (ROOT / folder).glob("*.py"))]:
        top = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {name.name for node in top if isinstance(node, ast.Import) for name in node.names}
        names |= {node.module for node in top if isinstance(node, ast.ImportFrom)}
        assert not {name.split(".")[0] for name in names} & {"triton", "resource", "fcntl"}, file


@pytest.mark.slow
def test_a_run_whose_reader_has_left_goes_on_to_its_end(start, small, tmp_path):
    """`python train.py | head` ended a training of hours with exit code 141 and no checkpoint."""
    process = start("train.py", *small, "steps=30", "sample_every=10", "sample_tokens=5", f"runs={tmp_path}", "name=x")
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(HANGS) == 0, err
    assert len(losses(tmp_path / "x")) == 30
    assert last(tmp_path / "x").name == "step_000030"


@pytest.mark.slow
@pytest.mark.parametrize(("script", "typed"), [("train.py", "--lr=1"), ("sample.py", "run=nobody")])
def test_the_command_line_itself_answers_a_mistake_with_one_line_and_no_traceback(start, script, typed):
    process = start(script, typed)
    out, err = process.communicate(timeout=HANGS)
    assert (process.returncode, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"{script.removesuffix('.py')}: {typed}: ")
