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
from tests.test_sample import END, NAIVE, parrot, save

BYTES = byte_encoding()


@pytest.fixture
def model() -> GPT:
    """Random weights, so large that every token tells. Its context is 24 tokens."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, context_length=24, vocab_size=257), NAIVE)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(6)
        model.head.weight[[*range(10), *range(11, 32), *range(127, 257)]] = 0  # it says letters and ends of lines alone
    return model.eval()


@pytest.fixture
def speak(call, model, tmp_path, monkeypatch):
    """speak(arguments, typed, of): sample.py with that model, or `of`, and `typed` on standard input."""

    def speak(*arguments: str, typed: str = "", of: GPT = model, broken: str = ""):
        save(tmp_path / "random/checkpoints", of, broken=broken)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
        return call(sample, f"runs={tmp_path}", "device=cpu", *arguments)

    return speak


# --- several samples at a time ---------------------------------------------------------------------------------------


def test_a_row_that_has_ended_is_not_printed_or_counted(speak, monkeypatch):
    """Whatever the model says these rows are written: by an end of text, and by a stop string."""
    rows = [[*b"abcd", END, *b"xx"], [*b"a", END, *b"xxxxx"], [*b"ab.", END, *b"xxx"]]
    made = []

    def fake(*options, **more):
        for column in zip(*rows, strict=True):
            made.append(column)
            yield torch.tensor(column)

    monkeypatch.setattr(sample, "generate", fake)
    ended = speak("num_samples=3", "prompt=p", "stop=.")
    assert ended.out == "--- sample 1 of 3\npabcd\n--- sample 2 of 3\npa\n--- sample 3 of 3\npab\n"
    assert ended.err.splitlines()[-1].startswith("10 tokens, ")  # with the three that ended the texts
    assert len(made) == 5  # all have ended


def test_texts_are_printed_in_order_and_the_first_as_it_is_made(capsys):
    screen = sample.Screen(["1:", "2:", "3:"])
    assert capsys.readouterr().out == "1:"
    steps = [("a", 0), ("b", 1), ("c", 2), ("", 1), ("nothing", 1), ("d", 0), ("", 0), ("e", 2), ("", 2), ("", 2)]
    for (text, row), shown in zip(steps, ["a", "", "", "", "", "d", "\n2:b\n3:c", "e", "\n", ""], strict=True):
        screen.add(row, text, ends=not text)
        assert capsys.readouterr().out == shown


@pytest.mark.parametrize(("key", "way_out"), [("num_samples=8", "num_samples=4"), ("cache=paged", "a smaller model")])
def test_memory_that_runs_out_is_one_line(speak, monkeypatch, key, way_out):
    def fake(*options, **more):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\n")

    monkeypatch.setattr(sample, "generate", fake)
    ended = speak(key)
    assert ended.code == 2
    assert ended.out.endswith("\n")
    line = ended.err.splitlines()[-1]
    assert key in line
    assert way_out in line


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


def test_stop_is_one_string_as_typed_or_a_list_in_json():
    lists = {
        "END": ["END"],
        '["two", "END"]': ["two", "END"],
        '["\\u0020E"]': [" E"],
        "[two]": ["[two]"],
        "\\n": ["\\n"],
    }
    assert [sample.Config(stop=typed).stops() for typed in lists] == [*lists.values()]


# --- standard input --------------------------------------------------------------------------------------------------


def likeliest(model: GPT, text: bytes, count: int, stop: bytes = b"\xff", past_context: str = "slide") -> bytes:
    """What the model writes after the text, from the whole of it."""
    tokens = [END, *text][-tokens_seen(1 + len(text), 24, past_context) :]
    options = {"cache": False, "past_context": past_context}
    new = bytes(int(token) for token in generate(model, torch.tensor([tokens]), count, Sampler(0), **options))
    return new.split(stop)[0]


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
    assert sample.IN_WORDS["stop"].format(24) in ended.err
    assert ended.err.splitlines()[-1].startswith("20 tokens, ")  # 23 and the line are more than the context


@pytest.mark.parametrize(
    ("says", "typed", "documents", "screen"),
    [
        ([*b"abc", END, *b"-------wxyz", END], "\n1234567", False, "abc\nwxyz\n"),
        ([*b"abc", END], "\n\n1\n", True, "abc\nabc\nbc\n"),
    ],
)
def test_an_answer_that_ends_the_document_begins_another(speak, says, typed, documents, screen):
    """The parrot says what stands at a position: the second line begins after the end of text, without a new line. A
    model of single documents forgets the last one."""
    of = parrot(says, AttentionConfig("naive", documents=documents))
    assert speak("interactive=true", "temperature=0", typed=typed, of=of).out == screen


def test_a_talk_in_which_nothing_is_typed_ends_the_line_of_its_prompt(speak):
    assert speak("interactive=true", "prompt=begin", typed="").out == "begin\n"


def test_ctrl_c_ends_the_answer_and_not_the_talk(speak, monkeypatch):
    """And what was said stays in the text. Other signals end the program as before."""
    texts, during = [], []

    def answer(self, text, count):
        texts.append(bytes(text[1:]))
        during.append(signal.getsignal(signal.SIGTERM))
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
    assert during == [signal.getsignal(signal.SIGTERM)] * 2
    assert "SIGINT" not in ended.err


def test_a_second_ctrl_c_ends_the_program(speak, monkeypatch):
    def answer(self, text, count):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        yield from text

    monkeypatch.setattr(Session, "answer", answer)
    assert speak("interactive=true", typed="a\n").code == 130


@pytest.mark.parametrize("key", ["interactive=true", "prompt_file=-"])
def test_without_standard_input_there_is_one_line(call, model, tmp_path, monkeypatch, key):
    save(tmp_path / "random/checkpoints", model)
    monkeypatch.setattr(sys, "stdin", None)
    ended = call(sample, f"runs={tmp_path}", "device=cpu", key)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.splitlines()[-1].startswith(f"sample: {key}")


def test_a_talk_with_a_broken_model_is_stamped(speak):
    ended = speak("interactive=true", typed="\n", of=parrot([*b"text", END]), broken="no_max")
    assert ended.out == "BROKEN[no_max] text\n"
    assert ended.err.splitlines()[-1].startswith("BROKEN[no_max] 5 tokens, ")
