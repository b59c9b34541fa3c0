"""Write RESULTS.md and README.md's results from results/summary.json, the source of every number.

    python results/make_tables.py           # write both
    python results/make_tables.py --check   # write nothing; exit 1 when either differs

summary.json is one flat object, "<task>.<model>.<metric>" (or "<task>.<metric>") -> an entry with
exactly these fields:

    value      number: the mean over the seeds
    unit       text, such as "perplexity"
    published  the number to compare with, or null
    seeds      list of the integer seeds
    hardware   text
    command    text: what to type to get the number again
    commit     7 to 40 hexadecimal digits; several, where the seeds' differ: "0123abc, 4567def"
    log        path, relative to results/, of the raw JSON behind the value

published.toml has what others have published and claimed, and why ours differs: for the comparison.
What else was tried is in ptb/search.json.

Every problem is reported at once. Only the standard library is needed.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from claims import claim_problems, claims, format_problems, named_in, with_numbers
from compare import Published, comparison, comparison_problems, read_published, short_table
from tables import cell, code, number, table

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
NOTHING_YET = "No results have been recorded yet."

Entry = dict[str, Any]
Summary = dict[str, Entry]


# ---- reading and checking ----


class Problems(Exception):
    """Everything that is wrong, one line each."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


def read_json(path: Path) -> Any:
    """Strict JSON: no NaN or Infinity, no key twice. Raises ValueError."""

    def no_constants(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise ValueError(f"the same key twice: {', '.join(twice)}")
        return dict(pairs)

    text = path.read_text(encoding="utf-8")
    return json.loads(text, parse_constant=no_constants, object_pairs_hook=no_duplicates)


def is_integer(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def is_number(x: Any) -> bool:
    return is_integer(x) or (isinstance(x, float) and math.isfinite(x))


def is_text(x: Any) -> bool:
    return isinstance(x, str) and bool(x.strip()) and len(x.splitlines()) == 1


def is_seeds(x: Any) -> bool:
    return isinstance(x, list) and bool(x) and all(map(is_integer, x)) and len(set(x)) == len(x)


# field -> (is it well formed, what it must be)
FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "value": (is_number, "a finite number"),
    "unit": (is_text, "one line of text"),
    "published": (lambda x: x is None or is_number(x), "a finite number or null"),
    "seeds": (is_seeds, "a list of different integers, at least one"),
    "hardware": (is_text, "one line of text"),
    "command": (is_text, "one line of text"),
    "commit": (
        lambda x: (
            isinstance(x, str) and bool(re.fullmatch(r"[0-9a-f]{7,40}(, [0-9a-f]{7,40})*", x))
        ),
        "7 to 40 hexadecimal digits",
    ),
    "log": (is_text, "a path relative to results/"),
}
# (A model's name may have a dot of its own: an4.prune_0.01.per.)
KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+){1,3}")


def log_problem(log: str, folder: Path) -> str | None:
    path = (folder / log).resolve()
    if not path.is_relative_to(folder.resolve()) or path == (folder / "summary.json").resolve():
        return f"must be a file of its own under results/, got {log!r}"
    if not path.is_file():
        return f"results/{log} does not exist"
    try:
        read_json(path)
    except ValueError as error:
        return f"results/{log} is not valid JSON: {error}"
    return None


def entry_problems(entry: Any, folder: Path) -> list[str]:
    if not isinstance(entry, dict):
        return [f"must be an object with the fields {', '.join(FIELDS)}"]
    problems = [f"{field} is missing" for field in FIELDS if field not in entry]
    problems += [f"{field} is not a known field" for field in entry if field not in FIELDS]
    for field, (well_formed, wanted) in FIELDS.items():
        if field not in entry:
            continue
        if not well_formed(entry[field]):
            problems.append(f"{field} must be {wanted}, got {json.dumps(entry[field])}")
        elif field == "log" and (problem := log_problem(entry["log"], folder)):
            problems.append(f"log: {problem}")
    return problems


def read_summary(folder: Path) -> Summary:
    """The checked entries of folder/summary.json, in the file's own order."""
    try:
        summary = read_json(folder / "summary.json")
    except FileNotFoundError:
        raise Problems(["results/summary.json does not exist"]) from None
    except ValueError as error:
        raise Problems([f"results/summary.json is not valid JSON: {error}"]) from None
    if not isinstance(summary, dict):
        raise Problems(["results/summary.json must be one object"])
    problems = []
    for key, entry in summary.items():
        if not KEY.fullmatch(key):
            problems.append(f"{key}: a key must read <task>.<model>.<metric> or <task>.<metric>")
        problems += [f"{key}: {problem}" for problem in entry_problems(entry, folder)]
    if problems:
        raise Problems(problems)
    return summary


# ---- writing ----


