"""Plots: results rows as bars per shape; speed-ups."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .report import PASS_TITLES, conditions_title, milliseconds, name_of
from .results import TITLES, Pair, Row, shape_of
from .usage import UsageError

Series = dict[str, dict[str, float]]  # values by name and group


def write_plot(path: Path, rows: Sequence[Row]) -> None:
    """Draw one panel per operator, pass, dtype and conditions of at least one row into a file; its suffix
    picks the format."""
    panels: dict[str, Series] = {}
    for row in rows:
        parts = TITLES[row["op"]], PASS_TITLES[row["pass"]], row["dtype"], conditions_title(row)
        series = panels.setdefault(", ".join(filter(None, parts)), {})
        series.setdefault(name_of(row), {})[str(shape_of(row))] = row["ms"]
    figure = _figure(len(panels))
    every = figure.subplots(len(panels), squeeze=False).flat
    for axes, (title, series) in zip(every, panels.items(), strict=True):
        axes.set_title(title)
        groups, _ = _draw_groups(axes.bar, series)
        axes.set_xticks(range(len(groups)), groups, fontsize="small")
        axes.set_yscale("log")
        axes.set_ylabel("ms")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
    figure.savefig(path, dpi=150)


def write_speed_ups(path: Path, found: Sequence[Pair]) -> None:
    """Draw at least one speed-up as bars from top to bottom, one group per operator and head dims, a colour
    per pass."""
    series: Series = {}
    told: dict[str, list[str]] = {}
    for pair in found:
        assert pair.ours and pair.theirs and pair.speed_up
        shape, name = shape_of(pair.shown), PASS_TITLES[pair.shown["pass"]]
        group = f"{TITLES[pair.shown['op']]}\n{shape.H} heads of {shape.K}/{shape.V}"
        series.setdefault(name, {})[group] = pair.speed_up
        theirs = pair.theirs["backend"].partition(":")[2]
        times = f"{milliseconds(pair.ours['ms'])} ms, {theirs} {milliseconds(pair.theirs['ms'])} ms"
        told.setdefault(name, []).append(f" {pair.speed_up:.1f}x ({times})")
    figure = _figure(1, (9, 1 + 0.35 * len(found)))
    axes = figure.subplots()
    groups, drawn = _draw_groups(axes.barh, series)
    for name, bars in drawn.items():
        axes.bar_label(bars, told[name], fontsize="small")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(groups)), groups)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.6 * max(value for values in series.values() for value in values.values()))
    axes.set_xlabel("times as fast as the fastest correct baseline on record")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def check_path(path: Path) -> None:
    """Raise where no plot can be written there; to be asked before what is drawn is measured."""
    formats = set(_figure(1).canvas.get_supported_filetypes())
    if path.suffix.removeprefix(".") not in formats:
        raise UsageError(f"--plot: expected a file name with one of {', '.join(sorted(formats))}, got {path}")


def _figure(panels: int, size: tuple[float, float] | None = None) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("plot: matplotlib is not installed (pip install 'tfla_tk[plot]')") from error
    return Figure(figsize=size or (11, 4.5 * panels), layout="constrained")


def _draw_groups(draw: Callable[..., Any], series: Series) -> tuple[list[str], dict[str, Any]]:
    """Bars side by side in each of the groups: the groups, and what `draw` gave by the series' names."""
    groups = list(dict.fromkeys(group for found in series.values() for group in found))
    width, drawn = 0.8 / len(series), {}
    for number, (name, found) in enumerate(series.items()):
        offset = (number - (len(series) - 1) / 2) * width
        places = {at + offset: found[group] for at, group in enumerate(groups) if group in found}
        drawn[name] = draw(list(places), list(places.values()), width, label=name)
    return groups, drawn
