"""parallel.shard=true: the run is the same, and each process has its part of the weights."""

import pytest
import torch

from model.attention import AttentionConfig
from model.gpt import GPT, GPTConfig
from parallel.processes import Ranks, bytes_sent
from parallel.shard import copy_of, gathered
from tests.test_parallel import WIDE, counted, losses, run_all, tensors
from training.memory import GIB, bytes_of

# The windows of an evaluation are three batches, so one of two ranks has none at the end.
LONG = ["steps=20", "eval_every=10", "checkpoint_every=10", "sample_every=20", "eval_tokens=1536", "ema_decay=0.9"]
UNCLIPPED = [*LONG, "optimizer.grad_clip=0"]
WIDE = [*LONG, *WIDE]
SHARD = "parallel.shard=true"
RESUMED = [*LONG, "resume=FROM/wide_shard4/checkpoints/step_000010"]
# name: (processes, whether in float64, arguments), as in tests/test_parallel.py
LAYOUTS = {
    "one": (1, False, UNCLIPPED),
    "shard2": (2, False, [*UNCLIPPED, SHARD]),
    "wide_one": (1, True, WIDE),
    "wide_shard4": (4, True, [*WIDE, SHARD, "model.activation_checkpointing=selective"]),
    "wide_both": (4, True, [*WIDE, SHARD, "parallel.context=2", "model.activation_checkpointing=true"]),
    "wide_shard4_on_1": (1, True, [*RESUMED, "parallel.shard=false"]),
    "wide_shard4_on_2": (2, True, RESUMED),
    "wide_shard4_again": (4, True, RESUMED),
}
QUICK = ["one", "shard2"]


@pytest.fixture(scope="module")
def quick(small, tmp_path_factory):
    return run_all(QUICK, small, tmp_path_factory.mktemp("shard"), LAYOUTS)


@pytest.fixture(scope="module")
def wide(small, tmp_path_factory):
    names = (name for name in LAYOUTS if name not in QUICK)
    return run_all(names, small, tmp_path_factory.mktemp("wide_shard"), LAYOUTS)


def test_two_processes_that_share_the_weights_are_one_process_bit_for_bit(quick):
    """A sum of two gradients has one order. Without clipping nothing else is summed: the norm, in two parts, is."""
    for key in ("loss", "val_loss"):
        assert losses(quick / "one", key) == losses(quick / "shard2", key)
    one, two = tensors(quick / "one"), tensors(quick / "shard2")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    torch.testing.assert_close(
        [*losses(quick / "shard2", "grad_norm").values()],
        [*losses(quick / "one", "grad_norm").values()],
        rtol=2**-21, atol=0,
    )  # fmt: skip


def test_samples_are_those_of_one_process(quick):
    assert (quick / "shard2" / "samples.txt").read_bytes() == (quick / "one" / "samples.txt").read_bytes() != b""


def test_a_process_has_its_part_of_the_weights_and_of_the_optimizers_state(quick):
    whole = counted(quick / "one.out.0")["held"]
    for rank in range(2):
        assert 0.5 * whole <= counted(quick / f"shard2.out.{rank}")["held"] < 0.51 * whole  # and the counts of steps


def test_a_step_sends_the_weights_twice_and_the_gradients_once(quick):
    with torch.device("meta"):
        model = GPT(GPTConfig(2, 4, n_embd=32, context_length=128, vocab_size=257, vocab_multiple=64), naive())
    sent, _ = bytes_sent(Ranks(size=2, shards=2), model, 1024, 4, 1)
    for rank in range(2):
        for count in counted(quick / f"shard2.out.{rank}")["sent"]:
            assert (count["allgather_base"] + count["reduce_scatter_base"]) // 2 == sent
            assert count["allgather_base"] == 2 * count["reduce_scatter_base"]
            assert count["allreduce"] == 8  # loss and norm


def test_the_weights_of_one_block_are_together_at_a_time(quick):
    """Two blocks and the rest of the model: each has a message of its own, not the model one for all."""
    calls = counted(quick / "shard2.out.0")["calls"]
    assert calls == {"allgather_base": 2 * 3, "reduce_scatter_base": 3, "allreduce": 2}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name.startswith("wide_") and name != "wide_one"])
def test_every_layout_makes_the_same_run(name, wide):
    """With dropout, windows, documents, pieces, an average and clipping. Within 512 units in the last place of the
    largest number of a tensor, in float64. A loss is recorded in float32, from a sum of shares. N processes round N
    times (once in all for their shares, and N - 1 sums), one process twice, for its two passes."""
    right, found = losses(wide / "wide_one"), losses(wide / name)
    assert [*found] == [*range(11 if "FROM" in str(LAYOUTS[name]) else 1, 21)]
    roundings = LAYOUTS[name][0] + 2
    torch.testing.assert_close([*found.values()], [right[step] for step in found], rtol=roundings * 2**-24, atol=0)
    right, found = tensors(wide / "wide_one"), tensors(wide / name)
    assert right.keys() == found.keys()
    for weight, x in right.items():
        assert (found[weight].double() - x.double()).abs().max() <= 512 * 2**-52 * x.abs().max(), weight


@pytest.mark.slow
def test_a_resumed_run_is_the_same_run_bit_for_bit(wide):
    right, found = tensors(wide / "wide_shard4"), tensors(wide / "wide_shard4_again")
    assert all(torch.equal(found[name], right[name]) for name in right)
    for rank in range(4):
        assert counted(wide / f"wide_shard4_again.out.{rank}")["held"] < 0.26 * counted(wide / "wide_one.out.0")["held"]


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_parts_are_put_together_on_the_first_rank(rows, monkeypatch):
    """Of five rows, four ranks have 2, 2, 1 and none."""
    whole, sent, has = torch.randn(rows, 3), {}, {}
    parts = [*whole.chunk(4), *[whole[:0]] * 4][:4]
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: has["rank"])
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 4)
    monkeypatch.setattr(torch.distributed, "send", lambda x, to, group: sent.update({(has["rank"], to): x}))
    monkeypatch.setattr(torch.distributed, "recv", lambda x, rank, group: x.copy_(sent.pop((rank, 0))))
    for rank in (3, 2, 1, 0):
        has["rank"] = rank
        found = gathered(parts[rank], whole.shape, "threads")
    assert torch.equal(found, whole)
    assert not sent


def naive() -> AttentionConfig:
    return AttentionConfig("naive")


@pytest.mark.parametrize("tied", [True, False])
def test_a_copy_has_the_weights_and_draws_no_random_numbers(tied):
    torch.manual_seed(1)
    model = GPT(GPTConfig(1, 2, n_embd=16, context_length=8, vocab_size=11, tie_head=tied), naive())
    before = torch.get_rng_state()
    copy = copy_of(model, torch.float64)
    assert torch.equal(before, torch.get_rng_state())
    assert (copy.head.weight is copy.embedding.weight) == tied
    idx = torch.arange(8)[None]
    assert torch.equal(copy(idx), model.double()(idx))
    assert {p.data_ptr() for p in copy.parameters()}.isdisjoint(p.data_ptr() for p in model.parameters())


def test_shared_weights_take_a_part_of_the_memory():
    """gpt2-xl: 1.56 G parameters of 16 bytes, and what is together for a while."""
    xl = GPTConfig(48, 25, n_embd=1600, context_length=1024, vocab_size=50304, activation_checkpointing="true")
    one, two, eight = (bytes_of(xl, AttentionConfig("sdpa"), 1, "bf16", False, shards=n) / GIB for n in (1, 2, 8))
    assert 10 < one - two < 12
    assert 8 < two - eight < 9
