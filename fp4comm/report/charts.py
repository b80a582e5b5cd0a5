"""Pictures of results, drawn by matplotlib: for a light and a dark page at once, and as PNG."""

from __future__ import annotations

import dataclasses
import io
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from fp4comm.report.compare import AXES, Comparison, Series, series, shared_gpus
from fp4comm.report.results import Result, Row, shown

# On a light page and on a dark one.  Drawn in the light colour, which in an SVG becomes a variable
# of the page's style; so no two may be the same.  Each is at least 3:1 against its page.
COLOURS = {
    "paper": ("#fffefd", "#16191d"),
    "ink": ("#1c2126", "#e7eaee"),
    "line": ("#c9ced4", "#3b424b"),
    "blue": ("#2a66b0", "#6fa9f5"),
    "orange": ("#c35312", "#f59a56"),
    "green": ("#1d7d57", "#52c795"),
    "violet": ("#7a4bb8", "#b79af2"),
    "pink": ("#b53a78", "#ec86b8"),
    "olive": ("#83690f", "#d3b449"),
    "teal": ("#137c8b", "#51c2d1"),
    "grey": ("#6a727b", "#9aa3ad"),
}
LIGHT = {name: light for name, (light, _) in COLOURS.items()}
CYCLE = ("pink", "olive", "violet", "teal", "green", "orange", "blue")
PART_COLOURS = {
    "plan": "olive",
    "counts": "pink",
    "quantize": "orange",
    "exchange": "blue",
    "relay": "violet",
    "arrive": "green",
    "reduce": "teal",
}
FORMAT_STYLES = {  # colour and marker
    "bf16": ("grey", "s"),
    "fp8": ("orange", "o"),
    "mxfp8": ("green", "^"),
    "mxfp4": ("blue", "D"),
}
WHOLE_CALL, END_OF_CALL = "whole call", "end of call"
INCHES_WIDE, DPI = 4.4, 160
LEGEND_LETTERS, TITLE_LETTERS, NOTE_LETTERS = 64, 56, 84  # of a line
STYLE = {
    "font.size": 8.5,
    "text.parse_math": False,  # a dollar in a file's name is a dollar
    "svg.fonttype": "none",
    "svg.hashsalt": "fp4comm",
    "axes.edgecolor": LIGHT["line"],
    "axes.facecolor": LIGHT["paper"],
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.labelcolor": LIGHT["ink"],
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": LIGHT["line"],
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.constrained_layout.w_pad": 0.09,
    "figure.constrained_layout.h_pad": 0.06,
    "text.color": LIGHT["ink"],
    "xtick.color": LIGHT["line"],
    "xtick.labelcolor": LIGHT["ink"],
    "ytick.color": LIGHT["line"],
    "ytick.labelcolor": LIGHT["ink"],
}


@dataclasses.dataclass(frozen=True)
class Chart:
    """A picture and its text.

    Attributes:
        title: what it shows.
        text: the same in words, with its numbers.
        note: how to read it.
        inches: height.
        draw: draws it into a figure or a part of one.
    """

    title: str
    text: str
    note: str
    inches: float
    draw: Callable[[Any], None]


def charts(results: Sequence[Result], comparisons: Sequence[Comparison]) -> list[Chart]:
    """Choose the pictures: comparisons and series first, then two for each result."""
    made = [_compared(comparison) for comparison in comparisons]
    for axis in AXES:
        made += [_speedups(one) for one in series(results, axis) if any(_speedup_lines(one))]
    for result in results:
        made.append(_times(result))
        if result.is_measured and result.setup.ranks > 1:
            made.append(_bandwidths(result))
    return made


# Time by part


