"""What a notebook shows: a little style, sizes, and a small treemap. Everything from a checkpoint is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape as _escape_markup
from unicodedata import category

#: Colours that differ for every kind of eye; text on them stays the notebook's own.
_HUES = ("#5182da", "#efae2b", "#25857a", "#d677a0", "#88d0f5", "#a03612", "#775ccb", "#8a8931")
#: In pixels.
_WIDTH, _HEIGHT = 640, 132

_STYLE = """<style>
.reshard-view{font-size:13px;line-height:1.5;max-width:960px}
.reshard-view .title{font-weight:600;font-size:14px;overflow-wrap:anywhere}
.reshard-view .soft{opacity:.68}
.reshard-view table{border-collapse:collapse;margin:8px 0 0;font-variant-numeric:tabular-nums}
.reshard-view th,.reshard-view td{text-align:left!important;padding:3px 16px 3px 0!important;background:none!important;
border:0;border-top:1px solid color-mix(in srgb,currentColor 14%,transparent);vertical-align:top;overflow-wrap:anywhere}
.reshard-view th{font-weight:500;opacity:.8;white-space:nowrap}
.reshard-view td.num{text-align:right!important;white-space:nowrap}
.reshard-view code{background:none!important;font-size:12px;padding:0}
.reshard-view .map{position:relative;max-width:100%;margin:8px 0 0;overflow:hidden}
.reshard-view .map span{position:absolute;overflow:hidden;white-space:nowrap;text-overflow:ellipsis;border-radius:3px;
font-size:11px;line-height:14px;padding:1px 5px;box-sizing:border-box}
.reshard-view .good{color:#1d8a68}.reshard-view .bad{color:#d6453a}.reshard-view .warn{color:#b57a08}
</style>"""


def escape(text: str) -> str:
    """Text as markup. Characters that nobody sees, or that turn others round, are written out."""
    shown = "".join(f"<U+{ord(c):04X}>" if category(c) in ("Cc", "Cf", "Zl", "Zp") else c for c in text)
    return _escape_markup(shown)


def _end(name: str, most: int) -> str:
    """The end of a key, which tells it from others: as many of its parts as there is room for."""
    parts = name.split(".")
    kept = parts.pop()
    while parts and len(kept) + len(parts[-1]) < most:
        kept = f"{parts.pop()}.{kept}"
    return f"….{kept}" if parts else kept


def card(title: str, note: str, *parts: str) -> str:
    """A titled box; the parts are markup already."""
    head = f'<div class="title">{escape(title)} <span class="soft">{escape(note)}</span></div>'
    return f'{_STYLE}<div class="reshard-view">{head}{"".join(parts)}</div>'


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """A table of names and what they are."""
    body = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{body}</table>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A table with a head; the first column is a name, those counted in ``numbers`` stand to the right."""

    def cell(i: int, text: str) -> str:
        if i == 0:
            return f"<td><code>{escape(text)}</code></td>"
        return f'<td class="num">{escape(text)}</td>' if i in numbers else f"<td>{escape(text)}</td>"

    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(cell(i, text) for i, text in enumerate(row))}</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def more(count: int, what: str) -> str:
    """A line about what a table leaves out."""
    return f"<p class=soft>and {count} more {what}{'s' if count > 1 else ''}</p>" if count > 0 else ""


def treemap(sizes: dict[str, tuple[int, str]]) -> str:
    """Boxes by size, each with a name and a word on it: `{name: (size, word)}`."""
    items = sorted(((size, name, word) for name, (size, word) in sizes.items() if size > 0), reverse=True)
    if not items:
        return ""
    kept, rest = items[:39], items[39:]
    if rest:
        kept.append((sum(size for size, _, _ in rest), f"{len(rest)} more", ""))
    boxes = []
    for i, (item, (x, y, w, h)) in enumerate(zip(kept, _boxes([size for size, _, _ in kept]), strict=True)):
        _, name, word = item
        label = (
            f"{escape(_end(name, int(w / 6)))} <span class=soft style='position:static;padding:0'>{escape(word)}</span>"
            if w > 46 and h > 14
            else ""
        )
        place = f"left:{x:.1f}px;top:{y:.1f}px;width:{max(w - 2, 1):.1f}px;height:{max(h - 2, 1):.1f}px"
        hue = f"background:color-mix(in srgb,{_HUES[i % len(_HUES)]} 38%,transparent)"
        boxes.append(f'<span style="{place};{hue}" title="{escape(f"{name} {word}".strip())}">{label}</span>')
    return f'<div class="map" style="width:{_WIDTH}px;height:{_HEIGHT}px">{"".join(boxes)}</div>'


def _boxes(sizes: Sequence[int]) -> list[tuple[float, float, float, float]]:
    """Squarified boxes of sizes that fall: the shorter side takes as many as keep them closest to squares."""
    x, y, w, h = 0.0, 0.0, float(_WIDTH), float(_HEIGHT)
    left, boxes, at = float(sum(sizes)), [], 0
    while at < len(sizes):
        side, scale = min(w, h), (w * h) / left if left else 0.0
        best, to, area = float("inf"), at, 0.0
        while to < len(sizes):
            grown = area + sizes[to] * scale
            worst = (
                max(side**2 * sizes[at] * scale / grown**2, grown**2 / (side**2 * sizes[to] * scale)) if grown and side else 0.0
            )
            if worst > best:
                break
            best, area, to = worst, grown, to + 1
        thick, along = (area / side if side else 0.0), 0.0
        for size in sizes[at:to]:
            length = size * scale / thick if thick else 0.0
            boxes.append((x, y + along, thick, length) if w >= h else (x + along, y, length, thick))
            along, left = along + length, left - size
        if w >= h:
            x, w = x + thick, w - thick
        else:
            y, h = y + thick, h - thick
        at = to
    return boxes
