"""`make_page`: a diagnosis with pictures, as one HTML page without scripts. It needs no network."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from hop_tf.records.log import JobLog, join_restarts
from hop_tf.tools.diagnosis.findings import Diagnosis, duration, rate
from hop_tf.tools.diagnosis.links import Link, measure_links
from hop_tf.tools.diagnosis.steps import steps_of

# The maximum number of points of a line. If steps share a point, the slowest is shown.
_MOST_POINTS = 300
_NUM_COLORS = 8
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 760, 230, 64, 34, 8
_ROW = 26
# A link that is this many times worse than the best one has the full color.
_WORST = 30.0
_Line = tuple[np.ndarray, np.ndarray]
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #667085; --line: #d9dee6; --paper: #ffffff; --box: #f5f7fa;
  --bad: 214, 69, 65; --c0: #2f6fb5; --c1: #d9822b; --c2: #3a9a5b; --c3: #c4453f; --c4: #7d5fb2; --c5: #8a6d4b;
  --c6: #c9609f; --c7: #4aa3a8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #9aa4b2; --line: #39414d; --paper: #14181e;
  --box: #1c222b; --bad: 240, 110, 100; --c0: #6ea8e6; --c1: #f0a45a; --c2: #6cc58b; --c3: #ec7a74; --c4: #ab93dd;
  --c5: #c0a27e; --c6: #e597c6; --c7: #7fd0d4; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 800px; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
svg { width: 100%; height: auto; display: block; } svg text { font: 12px system-ui, sans-serif; fill: var(--soft); }
.scroll { overflow-x: auto; } .note, .legend { color: var(--soft); font-size: .85rem; }
.findings { background: var(--box); border-left: 4px solid var(--c0); padding: .6rem 1rem; border-radius: 4px; }
.findings p, .told p { margin: .35rem 0; }
.legend span { margin-right: 1rem; white-space: nowrap; }
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .35em; }
table { border-collapse: collapse; font-size: .76rem; } th { font-weight: 500; color: var(--soft); }
th, td { padding: .2rem .35rem; text-align: center; border: 1px solid var(--line); white-space: nowrap; }
"""


def make_page(job: JobLog, diagnosis: Diagnosis) -> str:
    """Makes a page of a diagnosis with pictures: steps over time, shares of time, links, and metrics over time.

    Args:
      job: The records.
      diagnosis: The result of `diagnose` for these records.

    Returns:
      HTML.
    """
    job = join_restarts(job)
    strategy = str(job.ranks[0].about.get("strategy", ""))
    sections = [
        f'<div class="findings">{_paragraphs(diagnosis.conclusions)}</div>',
        f'<div class="told">{_paragraphs(diagnosis.facts)}</div>',
        "<h2>Steps over time</h2>",
        *_steps_chart(job),
        "<h2>Where the time went</h2>",
        *_shares_chart(diagnosis.shares),
        "<h2>Links</h2>",
        *_link_table(job, measure_links(job)),
        "<h2>Metrics over time</h2>",
        *_metric_charts(job),
    ]
    title = html.escape(f"{strategy} on {len(diagnosis.shares)} ranks")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><title>{title}</title><style>{_STYLE}</style></head>\n'
        f"<body><h1>{title}</h1>\n" + "\n".join(sections) + "\n</body></html>\n"
    )


def _paragraphs(lines: Sequence[str]) -> str:
    escaped = (html.escape(line) for line in lines)
    return "".join(re.sub("`(.+?)`", r"<code>\1</code>", f"<p>{line}</p>") for line in escaped)


