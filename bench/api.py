"""docs/api.md: every public name with its arguments and its docstring, as Markdown."""

import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import tfla_tk
from tfla_tk import integrations

WIDTH = 100
_SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Warns|Yields):$")
_ITEM = re.compile(r"^([\w.*, ]+): ")
_INTRODUCTION = """# API

Written by `make api` from the docstrings: change these. Of the [reference](#tfla_tkreference) the first
sentence stands here, `help` shows the rest. Which arguments the kernels serve:
[README.md](../README.md#what-is-supported)."""


def page() -> str:
    """The whole page."""
    parts = [_INTRODUCTION]
    for module in modules():
        parts += [f"## {module.__name__}", markdown(_doc(module))]
        if module.__name__.endswith(".reference"):
            parts.append("\n".join(_line(name, getattr(module, name)) for name in module.__all__))
        else:
            parts += [_entry(name, getattr(module, name)) for name in module.__all__]
    return "\n\n".join(parts) + "\n"


def modules() -> list[ModuleType]:
    """The package, what serves engines, its integrations, the reference: each has an ``__all__``."""
    names = sorted(info.name for info in pkgutil.iter_modules(integrations.__path__))
    within = [f"{integrations.__name__}.{name}" for name in names]
    others = ["tfla_tk.serving", *within, "tfla_tk.reference"]
    return [tfla_tk, *map(importlib.import_module, others)]


def markdown(docstring: str) -> str:
    """A docstring: paragraphs, indented text as code, a list for each of the sections."""
    parts: list[str] = []
    section = ""
    for block in re.split(r"\n\s*\n", docstring):
        lines = block.splitlines()
        if found := _SECTION.match(lines[0]):
            section, lines = found[1], lines[1:]
            parts.append(f"**{section}**")
        elif not lines[0].startswith(" "):
            section = ""
        text = textwrap.dedent("\n".join(lines))
        if section in ("Returns", "Yields"):
            parts.append(_inline(lines))
        elif section:
            parts.append("\n".join(_items(text)))
        elif lines[0].startswith(" "):
            parts.append(f"```text\n{text}\n```")
        else:
            parts.append(_inline(lines))
    return "\n\n".join(parts).replace("\n```\n\n```text\n", "\n\n")  # code with a blank line is one block


def _items(text: str) -> Iterator[str]:
    """The items of a section; what follows on deeper lines belongs to the one before."""
    for item in re.split(r"\n(?! )", text):
        words = _inline(item.splitlines())
        yield f"- {_ITEM.sub(lambda found: f'`{found[1]}`: ', words, count=1)}"


def _inline(lines: list[str]) -> str:
    text = " ".join(line.strip() for line in lines)
    text = re.sub(r":\w+:`([^`]*)`", r"`\1`", text.replace("``", "`"))
    return re.sub(r"::$", ":", text)


def _entry(name: str, value: Any) -> str:
    if not callable(value):
        listed = f": {', '.join(f'`{key}`' for key in value)}" if isinstance(value, dict) else ""
        return f"### `{name}`\n\nA `{type(value).__name__}`{listed}."
    return f"### `{name}`\n\n```text\n{_call(name, value)}\n```\n\n{markdown(_doc(value))}"


def _line(name: str, value: Any) -> str:
    first, _, _ = f"{_inline(_doc(value).splitlines())} ".partition(". ")
    return f"- `{_call(name, value, WIDTH * 100)}`: {first}."


def _call(name: str, value: Any, width: int = WIDTH) -> str:
    """The arguments with their defaults."""
    signature = inspect.signature(value)
    plain = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    text = f"{name}{signature.replace(parameters=plain, return_annotation=signature.empty)}"
    return textwrap.fill(
        text, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def _doc(value: Any) -> str:
    found = inspect.getdoc(value)
    if not found:
        raise ValueError(f"{getattr(value, '__name__', value)!r} has no docstring")
    return found
