"""The sweep as a picture: bars of plain characters for a terminal, or a PNG by matplotlib where that is installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from pelton.bench.serving.compare import Get, Row, grouped, median, time_of
from pelton.errors import InvalidRequest

WIDTH = 50
PANELS: dict[str, Get] = {
    "output tokens per second": lambda row: row.result.tokens_per_second,
    "first token, median, ms": time_of("ttft"),
    "per further token, median, ms": time_of("tpot"),
    "whole answer, median, ms": time_of("e2e"),
}


def bars(rows: Sequence[Row], character: str = "#") -> str:
    """For each of the first two panels a bar per load and server, as long as its share of the longest."""
    groups = grouped(rows)
    lines: list[str] = []
    for title in list(PANELS)[:2]:
        values = [median(group, PANELS[title]) for group in groups]
        longest = max((value for value in values if value is not None), default=0.0)
        lines += ["", title]
        for group, value in zip(groups, values, strict=True):
            length = round(WIDTH * value / longest) if value is not None and longest else 0
            number = "-" if value is None else f"{value:.1f}"
            lines.append(f"{group[0].load.level:>7}  {group[0].label:24} {character * length} {number}")
    return "\n".join(lines[1:])


def check_png(path: Path) -> None:
    """Can a plot be written there? Raises `InvalidRequest` before any time is spent on measuring."""
    if find_spec("matplotlib") is None:
        raise InvalidRequest("--plot needs matplotlib, which is not installed: pip install matplotlib")
    if path.suffix.lower() != ".png" or not path.absolute().parent.is_dir():
        raise InvalidRequest(f"--plot writes a .png into a folder that exists, not {path}")


def png(rows: Sequence[Row], path: Path) -> None:
    """A line per server over the levels, for each panel."""
    from matplotlib.figure import Figure

    groups = grouped(rows)
    levels = list(dict.fromkeys(group[0].load.level for group in groups))
    figure = Figure(figsize=(10, 7), layout="constrained")
    for axes, (title, get) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for name in dict.fromkeys(group[0].label for group in groups):
            points = {group[0].load.level: median(group, get) for group in groups if group[0].label == name}
            values = [points.get(level) for level in levels]
            axes.plot(levels, [float("nan") if v is None else v for v in values], marker="o", label=name)
        axes.set_title(title)
        axes.set_xlabel("requests per second" if rows[0].load.rate else "requests at once")
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.savefig(path)
