"""look: the weights that every head of a run has on a text, as a page. replay: a kept fault again."""

import base64
import json
import re

import pytest
import torch

import breakit
import train
from lab import look
from model.attention import AttentionConfig
from model.break_it import FAILURES, UNBROKEN, BreakIt
from model.gpt import GPT, GPTConfig
from model.mask import spans_of
from tests.browser import MISSING, browser
from tests.reference import error, largest
from training.probe import record

EPS = torch.finfo(torch.float32).eps


def call_of(broken: BreakIt = UNBROKEN, T: int = 40, **options):
    """The last layer's call of a small untrained model with large scores."""
    torch.manual_seed(1)
    config = GPTConfig(n_layer=1, n_head=4, n_kv_head=2, n_embd=32, context_length=64, vocab_size=20, position="rope")
    model = GPT(config, AttentionConfig("tiled", 8, 8, **options), broken).eval()
    torch.nn.init.normal_(model.blocks[0].attention.qkv.weight, std=0.5)
    return record(model, torch.randint(20, (1, T)))[0]


def test_the_weights_are_the_softmax():
    call = call_of()
    s = (call.q @ call.k.repeat_interleave(2, 1).mT)[0].double() * call.q.shape[-1] ** -0.5
    right = s.masked_fill(torch.ones(s.shape[-2:]).triu(1).bool(), -torch.inf).softmax(-1)
    # A score's rounding is relative to the score, and grows a weight by so much.
    assert error(look.weights_of(call), right) <= 2 * EPS * (1 + largest(s))
    call.spans = spans_of(torch.arange(s.shape[-1])[None] // 5)
    assert (look.weights_of(call)[:, 5:, :5] == 0).all()


def test_the_weights_of_a_broken_call_are_what_it_multiplies_the_values_by():
    call = call_of(BreakIt("no_rescale_output"))
    p, v = look.weights_of(call), call.v[0].repeat_interleave(2, 0)
    assert error(p @ v, call.o[0]) <= 2 * EPS * largest(p @ v.abs())  # acc and l of each: four times half an EPS
    assert (p.sum(-1) > 1.01).any()


def test_a_picture_is_the_weights_in_bytes_and_marks_what_is_not_finite():
    p = torch.rand(9, 9).tril()
    p[5, 2] = torch.nan
    kept = look.of_picture(p)
    levels = torch.frombuffer(bytearray(base64.b64decode(kept["map"])), dtype=torch.uint8).double()
    rows, columns = torch.tril_indices(9, 9)
    finite = p[rows, columns].isfinite()
    assert (levels[~finite] == look.LOST).all()
    found = kept["scale"] * (levels / look.STEPS) ** 2
    half = (look.STEPS + 0.25) / look.STEPS**2  # of a step, where steps are largest: at 1
    assert error(found[finite], p[rows, columns][finite]) <= half


@pytest.mark.parametrize("pattern", ["previous", "itself", "first", "induction", "same"])
def test_a_head_with_a_known_pattern_gets_its_name(pattern, monkeypatch):
    tokens = torch.arange(10).repeat(4)
    keys = look.keys_of(tokens)[pattern]
    assert int(keys.any(-1).sum()) >= look.FEWEST
    p = torch.where(keys.any(-1, keepdim=True), keys.float() / keys.sum(-1, keepdim=True).clamp(min=1), 0.025)
    monkeypatch.setattr(look, "weights_of", lambda call: p[None])
    (head,) = look.of_layer(call_of(), tokens)["heads"]
    assert head["pattern"] == pattern
    assert head["shares"][pattern] == pytest.approx(1.0)


@pytest.fixture(scope="module")
def runs(call, small, tmp_path_factory):
    """A folder with two runs: one, and a broken one with a fault."""
    folder = tmp_path_factory.mktemp("runs")
    assert call(train, *small, "steps=3", f"runs={folder}", "name=whole", "attention.documents=true").code == 0
    broken = ["break_it=no_rescale", "attention.block_m=8", "attention.block_n=8"]
    assert call(train, *small, *broken, "steps=3", f"runs={folder}", "name=odd").code == 0
    loud = ["break_it=no_max", "break_it.score_gain=1e6", "probe.every=1"]
    call(train, *small, *loud, "steps=3", f"runs={folder}", "name=loud")
    return folder


def test_what_a_mystery_has_taken_out_only_reveal_tells(call, small, runs, tmp_path):
    typed = "break_it=mystery", "break_it.seed=7", "steps=1", f"runs={tmp_path}", "name=m"
    said = call(train, *small, *typed)
    files = [path.read_text() for path in tmp_path.rglob("*") if path.suffix in (".yaml", ".txt", ".json", ".jsonl")]
    assert not [name for name in FAILURES for text in (*files, said.out, said.err) if name in text]
    assert call(breakit, "reveal=m-BROKEN-mystery", f"runs={tmp_path}").out.startswith("no_rescale_output: without")
    assert "nothing is taken out" in call(breakit, "reveal=whole", f"runs={runs}").err


def data_of(path) -> dict:
    (data,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(data)


def test_the_page_of_a_run_has_its_text_and_every_head(call, runs, tmp_path):
    out = tmp_path / "look.html"
    assert call(breakit, "look=true", "run=whole", f"runs={runs}", f"out={out}", "prompt=f(x): a").code == 0
    page = data_of(out)
    assert ("".join(page["tokens"][1:]), page["broken"]) == ("f(x): a", "")
    assert [len(layer["heads"]) for layer in page["layers"]] == [2, 2]
    assert "http://" not in out.read_text()
    refused = call(breakit, "look=true", "run=whole", f"runs={runs}", "prompt=" + 40 * "x")
    assert (refused.code, "context_length=32" in refused.err) == (1, True)
    assert "prompt=" in call(breakit, "look=true", "run=whole", f"runs={runs}").err
    assert all("look=" in call(breakit, *look, "prompt=x", "failure=no_scale").err for look in ((), ("look=true",)))


def test_the_page_of_a_broken_run_says_so(call, runs, tmp_path):
    typed = "run=odd-BROKEN-no_rescale", f"runs={runs}", f"out={tmp_path}/look.html", "prompt=a"
    said = call(breakit, "look=true", *typed)
    assert said.out.startswith("BROKEN[no_rescale] ")
    assert data_of(tmp_path / "look.html")["broken"] == "no_rescale"


def test_a_kept_fault_is_replayed_to_its_tile_and_another_checkpoint_is_refused(call, runs, monkeypatch):
    (fault,), dropping = runs.glob("loud*/faults/*"), []
    record = look.record
    monkeypatch.setattr(look, "record", lambda net, *given: dropping.append(net.training) or record(net, *given))
    said = call(breakit, f"replay='{fault}'")
    assert said.code == 0
    assert said.out.startswith("BROKEN[no_max")
    assert dropping == [True]
    assert re.search(r"first: layer 0, head \d, .* not finite", said.out)
    (checkpoint,) = runs.glob("whole/checkpoints/*")
    refused = call(breakit, f"replay={checkpoint}")
    assert (refused.code, "holds no batch" in refused.err) == (1, True)


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_the_page_draws_in_a_browser_and_is_no_wider_than_a_phone(call, runs, tmp_path):
    call(breakit, "look=true", "run=whole", f"runs={runs}", f"out={tmp_path}/look.html", "prompt=f(x): a")
    with browser() as page:
        for width, height in ((1280, 800), (390, 844)):
            page.window(width, height)
            page.open((tmp_path / "look.html").as_uri())
            assert page.run("return document.documentElement.scrollWidth") <= width
            assert page.run('return document.querySelectorAll("#heads button").length') == 4
            page.run('document.querySelectorAll("#heads button")[3].click()')
            assert "Layer 1, head 1" in page.run('return document.getElementById("name").textContent')
        assert page.log("browser") == []
