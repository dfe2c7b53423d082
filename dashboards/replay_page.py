"""The page of a replay: one HTML file that needs nothing else.

Here belong its table and words on a page; figures stand in `models/replay/report.py`.
"""

from __future__ import annotations

from html import escape

from dashboards.backtest_page import STYLE
from models.replay.report import NOTES, ReplayReport
from models.replay.workload import UNIT_WORDS

_STYLE = (
    STYLE + "body{max-width:1300px}td{white-space:nowrap;font-variant-numeric:tabular-nums}.asked td{font-weight:600}"
)


def replay_page(report: ReplayReport, name: str) -> str:
    """The page.

    Args:
        report: Outcome of a replay.
        name: What was replayed, as the name of a file.
    """
    head, *body = report.table()
    rows = "".join(
        f"<tr{' class=asked' if row[0] == report.asked else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for row in body
    )
    of = f"{len(report.workload):,} jobs of {name} on {report.total:,} {UNIT_WORDS[report.workload.unit]}"
    notes = "".join(f"<li>{escape(note)}</li>" for note in (*NOTES, *report.workload.dropped))
    gap = report.gap_closed()
    closed = (
        "" if gap is None else f"<p>{gap:.0%} of the way from EASY with limits to clairvoyance, in mean slowdown.</p>"
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Replay of {escape(name)}</title>'
        f"<style>{_STYLE}</style></head><body><main><h1>Replay: {escape(report.asked)}</h1><p>{escape(of)}</p>"
        f"<p><strong>{escape(report.verdict())}</strong></p>{closed}"
        f"<table><thead><tr>{''.join(f'<th scope=col>{escape(cell)}</th>' for cell in head)}</tr></thead>"
        f"<tbody>{rows}</tbody></table><h2>How to read it</h2><ul>{notes}</ul></main></body></html>\n"
    )
