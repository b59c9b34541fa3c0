"""Ours beside what others have published: published.toml and the summary, as Markdown.

published.toml says for each number where it stands, what was published, and why ours differs.
"""

import tomllib
from pathlib import Path
from typing import Any

from tables import cell, number, table

NOT_RUN = "not run yet"
NEEDS_A_NOTE = 0.01
"""A model that is further off than this, relative to what was published, must have a note."""

Summary = dict[str, dict[str, Any]]
Published = dict[str, Any]
Row = dict[str, Any]


def read_published(folder: Path) -> Published:
    """folder/published.toml (nothing was published where it is not there). Raises ValueError."""
    path = folder / "published.toml"
    if not path.exists():
        return {"highlights": [], "section": []}
    return tomllib.loads(path.read_text(encoding="utf-8"))


def ours(row: Row, summary: Summary) -> float | None:
    """The number of a row's key, or the ratio of its two; None where there is no run."""
    keys = row["key"].split(" / ")
    if not all(key in summary for key in keys):
        return None
    values = [summary[key]["value"] for key in keys]
    return float(values[0] if len(values) == 1 else values[0] / values[1])


def seeds_of(row: Row, summary: Summary) -> list[int]:
    """Those behind a row's number."""
    known = [summary[key] for key in row["key"].split(" / ") if key in summary]
    return list(dict.fromkeys(seed for entry in known for seed in entry["seeds"]))


def comparison_problems(published: Published, summary: Summary) -> list[str]:
    """Differences that no note explains, notes on nothing, and contradicting numbers."""
    problems = []
    for section in published["section"]:
        notes = section.get("notes", {})
        models = {row["model"] for row in section["rows"]}
        named = {"a note on": notes, "short names": section.get("short", [])}
        problems += [
            f"published.toml: {says} {model}, which has no row"
            for says, names in named.items()
            for model in sorted(set(names) - models)
        ]
        for row in section["rows"]:
            there, mine = row.get("published"), ours(row, summary)
            if there is None or mine is None:
                continue
            if abs(mine / there - 1) > NEEDS_A_NOTE and row["model"] not in notes:
                problems.append(
                    f"published.toml: {row['key']} is {number(mine)} and {number(there)} was "
                    f"published; say why in a note on {row['model']!r} of {section['title']!r}"
                )
            entry = summary.get(row["key"])
            if entry is not None and entry["published"] != there:
                problems.append(
                    f"{row['key']}: published is {number(entry['published'])} in summary.json and "
                    f"{number(there)} in published.toml"
                )
    return problems


def comparison(sections: list[dict[str, Any]], summary: Summary) -> list[str]:
    """Ours beside every published number, a table a section, with the notes below it."""
    parts = []
    for section in sections:
        rows = []
        for row in section["rows"]:
            mine, there = ours(row, summary), row.get("published")
            off = "" if mine is None or there is None else f"{100 * (mine / there - 1):+.1f} %"
            said = row.get("says") or number(there)
            seeds = ", ".join(map(str, seeds_of(row, summary))) or "-"
            of = [cell(row["model"]), cell(row["what"])]
            rows.append([*of, shown(mine), seeds, cell(said), off or "-"])
        header = ["model", "figure", "ours", "seeds", "published", "difference"]
        notes = [f"- {model}: {note}" for model, note in section.get("notes", {}).items()]
        below = "\n".join(notes) + "\n" if notes else ""
        parts += [f"### {section['title']}\n", table(header, rows), below]
    return [part for part in parts if part]


def shown(x: float | None) -> str:
    return NOT_RUN if x is None else f"{x:.4g}"


def short_table(section: dict[str, Any], summary: Summary) -> str:
    """A line for each model in `short`: ours, and what was published in brackets."""
    columns = list(dict.fromkeys(row["what"] for row in section["rows"]))
    lines: dict[str, dict[str, str]] = {}
    seeds: dict[str, list[int]] = {}
    for row in section["rows"]:
        if row["model"] not in section["short"]:
            continue
        said = row.get("says") or row.get("published")
        there = "" if said is None else f" ({said})"
        lines.setdefault(row["model"], {})[row["what"]] = f"{shown(ours(row, summary))}{there}"
        seeds.setdefault(row["model"], []).append(len(seeds_of(row, summary)))
    rows = [
        [
            cell(model),
            *(cell(cells.get(column, "-")) for column in columns),
            str(min(filter(None, seeds[model]), default="-")),
        ]
        for model, cells in lines.items()
    ]
    said = f"{section['title']}; ours, and in brackets the published number.\n\n"
    return said + table(["model", *columns, "seeds"], rows)
