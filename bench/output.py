"""What becomes of the rows: a table, JSON, a plot as PNG and inside a page, the README's table, the comparison with floors."""

from __future__ import annotations

import base64
import datetime
import html
import io
import json
import os
import platform
from pathlib import Path
from typing import Any

import rows as groups
from harness import CACHES, Row, median

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"

#: The rows that the README shows.
README = [
    "large/save-synced",
    "large/load",
    "large/load-no-checksums",
    "small/save",
    "small/load",
    "metadata/encode",
    "metadata/decode",
    "planning/read",
    "planning/save-512",
    "fsdp2/save",
    "fsdp2/load-3",
    "fsdp1-flat/out",
    "fsdp1-flat/in",
    "slices/load",
    "background/stall",
    "background/busy",
    "convert/torch",
    "convert/torch-peak",
    "convert/safetensors",
    "objects/load",
]


def machine() -> dict[str, Any]:
    import torch

    with open("/proc/cpuinfo") as info:
        names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": names[0] if names else platform.machine(),
        "memory_gb": round(memory / 1e9),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def amount(value: float, unit: str) -> str:
    """A number for people."""
    if unit == "s":
        for factor, name in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
            if value * factor >= 0.9995 or name == "µs":
                return f"{value * factor:.3g} {name}" if value * factor < 1000 else f"{value * factor:.0f} {name}"
    if unit == "×":
        return f"{value:.3f} ×"
    text = f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
    return f"{text} {unit}".strip()


def cell(samples: list[float], unit: str, spread: bool = True) -> str:
    if not samples:
        return "–"
    text = amount(median(samples), unit)
    if spread and len(samples) > 1:
        text += f" ({amount(min(samples), unit)}–{amount(max(samples), unit)})"
    return text


def times(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f} ×" if value >= 100 else f"{value:.1f} ×" if value >= 10 else f"{value:.2f} ×"


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}" if value >= 0.005 else f"{value:.1g}"


HEAD = ("row", "reshard", "the other", "ratio", "limit", "of limit")


def columns(row: Row, spread: bool = True) -> tuple[str, ...]:
    title = row.title
    if row.skipped:
        # The other side may have been measured all the same.
        return (title, "not measured", cell(row.other, row.unit, spread), "–", cell(row.limit, row.unit, False), "–")
    limit = f"{row.limit_name} {cell(row.limit, row.unit, False)}" if row.limit else "–"
    return (
        title,
        cell(row.ours, row.unit, spread),
        cell(row.other, row.unit, spread),
        times(row.ratio),
        limit,
        share(row.of_limit),
    )


def table(found: list[Row]) -> str:
    """For a terminal."""
    lines = [HEAD, *(columns(row) for row in found)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    out = []
    number = 0
    for position, line in enumerate(lines):
        row = found[position - 1] if position else None
        if row and row.group != number:
            number = row.group
            out.append(f"\n{number}. {groups.title(number)}")
        out.append(
            "  ".join(
                f"{text:<{width}}" if i == 0 else f"{text:>{width}}" for i, (text, width) in enumerate(zip(line, widths))
            ).rstrip()
        )
        if row and row.skipped:
            out.append(f"    {row.skipped}")
        elif row and (row.note or (row.other and row.beside != "PyTorch")):
            beside = f"the other is {row.beside}" if row.other and row.beside != "PyTorch" else ""
            out.append("    " + "; ".join(filter(None, (beside, row.note))))
    return "\n".join(out)


def document(found: list[Row], quick: bool, whole: bool, seconds: float) -> dict[str, Any]:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    about = {"when": now, "quick": quick, "whole": whole, "seconds": round(seconds, 1), "caches": CACHES, "machine": machine()}
    return {**about, "rows": [row.to_dict() for row in found]}


def plot(found: list[Row]) -> tuple[bytes, str]:
    """The ratios to the other side and the distance to the limit, as PNG and as SVG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [row for row in found if row.ratio is not None and row.unit == "s"]
    limited = [row for row in found if row.of_limit is not None and row.unit == "s"]
    height = 1.5 + 0.27 * max(len(shown), len(limited), 1)
    plt.rcParams.update({"font.size": 8, "svg.fonttype": "none", "svg.hashsalt": "reshard"})
    figure, (left, right) = plt.subplots(1, 2, figsize=(15, height), layout="constrained")
    for axis, kept, value, title, mark in (
        (left, shown, lambda row: row.ratio, "times faster than the other side (1 = as fast)", times),
        (right, limited, lambda row: row.of_limit, "share of the machine's limit (1 = no faster is possible)", share),
    ):
        values = [value(row) for row in kept]
        axis.barh(range(len(kept)), values, color=["#2a6f97" if number >= 1 or axis is right else "#c1553b" for number in values])
        axis.set_yticks(range(len(kept)), [row.title for row in kept])
        axis.invert_yaxis()
        axis.set_xscale("log")
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_title(title, fontsize=9)
        axis.margins(x=0.12)
        axis.spines[["top", "right"]].set_visible(False)
        for position, number in enumerate(values):
            axis.annotate(mark(number), (number, position), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7)
    png, svg = io.BytesIO(), io.StringIO()
    figure.savefig(png, format="png", dpi=110)
    figure.savefig(svg, format="svg", metadata={"Date": None})
    plt.close(figure)
    text = svg.getvalue()
    return png.getvalue(), text[text.index("<svg") :]


def growth(found: list[Row]) -> str:
    """How planning grows with ranks, as an image inside the page."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curve = [(int(row.key.rsplit("-", 1)[1]), row) for row in found if row.key.startswith("planning/save-")]
    if not any(row.ours for _, row in curve):
        return ""
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, label, color in (("ours", "reshard", "#2a6f97"), ("other", "PyTorch", "#c1553b")):
        points = [(size, median(getattr(row, name))) for size, row in curve if getattr(row, name)]
        if points:
            axis.plot(*zip(*points), marker="o", label=label, color=color)
    axis.set(xscale="log", yscale="log", xlabel="ranks × 500 tensors", ylabel="seconds", title="plan and commit of a save")
    axis.legend()
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    plt.close(figure)
    return f'<img alt="planning by number of ranks" src="data:image/png;base64,{base64.b64encode(image.getvalue()).decode()}">'


def page(found: list[Row], about: dict[str, Any], svg: str) -> str:
    """One page that needs nothing else."""
    body, number = [], 0
    for row in found:
        if row.group != number:
            number = row.group
            body.append(f'<tr><th colspan="6">{number}. {html.escape(groups.title(number))}</th></tr>')
        cells = "".join(f"<td>{html.escape(text)}</td>" for text in columns(row))
        beside = f"the other is {row.beside}" if row.beside != "PyTorch" and row.other else ""
        note = "; ".join(filter(None, (row.skipped, beside, row.note)))
        body.append(f"<tr>{cells}</tr>" + (f'<tr class="note"><td colspan="6">{html.escape(note)}</td></tr>' if note else ""))
    facts = "; ".join(f"{name} {value}" for name, value in about["machine"].items())
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in HEAD)
    trial = "<p><b>A trial with small sizes: the numbers mean nothing.</b></p>" if about["quick"] else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>reshard, measured</title><style>
