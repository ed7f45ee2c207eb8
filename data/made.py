"""Text that is made and not read: data=recall and data=passkey. It shows whether a model uses a long context.

    recall     EOT s \\n s          s is a random string. The second one can be predicted only from the first.
    passkey    EOT filler, a number, filler, the question for the number, the number; half of the documents have several

A document fills one window of model.context_length tokens (bytes) exactly, so the loader cuts none. The same length
always gives the same text. The passkey's text is that of Mohtashami and Jaggi (arXiv 2305.16300).
"""

import math
import string

import numpy as np

# The symbols of recall's strings: 62, so guessing has a loss of ln 62 = 4.13.
LETTERS = np.frombuffer((string.ascii_letters + string.digits).encode(), np.uint8)
DOCUMENTS = 8192  # how many are made, but at most BYTES in all
BYTES = 1 << 26
SEED = 1337
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
KEY = "The pass key is {0}. Remember it. {0} is the pass key. "
QUESTION = "What is the pass key? The pass key is {}."
DIGITS = 5  # of a pass key
LONGEST = 64  # characters of a string in its place
MADE = {"recall": 8, "passkey": 128}  # source -> the fewest tokens of a document


def documents(source: str, length: int) -> list[str]:
    """The documents of recall or passkey, each of length - 1 bytes: with its end-of-text token it fills a context."""
    if length < MADE[source] or length % 2:
        raise ValueError(f"model.context_length={length}: data={source} takes an even one, {MADE[source]} or more")
    count = min(DOCUMENTS, BYTES // length)
    write = recall if source == "recall" else passkeys
    return [write(length, np.random.default_rng([SEED, length, i])) for i in range(count)]


def random_string(length: int, generator: np.random.Generator) -> str:
    return LETTERS[generator.integers(len(LETTERS), size=length)].tobytes().decode()


def recall(length: int, generator: np.random.Generator) -> str:
    """A random string, a line end and the string again: length - 1 characters."""
    half = random_string(length // 2 - 1, generator)
    return f"{half}\n{half}"


def second_half(length: int) -> slice:
    """Where, among the targets of a window of recall, the second string is."""
    return slice(length // 2, length - 1)


def passkey(length: int, depth: float, generator: np.random.Generator, number: str = "") -> str:
    """A text of length - 1 characters that tells a number and asks for it at its end.

    depth: where it is told, 0 at the start of the text, 1 just before the question. number: drawn if it is left out."""
    number = number or f"{generator.integers(10**DIGITS):0{DIGITS}}"
    told, asked = KEY.format(number), QUESTION.format(number)
    around = length - 1 - len(told) - len(asked)  # characters of filler
    filler = FILLER * (around // len(FILLER) + 1)
    before = round(depth * around)
    return filler[:before] + told + filler[before:around] + asked


def passkeys(length: int, generator: np.random.Generator) -> str:
    """One text of passkey(), or several one after the other, length - 1 characters in all, to learn from. Those of
    several have lengths drawn log-uniformly: a model first learns to copy where the number is near. In half of the
    texts that have room for it the number is a random string of up to LONGEST characters instead: five digits are too
    few tokens to learn from. Some numbers are told at the very start of a text, and some at the very end."""
    least, text, one = MADE["passkey"], "", generator.random() < 0.5
    while (left := length - len(text)) > 0:
        size = left if one else round(math.exp(generator.uniform(math.log(least), math.log(left))))
        size = size if left - size >= least else left  # what is left must have room for another text
        longest = min(LONGEST, (size - least) // 3)
        number = ""
        if longest > DIGITS and generator.random() < 0.5:
            number = random_string(int(generator.integers(DIGITS, longest)), generator)
        text += passkey(size, min(1, max(0, generator.uniform(-0.1, 1.1))), generator, number) + " "
    return text[:-1]


def answer(length: int) -> slice:
    """Where, among the targets of a window of passkey, the number is that was asked for."""
    end = length - 2  # of the targets the last is the next document's first token, the one before the full stop
    return slice(end - DIGITS, end)
