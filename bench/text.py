"""Structured text made from a seed: sums, nested brackets and sentences that come twice.

Bytes follow from bytes before them at every distance: spelling from the last few, the brackets that are still
open and a repeated sentence from dozens of them, so that a model has to remember to predict them.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

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


def bigram_entropy(text: bytes) -> float:
    """The loss in nats per byte of knowing how often each byte follows each other one.

    A model whose layers mix no tokens sees one byte of context, and cannot do better.
    """
    before, pairs = Counter(text[:-1]), Counter(itertools.pairwise(text))
    return sum(n * math.log(before[byte] / n) for (byte, _), n in pairs.items()) / (len(text) - 1)


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