body {{ font: 14px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1em; }}
table {{ border-collapse: collapse; width: 100%; }} td, th {{ padding: .2em .6em; text-align: left; border-top: 1px solid #ddd; }}
th[colspan] {{ padding-top: 1em; border: 0; }} .note td {{ border: 0; color: #666; font-size: 12px; padding-left: 2em; }}
td:not(:first-child) {{ font-variant-numeric: tabular-nums; }} svg, img {{ max-width: 100%; height: auto; }}
</style></head><body><h1>reshard, measured</h1>{trial}
<p>{html.escape(about["when"])}; {html.escape(facts)}. {html.escape(about["caches"])} Medians, with least and most in brackets.</p>
{svg}
{growth(found)}
<table><tr>{heads}</tr>{"".join(body)}</table></body></html>
"""


def write(found: list[Row], folder: Path, about: dict[str, Any]) -> list[Path]:
    """JSON, PNG and page. Results of a trial or of some groups go beside those of a whole run, never over them."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = "scratch/quick" if about["quick"] else "latest" if about["whole"] else "scratch/some"
    paths = [folder / f"{stem}.{suffix}" for suffix in ("json", "png", "html")]
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    paths[0].write_text(json.dumps(about, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    try:
        png, svg = plot(found)
    except ImportError:
        print("note: without matplotlib (bench/requirements.txt) there is no plot and no page")
        return paths[:1]
    paths[1].write_bytes(png)
    paths[2].write_text(page(found, about, svg))
    return paths


def write_readme(path: Path, about: dict[str, Any]) -> None:
    """Puts the table of a whole run between the README's marks."""
    by_key = {row["key"]: row for row in about["rows"]}
    lines = ["| | reshard | PyTorch | ratio | limit of the machine | of limit |", "|---|---:|---:|---:|---:|---:|"]
    for key in README:
        row = by_key.get(key)
        if row is None or row["skipped"] or row["ours"] is None:
            continue
        ours, other, limit = (row[side] and amount(row[side]["median"], row["unit"]) for side in ("ours", "other", "limit"))
        bound = f"{row['limit_name']}: {limit}" if limit else "–"
        lines.append(f"| {row['title']} | {ours} | {other or '–'} | {times(row['ratio'])} | {bound} | {share(row['of_limit'])} |")
    facts = about["machine"]
    lines += [
        "",
        f"Medians on {facts['cores']} cores ({facts['processor']}), {facts['memory_gb']} GB, PyTorch {facts['torch']}. {about['caches']}",
        "Every row, with spread, is in [bench/results/latest.json](bench/results/latest.json) and as a plot in",
        "[bench/results/latest.png](bench/results/latest.png).",
    ]
    text = path.read_text()
    before, rest = text.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    path.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}")


def failures(found: list[Row], floors: dict[str, dict[str, float]], chosen: set[int], number_of: dict[str, int]) -> list[str]:
    """What is below its floor, one line each."""
    by_key = {row.key: row for row in found}
    bad = []
    for key, floor in floors.items():
        row = by_key.get(key)
        if row is None:
            if number_of[key.split("/")[0]] in chosen:
                bad.append(f"{key}: has a floor and was not measured: no such row")
            continue
        name = f"{key} ({row.title})"
        if row.skipped:
            bad.append(f"{name}: has a floor and was not measured: {row.skipped}")
            continue
        for kind, value, words in (
            ("ratio", row.ratio, "times the other side"),
            ("of_limit", row.of_limit, "of the limit"),
            ("at_most", median(row.ours) if row.ours else None, row.unit),
        ):
            if kind not in floor:
                continue
            if value is None:
                bad.append(f"{name}: {kind} has a floor of {floor[kind]} and no value")
            elif (value > floor[kind]) if kind == "at_most" else (value < floor[kind]):
                bound = "at most" if kind == "at_most" else "at least"
                bad.append(f"{name}: {value:.3g} {words}, floor {bound} {floor[kind]}")
    return bad
