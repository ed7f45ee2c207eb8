"""sample.py with several samples at a time, with stop strings and with a text that grows line by line."""

import io
import signal
import sys

import pytest
import torch

import sample
from data.tokenizer import TextStream, byte_encoding
from model.attention import AttentionConfig
from model.gpt import GPT, GPTConfig
from sampling.generate import Sampler, Session, generate, tokens_seen
from tests.test_sample import END, save, save_parrot

BYTES = byte_encoding()


@pytest.fixture
def model() -> GPT:
    """Random weights, so large that every token tells. Its context is 24 tokens."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, context_length=24, vocab_size=257), AttentionConfig("naive"))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(6)
        model.head.weight[[*range(10), *range(11, 32), *range(127, 257)]] = 0  # it says letters and ends of lines alone
    return model.eval()


@pytest.fixture
def speak(call, model, tmp_path, monkeypatch):
    """speak(arguments, typed): sample.py with that model, and `typed` on standard input."""
    save(tmp_path / "random/checkpoints", model)

    def speak(*arguments: str, typed: str = ""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
        return call(sample, f"runs={tmp_path}", "device=cpu", *arguments)

    return speak


@pytest.fixture
def says(monkeypatch, speak):
    """says(rows): sample.py writes these rows of tokens, whatever the model says. Returns how it ended."""

    def says(rows: list[bytes | list[int]], *arguments: str):
        made = []

        def fake(*options, **more):
            for column in zip(*rows, strict=True):
                made.append(column)
                yield torch.tensor(column)

        monkeypatch.setattr(sample, "generate", fake)
        return speak(*arguments, f"num_samples={len(rows)}"), len(made)

    return says


# --- several samples at a time ---------------------------------------------------------------------------------------


def test_a_row_that_has_ended_is_not_printed_or_counted(says):
    rows = [[*b"abcd", END, *b"xx"], [*b"a", END, *b"xxxxx"], [*b"abc", END, *b"xxx"]]
    ended, made = says(rows, "prompt=p")
    assert ended.out == "--- sample 1 of 3\npabcd\n--- sample 2 of 3\npa\n--- sample 3 of 3\npabc\n"
    assert ended.err.splitlines()[-1].startswith("11 tokens, ")  # with the three that ended the texts
    assert made == 5  # all have ended


def test_texts_are_printed_in_order_and_the_first_as_it_is_made(monkeypatch, capsys):
    screen, seen = sample.Screen(["1:", "2:", "3:"]), []

    def look() -> None:
        seen.append(capsys.readouterr().out)

    look()
    screen.add(0, "a")
    screen.add(1, "b")
    screen.add(2, "c")
    look()
    screen.end(1)
    screen.add(1, "nothing")
    screen.add(0, "d")
    look()
    screen.end(0)
    look()
    screen.add(2, "e")
    look()
    screen.end(2)
    screen.end(2)
    look()
    assert seen == ["1:", "a", "d", "\n2:b\n3:c", "e", "\n"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["num_samples=8"], "num_samples=8 in one batch and cache=contiguous; use num_samples=4 or cache=paged"),
        (["cache=paged"], "num_samples=1 in one batch and cache=paged; use a smaller model"),
    ],
)
def test_memory_that_runs_out_is_one_line(speak, monkeypatch, keys, said):
    def fake(*options, **more):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\n")

    monkeypatch.setattr(sample, "generate", fake)
    ended = speak(*keys)
    assert ended.code == 2
    assert ended.out.endswith("\n")
    assert ended.err.splitlines()[-1] == f"sample: out of memory with {said}"


# --- stop strings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop", "text", "shown"),
    [
        (["END"], "one END two", "one "),
        (["END"], "one EN", "one EN"),
        (["END"], "EEND", "E"),
        (["aab"], "aaab", "a"),
        (["abcx", "bc"], "abcy", "a"),
        (["abcd", "c"], "abcd", "ab"),  # the first to be complete
        (["c", "abc"], "abc", ""),  # both are complete: the longer one, which began before
        (["\u20ac\u4f60"], "a\u20ac\u20ac\u4f60b", "a\u20ac"),
        (["\n\n"], "a\nb\n\nc", "a\nb"),
        ([], "all of it", "all of it"),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_text_ends_before_the_first_stop_string_however_its_tokens_lie(stop, text, shown, size):
    """Tokens of `size` bytes each. Nothing is shown that would have to be taken back."""

    class Tokens:
        name = "tokens"

        def decode_single_token_bytes(self, token: int) -> bytes:
            return text.encode()[token * size : (token + 1) * size]

    stream, found = TextStream(Tokens(), stop), ""
    for token in range(-(-len(text.encode()) // size)):
        found += stream.feed(token)
        assert shown.startswith(found)
    assert found + stream.flush() == shown
    assert stream.stopped == (text != shown)


def test_what_cannot_become_a_stop_string_is_shown_at_once():
    stream = TextStream(BYTES, ["abc", "bd"])
    assert [stream.feed(byte) for byte in b"xabxaabd"] == ["x", "", "", "abx", "", "a", "", "a"]
    assert (stream.flush(), stream.stopped) == ("", True)


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("stop=END", "one "),
        ('stop=["two", "END"]', "one "),
        ('stop=["\\u0020E"]', "one"),
        ("stop=[two]", "one END two"),
        ("stop=\\n", "one END two"),
    ],
    ids=str,
)
def test_stop_is_one_string_as_typed_or_a_list_in_json(call, tmp_path, typed, shown):
    save_parrot(tmp_path / "parrot/checkpoints", [*b"one END two", END])
    ended = call(sample, f"runs={tmp_path}", typed)
    assert (ended.code, ended.out) == (0, shown + "\n"), ended.err


def test_a_row_that_was_stopped_ends_and_the_others_go_on(says):
    ended, made = says([b"ab.cd", b"abcd."], "stop=.")
    assert ended.out == "--- sample 1 of 2\nab\n--- sample 2 of 2\nabcd\n"
    assert (ended.err.splitlines()[-1].split(" tokens, ")[0], made) == ("8", 5)


# --- standard input --------------------------------------------------------------------------------------------------


def likeliest(model: GPT, text: bytes, count: int, stop: bytes = b"\xff", past_context: str = "slide") -> bytes:
    """What the model writes after the text, from the whole of it."""
    tokens = [END, *text][-tokens_seen(1 + len(text), 24, past_context) :]
    options = {"cache": False, "past_context": past_context}
    new = bytes(int(token) for token in generate(model, torch.tensor([tokens]), count, Sampler(0), **options))
    return new.split(stop)[0]


def test_a_prompt_from_standard_input_arrives_as_it_was_piped(speak, model):
    ended = speak("prompt_file=-", "temperature=0", "max_new_tokens=5", typed="two\r\nlines\n")
    text = b"two\r\nlines\n"
    assert ended.out.encode() == text.replace(b"\r", "\ufffd".encode()) + likeliest(model, text, 5) + b"\n"
    assert "prompt: 11 tokens from -" in ended.err


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("past_context", ["slide", "half"])
def test_a_line_is_continued_after_all_that_is_on_the_screen(speak, model, past_context, stopped):
    """Enter alone lets the model write on. The text passes the context of 24, and may stop within an answer."""
    stop = likeliest(model, b"begin one", 6)[2:4].decode() if stopped else ""
    text, screen, between = b"begin ", b"begin ", b""
    for line in (b"one", b"", b"two words", b"three"):
        text += between + line if line else b""
        answer = likeliest(model, text, 6, stop.encode() or b"\xff", past_context)
        text += answer
        between = b"" if answer.endswith(b"\n") else b"\n"
        screen += answer + between
    options = [f"past_context={past_context}", "temperature=0", "max_new_tokens=6"]
    options += [f"stop={stop}"] if stop else []
    ended = speak("interactive=true", "prompt=begin ", *options, typed="one\n\ntwo words\nthree\n")
    assert (ended.code, ended.out.encode()) == (0, screen), ended.err
    assert len(text) > 24
    assert ended.err.count("the context of 24 tokens") == 1


def test_a_talk_stops_where_the_context_is_full(speak, model):
    ended = speak("interactive=true", "past_context=stop", "temperature=0", "max_new_tokens=20", typed="ab\ncd\nef\n")
    first = likeliest(model, b"ab", 20)
    assert ended.out.encode().startswith(first)
    assert "stopped where the context of 24 tokens was full" in ended.err
    assert ended.err.splitlines()[-1].startswith("20 tokens, ")  # 23 and the line are more than the context


def test_an_answer_that_ends_the_document_begins_another(call, tmp_path, monkeypatch):
    """The parrot says what stands at a position: the second line begins after the end of text, without a new line."""
    save_parrot(tmp_path / "parrot/checkpoints", [*b"abc", END, *b"-------wxyz", END])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n1234567")))
    ended = call(sample, f"runs={tmp_path}", "interactive=true", "temperature=0")
    assert ended.out == "abc\nwxyz\n"


def test_a_model_of_single_documents_forgets_the_last_one(call, tmp_path, monkeypatch):
    documents = AttentionConfig("naive", documents=True)
    save_parrot(tmp_path / "parrot/checkpoints", [*b"abc", END], attention=documents)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n\n1\n")))
    assert call(sample, f"runs={tmp_path}", "interactive=true", "temperature=0").out == "abc\nabc\nbc\n"


def test_ctrl_c_ends_the_answer_and_not_the_talk(speak, monkeypatch):
    """And what was said stays in the text."""
    texts = []

    def answer(self, text, count):
        texts.append(bytes(text[1:]))
        for number, byte in enumerate(b"answer"):
            if number == 2 and len(texts) == 1:
                signal.raise_signal(signal.SIGINT)
            yield byte

    monkeypatch.setattr(Session, "answer", answer)
    before = signal.getsignal(signal.SIGINT)
    ended = speak("interactive=true", typed="a\nb\n")
    assert (ended.code, ended.out) == (0, "ans\nanswer\n")
    assert texts == [b"a", b"aans\nb"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_ends_the_program(speak, monkeypatch):
    def answer(self, text, count):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        yield from text

    monkeypatch.setattr(Session, "answer", answer)
    assert speak("interactive=true", typed="a\n").code == 130


@pytest.mark.parametrize("key", ["interactive=true", "prompt_file=-"])
def test_without_standard_input_there_is_one_line(speak, call, tmp_path, monkeypatch, key):
    monkeypatch.setattr(sys, "stdin", None)
    ended = call(sample, f"runs={tmp_path}", "device=cpu", key)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.splitlines()[-1].startswith(f"sample: {key} reads standard input, ")


def test_a_talk_with_a_broken_model_is_stamped(call, tmp_path, monkeypatch):
    save_parrot(tmp_path / "parrot/checkpoints", [*b"text", END], broken="no_max")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    ended = call(sample, f"runs={tmp_path}", "interactive=true")
    assert ended.out == "BROKEN[no_max] text\n"
    assert ended.err.splitlines()[-1].startswith("BROKEN[no_max] 5 tokens, ")


def test_without_a_line_nothing_is_written(speak):
    ended = speak("interactive=true", "prompt=abc")
    assert (ended.code, ended.out) == (0, "abc")
    assert ended.err.splitlines()[-1].startswith("0 tokens, 0 tokens/s")