def _times(result: Result) -> Chart:
    note = "Slowest rank; the number is the whole call"
    if result.is_measured:
        timed = "timed in calls of their own and add up to more"
        if result.device == "cpu":
            timed = "medians of their own, which need not add up to it"
        note += f", the tick its end: parts are {timed}"
    said = [f"{row.name}: {_ms(row.us)} ms ({_parts_text(row)})" for row in result.rows]
    verb = "measured" if result.is_measured else "predicted"

    def draw(figure: Any) -> None:
        axes = _bar_axes(figure, [row.name for row in result.rows], "ms")
        for name in _part_names(result.rows):
            of_row = [(at, row) for at, row in enumerate(result.rows) if name in _parts(row)]
            axes.barh(
                [at for at, _ in of_row],
                [_parts(row)[name] / 1e3 for _, row in of_row],
                left=[_start(row, name) / 1e3 for _, row in of_row],
                height=0.68,
                color=LIGHT[_part_colour(name)],
                edgecolor=LIGHT["paper"],
                linewidth=0.6,
                label=name,
            )
        for at, row in enumerate(result.rows):
            end = max(row.us, sum(_parts(row).values())) / 1e3
            _label(axes, end, at, _ms(row.us))
        if result.is_measured and any(row.parts_us for row in result.rows):
            split = [(row.us / 1e3, at) for at, row in enumerate(result.rows) if row.parts_us]
            tick = {"color": LIGHT["ink"], "markersize": 13, "linestyle": "none", "marker": "|"}
            axes.plot(*zip(*split, strict=True), **tick, label=END_OF_CALL)
        _room_for_labels(axes)
        _legend(figure, axes)

    title = f"Time by part, {verb}: {result.name}"
    return Chart(title, "; ".join(said), note, _bars_inches(result.rows), draw)


def _parts(row: Row) -> dict[str, float]:
    return row.parts_us or {WHOLE_CALL: row.us}


def _part_names(rows: Sequence[Row]) -> list[str]:
    names = dict.fromkeys(name for row in rows for name in _parts(row))
    return sorted(names, key=lambda name: [*PART_COLOURS, name].index(name))


def _start(row: Row, name: str) -> float:
    """Where a part begins: after those that are drawn before it."""
    names = _part_names([row])
    return sum(_parts(row)[before] for before in names[: names.index(name)])


def _part_colour(name: str) -> str:
    return "grey" if name == WHOLE_CALL else PART_COLOURS.get(name, _other_colour(name))


def _other_colour(name: str) -> str:
    return CYCLE[sum(name.encode()) % len(CYCLE)]


def _parts_text(row: Row) -> str:
    return ", ".join(f"{name} {_ms(us)}" for name, us in row.parts_us.items()) or "not split"


# Bandwidth


BANDWIDTHS = (
    ("busbw", "busbw_gbs", "blue"),
    ("algbw", "algbw_gbs", "teal"),
    ("BF16-equivalent", "bf16_gbs", "orange"),
)


def _bandwidths(result: Result) -> Chart:
    note = (
        "busbw: bytes that left the busiest rank over the median; algbw: all that it sent, to"
        " itself too; BF16-equivalent: the bytes of the same rows in bf16. GB/s = 10^9 B/s"
    )
    said = [
        f"{row.name}: " + ", ".join(f"{n} {getattr(row, key):.3g}" for n, key, _ in BANDWIDTHS)
        for row in result.rows
    ]

    def draw(figure: Any) -> None:
        axes = _bar_axes(figure, [row.name for row in result.rows], "GB/s")
        for number, (name, key, colour) in enumerate(BANDWIDTHS):
            middles = [at + 0.26 * (number - 1) for at in range(len(result.rows))]
            values = [getattr(row, key) for row in result.rows]
            axes.barh(middles, values, height=0.24, color=LIGHT[colour], label=name)
        _legend(figure, axes)

    return Chart(
        f"Bandwidth: {result.name}", "; ".join(said), note, _bars_inches(result.rows), draw
    )


# Measured against predicted