def search_table(folder: Path) -> list[str]:
    """What was tried on the validation text."""
    path = folder / "ptb" / "search.json"
    if not path.exists():
        return []
    tried = sorted(read_json(path), key=lambda job: job["valid"])
    rows = [
        [
            code(job["name"]),
            f"{job['valid']:.2f}",
            "-" if job["valid_de"] is None else f"{job['valid_de']:.2f}",
            str(job["epochs"]),
            code(" ".join(job["overrides"])),
            code(job["commit"]),
        ]
        for job in tried
    ]
    header = ["job", "valid", "valid, dynamic", "epochs", "what was changed", "commit"]
    said = "Perplexity of the validation text, by which settings are chosen, one seed each.\n"
    return ["### What was tried\n", said, table(header, rows)]


def figures(root: Path, named: dict[str, str]) -> list[str]:
    """Those that are drawn already."""
    there = {name: text for name, text in named.items() if (root / "docs" / name).exists()}
    return [f"![{text}](docs/{name})\n" for name, text in there.items()]


def results_page(summary: Summary, published: Published, root: Path) -> str:
    parts = [
        "# Results\n",
        "Generated from [results/summary.json](results/summary.json) by `make results`; "
        "do not edit by hand.\n",
        *claims(published, summary),
    ]
    sections = published["section"]
    for chapter in published.get("chapter", []):
        own = [section for section in sections if section["chapter"] == chapter["name"]]
        parts += [f"## {chapter['title']}\n", f"{chapter['intro']}\n", *comparison(own, summary)]
        if chapter["name"] == "ptb":
            parts += search_table(root / "results")
        parts += figures(root, chapter.get("figures", {}))
    if not summary:
        return "\n".join([*parts, NOTHING_YET + "\n"])
    tasks: dict[str, list[list[str]]] = {}
    for key, entry in summary.items():
        task, metric = key.split(".", 1)
        row = [
            code(metric),
            f"{number(entry['value'])} {cell(entry['unit'])}",
            number(entry["published"]),
            ", ".join(map(str, entry["seeds"])),
            cell(entry["hardware"]),
            code(entry["command"]),
            code(entry["commit"]),
            f"[log](<results/{entry['log']}>)",
        ]
        tasks.setdefault(task, []).append(row)
    header = ["metric", "ours", "published", "seeds", "hardware", "command", "commit", "log"]
    parts.append("`ours` is the mean over the seeds; `-` means that nothing was published.\n")
    parts += [f"## {task}\n\n{table(header, rows)}" for task, rows in tasks.items()]
    return "\n".join(parts)


def readme_results(summary: Summary, published: Published) -> str:
    """The short table, and the highlights, with numbers of the summary in them."""
    if not summary:
        return NOTHING_YET + "\n"
    tables = [short_table(s, summary) for s in published["section"] if s.get("short")]
    lines = [
        f"- **{line['of']}.** {with_numbers(line['says'], summary)}\n"
        for line in published["highlights"]
    ]
    return "\n".join([*tables, "".join(lines)])


def highlight_problems(summary: Summary, published: Published) -> list[str]:
    texts = [line["says"] for line in published["highlights"]]
    named = {key for text in texts for key in named_in(text)}
    return [problem for text in texts for problem in format_problems(text)] + [
        f"published.toml: a highlight names {key}, which is not in summary.json"
        for key in sorted(named - summary.keys())
        if summary
    ]


def with_table(readme: str, generated: str) -> str:
    """README's text with what lies between the markers replaced."""
    if re.findall(r"<!-- results:\w+ -->", readme) != [BEGIN, END]:
        raise Problems([f"README.md must hold {BEGIN} and then {END}, once each"])
    before, rest = readme.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{generated}{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Tables from results/summary.json.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if they differ")
    check = parser.parse_args().check

    readme, page = ROOT / "README.md", ROOT / "RESULTS.md"
    try:
        summary = read_summary(ROOT / "results")
        try:
            published = read_published(ROOT / "results")
        except ValueError as error:
            raise Problems([f"results/published.toml is not valid TOML: {error}"]) from None
        problems = comparison_problems(published, summary)
        problems += highlight_problems(summary, published) + claim_problems(published, summary)
        if problems:
            raise Problems(problems)
        readme_now = readme.read_text(encoding="utf-8") if readme.exists() else ""
        wanted = {
            page: results_page(summary, published, ROOT),
            readme: with_table(readme_now, readme_results(summary, published)),
        }
    except Problems as found:
        print(*found.lines, sep="\n", file=sys.stderr)
        return 1

    stale = [
        path
        for path, text in wanted.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path in stale:
        if check:
            print(f"{path.name} differs from results/summary.json: make results", file=sys.stderr)
        else:
            path.write_text(wanted[path], encoding="utf-8")
            print(f"wrote {path.name}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
