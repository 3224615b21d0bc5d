"""docs/api.md: every public name with its arguments and its docstring, as Markdown.

What two functions of a module say of an argument in the same words is printed once.
"""

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
_ELSEWHERE = re.compile(r"as in `(\w+)`\.")
_INTRODUCTION = """# API

Written by `make api` from the docstrings: change these. Of the [reference](#tfla_tkreference) the first
sentence stands here; `help` shows arguments and the rest. Which arguments the kernels serve:
[README.md](../README.md#what-is-supported)."""


def page() -> str:
    """The whole page."""
    parts = [_INTRODUCTION]
    for module in modules():
        parts += [f"## {module.__name__}", markdown(_doc(module))]
        if module.__name__.endswith(".reference"):
            parts.append("\n".join(_lines(module)))
        else:
            told: dict[str, str] = {}
            parts += [once(name, _entry(name, getattr(module, name)), told) for name in _names(module)]
    return "\n\n".join(parts) + "\n"


def modules() -> list[ModuleType]:
    """The package, what serves engines, its integrations, the reference: each has an ``__all__``."""
    names = sorted(info.name for info in pkgutil.iter_modules(integrations.__path__))
    within = [f"{integrations.__name__}.{name}" for name in names]
    others = ["tfla_tk.serving", *within, "tfla_tk.reference"]
    return [tfla_tk, *map(importlib.import_module, others)]


def _names(module: ModuleType) -> list[str]:
    """The public names in the order in which the module's docstring has them, and then all others."""
    mentioned = re.findall(r"\w+", _doc(module))
    return sorted(module.__all__, key=lambda name: [*mentioned, name].index(name))


def once(name: str, entry: str, told: dict[str, str]) -> str:
    """An entry whose items refer to the entry before that has the same item. name: of the entry. entry:
    its Markdown. told: the items so far, with the names of their entries; the new ones are added."""
    blocks = entry.split("\n\n")
    for place, block in enumerate(blocks):
        if not block.startswith("- `"):
            continue
        items: list[str] = []
        elsewhere: dict[str, list[str]] = {}
        for item in block.splitlines():
            what, _, words = item.removeprefix("- ").partition(": ")
            reference = _ELSEWHERE.fullmatch(words)
            source = reference[1] if reference else told.setdefault(item, name)
            if source == name:
                items.append(item)
            else:
                elsewhere.setdefault(source, []).append(what.strip("`"))
        items += [f"- `{', '.join(names)}`: as in `{source}`." for source, names in elsewhere.items()]
        blocks[place] = "\n".join(items)
    return "\n\n".join(blocks)


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


def _lines(module: ModuleType) -> Iterator[str]:
    """The first sentence of every docstring, with the names that have it."""
    names: dict[str, list[str]] = {}
    for name in module.__all__:
        first, _, _ = f"{_inline(_doc(getattr(module, name)).splitlines())} ".partition(". ")
        names.setdefault(first, []).append(f"`{name}`")
    return (f"- {', '.join(of)}: {first}." for first, of in names.items())


def _call(name: str, value: Any) -> str:
    """The arguments with their defaults."""
    signature = inspect.signature(value)
    plain = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    text = f"{name}{signature.replace(parameters=plain, return_annotation=signature.empty)}"
    whole: Any = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(text, WIDTH, subsequent_indent="    ", **whole)


def _doc(value: Any) -> str:
    found = inspect.getdoc(value)
    if not found:
        raise ValueError(f"{getattr(value, '__name__', value)!r} has no docstring")
    return found
