"""Structured text made from a seed: sums, nested brackets and sentences that come twice, whose bytes follow
from bytes before them at every distance, so that a model has to remember to predict them.
"""

import random

import torch
from torch import Tensor

ADJECTIVES = ("bright", "calm", "early", "golden", "heavy", "narrow", "quiet", "second", "silver", "young")
NOUNS = ("anchor", "baker", "cloud", "engine", "forest", "hunter", "island", "letter", "mirror", "river")
VERBS = ("carries", "draws", "finds", "follows", "guards", "hears", "leaves", "meets", "paints", "turns")
PAIRS = {"(": ")", "[": "]", "{": "}", "<": ">"}


def make_text(size: int, seed: int) -> bytes:
    """`size` bytes of ASCII lines; equal seeds give equal text, on any machine."""
    source = random.Random(seed)
    lines: list[str] = []
    length = 0
    while length < size:
        lines.append(source.choice((_sum, _brackets, _sentence))(source) + "\n")
        length += len(lines[-1])
    return "".join(lines).encode("ascii")[:size]


def windows(text: bytes, sizes: tuple[int, ...], length: int, seed: int) -> Tensor:
    """Tokens [*sizes, length] as int64 on the CPU, one per byte: windows of the text at random places."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length + 1, (*sizes, 1), generator=generator)
    return tokens[starts + torch.arange(length)].long()


def _sum(source: random.Random) -> str:
    a, b = source.randrange(1000), source.randrange(1000)
    return f"{a} + {b} = {a + b}"


def _brackets(source: random.Random) -> str:
    """A word of nested brackets, eight of each kind."""
    word, expected = "", ""
    openings = 8
    while openings or expected:
        if openings and (not expected or source.random() < 0.6):
            opening = source.choice(tuple(PAIRS))
            word, expected, openings = word + opening, PAIRS[opening] + expected, openings - 1
        else:
            word, expected = word + expected[0], expected[1:]
    return word


def _sentence(source: random.Random) -> str:
    adjective, subject, verb, object_ = map(source.choice, (ADJECTIVES, NOUNS, VERBS, NOUNS))
    sentence = f"the {adjective} {subject} {verb} the {object_}"
    return f"{sentence}; yes, {sentence}."