def _compared(comparison: Comparison) -> Chart:
    pairs, measured, predicted = comparison.pairs, comparison.measured, comparison.predicted
    note = "The number is the prediction's error: predicted over measured, less 1"
    if sharing := shared_gpus(measured):
        note += f". Measured where {sharing}"
    said = [
        f"{p.measured.name}: measured {_ms(p.measured.us)} ms, predicted {_ms(p.predicted.us)} ms,"
        f" error {100 * p.error:+.0f} %"
        for p in pairs
    ]

    def draw(figure: Any) -> None:
        axes = _bar_axes(figure, [pair.measured.name for pair in pairs], "ms")
        for shift, name, colour in ((-0.2, "measured", "blue"), (0.2, "predicted", "orange")):
            values = [getattr(pair, name).us / 1e3 for pair in pairs]
            middles = [at + shift for at in range(len(pairs))]
            axes.barh(middles, values, height=0.36, color=LIGHT[colour], label=name)
        for at, pair in enumerate(pairs):
            end = max(pair.measured.us, pair.predicted.us) / 1e3
            _label(axes, end, at, f"{100 * pair.error:+.0f} %")
        _room_for_labels(axes)
        _legend(figure, axes)

    title = f"Measured against predicted: {measured.name}, {predicted.machine}"
    height = _bars_inches([pair.measured for pair in pairs])
    return Chart(title, "; ".join(said), note, height, draw)


# Speed-up


def _speedups(one: Series) -> Chart:
    lines = list(_speedup_lines(one))
    said = [
        f"{name} over {base}: " + ", ".join(f"{y:.2f} at {x:g}" for x, y in points)
        for base, name, _, points in lines
    ]
    setup = one.results[0].setup
    about = {"tokens": f"skew {shown(setup.skew)}", "skew": f"{setup.tokens} tokens a rank"}[
        one.axis
    ]
    verb = "measured" if one.results[0].is_measured else "predicted"

    def draw(figure: Any) -> None:
        bases = list(dict.fromkeys(base for base, *_ in lines))
        panels = figure.subplots(1, max(1, len(bases)), sharey=True, squeeze=False)[0]
        for axes, base in zip(panels, bases, strict=False):
            for of_base, name, row, points in lines:
                if of_base == base:
                    _line(axes, name, row, points)
            axes.axhline(1, color=LIGHT["ink"], linewidth=0.8, label="_as fast")
            axes.set_title(f"dispatch over {base}", fontsize=8.5, color=LIGHT["ink"])
            _scale(axes, one)
        panels[0].set_ylim(0, 1.08 * max(1, *(y for *_, points in lines for _, y in points)))
        panels[0].set_ylabel("times as fast")
        _legend(figure, panels[0], handle=2.6)  # long enough to show dashes

    return Chart(
        title=f"Speed-up over {one.axis}, {verb}: {', '.join(r.name for r in one.results)}",
        text="; ".join(said),
        note=f"{setup.ranks} ranks, hidden {setup.hidden}, top-{setup.topk} of {setup.experts}"
        f" experts, {about}; above 1 is faster; plain: an all-to-all of BF16 rows, one copy per"
        " expert",
        inches=3.1,
        draw=draw,
    )


Line = tuple[str, str, Row, list[tuple[float, float]]]


def _speedup_lines(one: Series) -> Iterable[Line]:
    """Base, name, a row and the points of each line: dispatches over the plain one, over bf16."""
    for base, of in (("plain", Result.vs_plain), ("bf16", Result.vs_bf16)):
        lines: dict[str, tuple[Row, list[tuple[float, float]]]] = {}
        for x, result in zip(one.positions, one.results, strict=True):
            for row in (row for row in result.rows if row.op == "dispatch"):
                if (value := of(result, row)) is not None:
                    lines.setdefault(row.name, (row, []))[1].append((x, value))
        for name, (row, points) in lines.items():
            yield base, name.removeprefix("dispatch "), row, points


def _line(axes: Any, name: str, row: Row, points: list[tuple[float, float]]) -> None:
    colour, marker = FORMAT_STYLES.get(row.format, (_other_colour(row.format), "v"))
    axes.plot(
        *zip(*points, strict=True),
        color=LIGHT[colour],
        marker=marker,
        markersize=5,
        linestyle="-" if row.route == "flat" else "--",
        label=name,
    )


