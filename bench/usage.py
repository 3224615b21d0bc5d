"""Options that several commands have, parsers of their values, and the check of paths to write to."""

import argparse
import math
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tfla_tk.core.checks import shown_name

from .inputs import DTYPES, FORGET_BIAS, LAYOUTS

Parsed = TypeVar("Parsed")


class UsageError(ValueError):
    """An option has a wrong value, or options do not go together; the message names the option."""


def argument(parse: Callable[[str], Parsed]) -> Callable[[str], Parsed]:
    """A parser whose ValueError message argparse shows."""

    def parsed(text: str) -> Parsed:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number, got {text}")
    return number


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"expected a positive number, got {text}")
    return int(text)


def listed(text: str) -> list[str]:
    """The names of a comma-separated list, each once."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise ValueError("expected at least one, got none")
    return list(dict.fromkeys(found))


def names(allowed: Collection[str], others: Mapping[str, str] | None = None) -> Callable[[str], list[str]]:
    """Parser of a comma-separated list; "all" takes every name. others: what each name that stands for an
    allowed one stands for."""
    known = {name: name for name in allowed} | dict(others or {})

    def parse(text: str) -> list[str]:
        chosen = list(allowed) if text == "all" else listed(text)
        unknown = [shown_name(name, known) for name in chosen if name not in known]
        if unknown:
            raise ValueError(f"expected {', '.join(allowed)} or all, got {', '.join(unknown)}")
        return list(dict.fromkeys(known[name] for name in chosen))

    return argument(parse)


_FILE: dict[str, Any] = {"type": Path, "metavar": "PATH"}
OPTIONS: dict[str, dict[str, Any]] = {
    "--dtype": {"choices": list(DTYPES), "help": "of q, k, v (default: bf16 on a GPU, fp32 without one)"},
    "--layout": {
        "choices": LAYOUTS,
        "default": LAYOUTS[0],
        "help": "memory order of q, k, v of mLSTM: bnsd contiguous (default), bsnd as models pass them",
    },
    "--forget-bias": {
        "type": argument(finite),
        "default": FORGET_BIAS,
        "metavar": "BIAS",
        "help": f"mean of the forget gates' inputs (default: {FORGET_BIAS:g}); at 12 they forget nothing",
    },
    "--json": {**_FILE, "help": "write the rows of this run as JSON"},
    "--csv": {**_FILE, "help": "write the rows of this run as CSV"},
    "--plot": {**_FILE, "help": "draw the rows of this run (png, svg or pdf)"},
    "--update-results": {"action": "store_true", "help": "merge the rows into bench/results/<gpu>.json"},
    "--commit": {"metavar": "HASH", "help": "what is measured, recorded where this is no git checkout"},
    "--seed": {"type": int, "default": 0, "help": "of the random inputs (default: 0)"},
    "--quick": {"action": "store_true", "help": "the first of the shapes only, and fewer repeats"},
}


def add_options(parser: argparse.ArgumentParser, *options: str, **changes: Any) -> None:
    """Options of OPTIONS, such as "--json"; `changes` replace what argparse is told of each of them."""
    for option in options:
        parser.add_argument(option, **{**OPTIONS[option], **changes})


def check_outputs(args: argparse.Namespace) -> None:
    """UsageError where a file that the options name cannot be written; to be asked before a long run."""
    for name in ("json", "csv", "plot"):
        path: Path | None = getattr(args, name, None)
        if path is None:
            continue
        is_there = os.path.lexists(path)
        try:
            path.open("a").close()
            if not is_there:
                path.unlink()
        except OSError as error:
            expected = f"expected a writable file, got {path} ({error.strerror})"
            raise UsageError(f"--{name}: {expected}") from error
