"""A model of transformers on our attention: it computes what it computes on its own."""

import re

import pytest
import torch

from model.attention import AttentionConfig
from model.families import offer_to_transformers
from tests.test_exchange import LLAMA, V, bpe, theirs, transformers  # noqa: F401 (fixtures)
from tests.test_readme import PAGES

GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 48, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
GEMMA = LLAMA | {"sliding_window": 7, "attn_logit_softcapping": 0.5, "head_dim": 8, "query_pre_attn_scalar": 3}
MODELS = {
    "gpt2": GPT2 | {"attn_pdrop": 0.0, "scale_attn_weights": False},
    "llama": LLAMA,  # four heads on two
    "mistral": LLAMA | {"sliding_window": 7},
    "gemma2": GEMMA,  # softcap; a window in every other layer
}
IDX = torch.randint(V, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def made(transformers):  # noqa: F811
    def made(name, attention="eager", **changes):
        """A model with random weights, in training mode, on `attention`."""
        settings = MODELS[name] | {"vocab_size": V, "initializer_range": 0.3} | changes
        config = transformers.AutoConfig.for_model(name, **settings)
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()

    for impl in ("naive", "tiled"):
        offer_to_transformers(AttentionConfig(impl, block_m=16, block_n=16), impl)
    return made


def loss_and_gradients(model, **options) -> list[torch.Tensor]:
    loss = model(IDX, labels=IDX, **options).loss
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters())]


@pytest.mark.parametrize("impl", ["naive", "tiled"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_the_same(made, name, impl):
    for options in ({}, {"use_cache": False}, {"attention_mask": torch.ones_like(IDX)}):
        expected, found = (loss_and_gradients(made(name, attention), **options) for attention in ("eager", impl))
        for x, y in zip(expected, found, strict=True):
            assert (x - y).abs().max() <= 1e-5 * max(1, x.abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_text_is_the_same(made, name):
    """With transformers' cache: one row over many keys, and for Mistral past its window."""
    expected, found = (
        made(name, attention).eval().generate(IDX[:, :5], max_new_tokens=20, do_sample=False, pad_token_id=0)
        for attention in ("eager", "tiled")
    )
    assert torch.equal(expected, found)
    assert len(found.unique()) > 5


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_several_tokens_after_a_cache_see_all_before_them(made, name):
    expected = made(name)(IDX).logits
    model = made(name, "tiled")
    first = model(IDX[:, :10], use_cache=True)
    found = model(IDX[:, 10:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(found, expected[:, 10:], rtol=1e-4, atol=1e-4)


def test_dropout_is_drawn_from_torchs_seed(made):
    model = made("gpt2", "tiled", attn_pdrop=0.5)
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(model(IDX, labels=IDX).loss.item())
    whole = made("gpt2")
    assert losses[0] == losses[1] != losses[2]
    with torch.no_grad():
        assert torch.allclose(model.eval()(IDX).logits, whole.eval()(IDX).logits, rtol=1e-4, atol=1e-4)


REFUSED = {
    "padding": {"attention_mask": torch.cat((torch.zeros(2, 3), torch.ones(2, 37)), dim=1).long()},
    "packed texts": {"position_ids": torch.cat((torch.arange(15), torch.arange(25))).expand(2, -1)},
    "a mask of its own": {"attention_mask": torch.zeros(2, 1, 40, 40)},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("what", REFUSED)
def test_what_our_attention_cannot_compute_is_refused(made, name, what):
    with pytest.raises(
        ValueError, match="attention of 40 tokens over 40: the model wants padding, packed texts"
    ) as said:
        made(name, "tiled")(IDX, use_cache=False, **REFUSED[what])
    assert "\n" not in str(said.value)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_with_its_cache_transformers_takes_packed_texts_for_one(made, name):
    """With use_cache=True, the default, no mask says that they are several. So ours computes what eager does."""
    ours, eager = (made(name, attention)(IDX, **REFUSED["packed texts"]).logits for attention in ("tiled", "eager"))
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_options_of_our_attention_reach_their_layers(made):
    """A window of 7 in both layers is Mistral's. In one of them it is another model, and so is a softcap."""

    def logits(**options) -> torch.Tensor:
        offer_to_transformers(AttentionConfig("naive", **options), "with-options")
        return made("llama", "with-options")(IDX, attention_mask=torch.ones_like(IDX)).logits

    torch.testing.assert_close(logits(windows=[7]), made("mistral")(IDX).logits, rtol=1e-4, atol=1e-4)
    others = [logits(), logits(windows=[7, None]), logits(windows=[None, 7]), logits(window=7), logits(softcap=0.5)]
    assert all((x - y).abs().max() > 0.1 for i, x in enumerate(others) for y in others[:i])


@pytest.mark.parametrize("option", [{"softmax_scale": 0.5}, {"dropout_p": 0.1}, {"documents": True}], ids=str)
def test_what_the_model_decides_is_no_option_of_ours(transformers, option):  # noqa: F811
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=rf"attention\.{name}={value} would be ignored"):
        offer_to_transformers(AttentionConfig("naive", **option))


@pytest.mark.parametrize("options", [{"s_aux": torch.zeros(2)}, {"is_causal": False}], ids=str)
def test_sinks_and_bidirectional_attention_are_refused(made, transformers, options):  # noqa: F811
    function, q = transformers.AttentionInterface()["tiled"], torch.randn(1, 2, 5, 8)
    function(torch.nn.Module(), q, q, q, None)
    with pytest.raises(ValueError, match="attention of 5 tokens over 5: the model wants padding, "):
        function(torch.nn.Module(), q, q, q, None, **options)


def test_a_cache_of_fixed_size_is_refused(made, transformers):  # noqa: F811
    model = made("llama", "tiled")
    cache = transformers.StaticCache(config=model.config, max_cache_len=48)
    with pytest.raises(ValueError, match="attention of 40 tokens over 48"):
        model(IDX, past_key_values=cache)


def test_the_lines_of_the_page_run(theirs):  # noqa: F811
    expected, folder = theirs("gpt2")
    (code,) = re.findall(r"```python\n(.*?)```", PAGES["docs/training.md"], re.DOTALL)
    names = {}
    exec(code.replace("FOLDER", str(folder)), names)
    assert names["model"].config._attn_implementation == "tilegpt"
    with torch.no_grad():
        torch.testing.assert_close(names["model"](IDX).logits, expected(IDX).logits, rtol=1e-4, atol=1e-4)