def _steps_chart(job: JobLog) -> Iterator[str]:
    """Draws each rank's own time per step, in front of grey lines of whole steps.

    If ranks wait for each other, the grey lines of all ranks are alike.
    """
    own, whole, start = {}, [], min(process.starts[0] for process in job.ranks)
    for process in job.ranks:
        steps = steps_of(process)
        if len(steps.begin):
            own[process.name] = _thinned(steps.begin - start, steps.own)
            whole.append(_thinned(steps.begin - start, steps.seconds))
    yield _line_chart(own, "a step of each rank", written=duration, behind=whole)
    yield _legend([f"{name} on its own" for name in own], {"whole steps": "var(--line)"})
    yield '<p class="note">Across: seconds since the job began.</p>'


def _thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reduces a line to `_MOST_POINTS` points: the slowest of the steps that share a point."""
    if len(x) <= _MOST_POINTS:
        return x, y
    parts = np.array_split(np.arange(len(x)), _MOST_POINTS)
    highest = [part[np.argmax(y[part])] for part in parts]
    return x[highest], y[highest]


def _line_chart(
    series: Mapping[str, _Line],
    label: str,
    written: Callable[[float], str] = "{:.4g}".format,
    behind: Sequence[_Line] | None = None,
) -> str:
    """Draws lines over time.

    Args:
      series: The lines, by name.
      label: The name of the values.
      written: Formats a value.
      behind: Grey lines. If given, the axis of values begins with 0.
    """
    lines = [*series.values(), *(behind or ())]
    all_x, all_y = (np.concatenate([line[axis] for line in lines]) for axis in (0, 1))
    x_ticks = _ticks(float(all_x.min()), float(all_x.max()))
    y_ticks = _ticks(float(all_y.min()) if behind is None else 0.0, float(all_y.max()))
    x_of = _scale(x_ticks[0], x_ticks[-1], _LEFT, _WIDTH - 10)
    y_of = _scale(y_ticks[0], y_ticks[-1], _HEIGHT - _BOTTOM, _TOP)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(label)} over time">']
    for tick in y_ticks:
        y = y_of(tick)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - 10}" stroke="var(--line)" stroke-width=".6"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{written(tick)}</text>')
    for tick in x_ticks:
        parts.append(f'<text x="{x_of(tick):.1f}" y="{_HEIGHT - 14}" text-anchor="middle">{tick:.4g}</text>')
    for line in behind or ():
        parts.append(_polyline(line, x_of, y_of, "var(--line)", "a whole step", 4))
    for place, (name, line) in enumerate(series.items()):
        parts.append(_polyline(line, x_of, y_of, _color(place), name, 1.6))
    return "".join([*parts, "</svg>"])


def _polyline(line: _Line, x_of: Callable, y_of: Callable, color: str, name: str, width: float) -> str:
    x, y = line
    if len(x) == 1:
        return f'<circle cx="{x_of(x[0]):.1f}" cy="{y_of(y[0]):.1f}" r="3" fill="{color}"/>'
    points = " ".join(f"{x_of(a):.1f},{y_of(b):.1f}" for a, b in zip(x, y, strict=True))
    return (
        f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{width}" stroke-linejoin="round">'
        f"<title>{html.escape(name)}</title></polyline>"
    )


def _scale(low: float, high: float, begin: float, end: float) -> Callable[[float], float]:
    return lambda value: begin + (value - low) / ((high - low) or 1.0) * (end - begin)


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers that enclose an interval."""
    if high - low < 1e-9 * max(abs(high), 1e-12):
        low, high = (0.0, high) if high > 0 else (low - 0.5, low + 0.5)
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if rough <= power * factor)
    return [step * number for number in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _color(place: int) -> str:
    return f"var(--c{place % _NUM_COLORS})"


def _legend(names: Sequence[str], others: Mapping[str, str] | None = None) -> str:
    colors = {name: _color(place) for place, name in enumerate(names)} | (others or {})
    entries = (f'<span><i style="background:{color}"></i>{html.escape(name)}</span>' for name, color in colors.items())
    return f'<p class="legend">{"".join(entries)}</p>'


def _shares_chart(shares: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    names = list(next(iter(shares.values())))
    height, x_of = _ROW * len(shares) + 4, _scale(0, 1, _LEFT, _WIDTH - 10)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="where the time of each rank went">']
    for row, (rank, of_rank) in enumerate(shares.items()):
        parts.append(f'<text x="{_LEFT - 6}" y="{_ROW * row + 17}" text-anchor="end">{html.escape(rank)}</text>')
        begin, total = 0.0, max(1.0, sum(of_rank.values()))
        for place, name in enumerate(names):
            share = of_rank[name] / total
            x, width = x_of(begin), x_of(begin + share) - x_of(begin)
            begin += share
            if width >= 0.1:
                parts.append(
                    f'<rect x="{x:.1f}" y="{_ROW * row + 2}" width="{width:.1f}" height="{_ROW - 6}" '
                    f'fill="{_color(place)}"><title>{html.escape(rank)}: {share:.1%} {html.escape(name)}</title></rect>'
                )
    yield "".join([*parts, "</svg>"])
    yield _legend(names)


def _link_table(job: JobLog, links: Mapping[tuple[int, int], Link]) -> Iterator[str]:
    if not links:
        yield '<p class="note">No messages are recorded.</p>'
        return
    ends = sorted({end for pair in links for end in pair})
    best_rate, round_trip = (
        _best(links, name, pick) for name, pick in (("bytes_per_second", max), ("round_trip_seconds", min))
    )
    names = {end: html.escape(job.processes[end].name) for end in ends}
    rows = ["".join(["<tr><th></th>", *(f"<th>{names[end]}</th>" for end in ends), "</tr>"])]
    for one in ends:
        cells = [_link_cell(links.get((min(one, other), max(one, other))), best_rate, round_trip) for other in ends]
        rows.append(f"<tr><th>{names[one]}</th>{''.join(cells)}</tr>")
    yield f'<div class="scroll"><table>{"".join(rows)}</table></div>'
    yield (
        '<p class="note">What large messages get, and the shortest round trip. The redder, the worse than the best '
        "link.</p>"
    )


def _best(links: Mapping[tuple[int, int], Link], name: str, pick) -> float:
    known = [getattr(link, name) for link in links.values() if not math.isnan(getattr(link, name))]
    return float(pick(known)) if known else math.nan


def _link_cell(link: Link | None, best_rate: float, best_round_trip: float) -> str:
    if link is None:
        return "<td></td>"
    texts, worst = [], 1.0
    if not math.isnan(link.bytes_per_second):
        texts.append(rate(link.bytes_per_second))
        worst = max(worst, best_rate / link.bytes_per_second)
    if not math.isnan(link.round_trip_seconds):
        texts.append(duration(link.round_trip_seconds))
        worst = max(worst, link.round_trip_seconds / max(best_round_trip, 1e-9))
    depth = min(1.0, math.log(worst) / math.log(_WORST))
    return f'<td style="background:rgba(var(--bad), {0.7 * depth:.2f})">{"<br>".join(texts)}</td>'


def _metric_charts(job: JobLog) -> Iterator[str]:
    """Draws each metric together with its validation metric, for the first rank that has metrics."""
    process = next((each for each in job.ranks if any(line["kind"] == "metrics" for line in each.lines)), None)
    if process is None:
        yield '<p class="note">No metrics are recorded: `fit` records those of its epochs.</p>'
        return
    start = process.starts[0]
    points: dict[str, list[tuple[float, float]]] = {}
    for line in process.lines:
        for name, value in line["values"].items() if line["kind"] == "metrics" else ():
            if math.isfinite(value):
                points.setdefault(name, []).append((line["time"] - start, value))
    for name in dict.fromkeys(name.removeprefix("val_") for name in points):
        both = {each: np.array(points[each]).T for each in (name, f"val_{name}") if each in points}
        yield _line_chart({each: (x, y) for each, (x, y) in both.items()}, name)
        yield _legend(list(both))
    yield f'<p class="note">Of {html.escape(process.name)}. Across: seconds since it began.</p>'