def _scale(axes: Any, one: Series) -> None:
    """Ticks where something was measured, tokens by their logarithm."""
    positions = sorted(set(one.positions))
    axes.set_xlabel("tokens a rank" if one.axis == "tokens" else "skew")
    if one.axis == "tokens" and positions[0] > 0:
        axes.set_xscale("log", base=2)
    axes.set_xticks(positions, [f"{x:g}" if x < 1e6 else f"{x:.3g}" for x in positions])
    axes.set_xticks([], minor=True)
    axes.margins(x=0.12)
    if len(positions) > 4:
        axes.tick_params(axis="x", labelrotation=60)


# What bars have in common


def _bars_inches(rows: Sequence[Any]) -> float:
    return 1.25 + 0.3 * max(3, len(rows))


def _bar_axes(figure: Any, names: Sequence[str], unit: str) -> Any:
    axes = figure.subplots()
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(unit)
    return axes


def _label(axes: Any, x: float, y: float, text: str) -> None:
    axes.annotate(text, (x, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)


def _room_for_labels(axes: Any) -> None:
    axes.set_xlim(0, axes.get_xlim()[1] * 1.14)


def _legend(figure: Any, axes: Any, handle: float = 1.4) -> None:
    handles, names = axes.get_legend_handles_labels()
    if END_OF_CALL in names:  # lines come before bars
        at = names.index(END_OF_CALL)
        handles, names = ([*of[:at], *of[at + 1 :], of[at]] for of in (handles, names))
    widest = max(map(len, names), default=1) + 5 + int(handle)  # with the handle's place
    columns = max(1, min(len(names), LEGEND_LETTERS // widest))
    shape = {"ncols": columns, "handlelength": handle, "columnspacing": 1.4}
    figure.legend(handles, names, loc="outside lower center", **shape)


def _ms(us: float) -> str:
    return f"{us / 1e3:#.3g}".rstrip(".") if us < 1e6 else f"{us / 1e3:,.0f}"


# As SVG and PNG


def as_svg(chart: Chart, number: int) -> str:
    """Draw a chart as an SVG element: ids with this number, colours as variables of the page."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(INCHES_WIDE, chart.inches), layout="constrained")
        chart.draw(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.S)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"| version="1.1"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'\b(id="|href="#|url\(#)', rf"\1c{number}-", svg)
    svg = re.sub(r' width="[^"]*" height="[^"]*"', "", svg, count=1)
    for name, light in LIGHT.items():
        svg = svg.replace(light, f"var(--{name})")
    return svg.replace("<svg", f'<svg role="img" aria-labelledby="chart-{number}-text"', 1)


def write_png(made: Sequence[Chart], title: str, file: Path) -> None:
    """Draw charts into one picture, two beside each other."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    columns = min(2, len(made))
    rows = [made[i : i + columns] for i in range(0, len(made), columns)]
    titles = {chart.title: textwrap.fill(chart.title, TITLE_LETTERS) for chart in made}
    notes = {chart.title: textwrap.fill(f"{chart.note}.", NOTE_LETTERS) for chart in made}
    extra = {t: 0.2 + 0.15 * (titles[t].count("\n") + notes[t].count("\n") + 1) for t in titles}
    heights = [max(chart.inches + extra[chart.title] for chart in row) for row in rows]
    with rc_context(STYLE):
        size = (columns * INCHES_WIDE, sum(heights) + 0.5)
        figure = Figure(figsize=size, layout="constrained", facecolor=LIGHT["paper"])
        heading = [textwrap.fill(line, columns * TITLE_LETTERS) for line in title.splitlines()]
        figure.suptitle("\n".join(heading), fontsize=9)
        parts = figure.subfigures(len(rows), columns, squeeze=False, height_ratios=heights)
        for row, of_row in zip(rows, parts, strict=True):
            for chart, part in zip(row, of_row, strict=False):
                part.set_facecolor(LIGHT["paper"])
                part.suptitle(titles[chart.title], fontsize=9.5, weight="bold")
                chart.draw(part)
                for legend in part.legends:  # where the page has a text of its own
                    legend.set_title(notes[chart.title], prop={"size": 7})
        text = "\n".join(f"{chart.title}: {chart.text}" for chart in made)
        figure.savefig(file, format="png", dpi=DPI, metadata={"Title": title, "Description": text})
