"""What the papers claim, and whether it holds here, as Markdown.

published.toml has the claims, each with a verdict, and with comparisons of the summary's numbers
that are to be true, so that a verdict cannot outlive its numbers.
"""

import re
from math import prod

from compare import Published, Summary, shown
from tables import cell, table

NAMED = re.compile(r"\{([^}:]*)(?::([^}]*))?\}")
"""A key of the summary in a text, whose number stands there in the end, in the format behind a
colon where there is one: {a.key} or {a.key:.1f}."""
VERDICTS = {"yes": "hold", "in part": "hold in part", "no": "do not"}
CLAIMS = "Which of the papers' claims hold here"


def with_numbers(text: str, summary: Summary) -> str:
    """A text with the numbers of the keys that it names."""

    def said(found: re.Match[str]) -> str:
        value = summary[found[1]]["value"]
        return format(value, found[2]) if found[2] else shown(value)

    return NAMED.sub(said, text)


def named_in(text: str) -> set[str]:
    """The keys that a text names."""
    return {key for key, _ in NAMED.findall(text)}


def format_problems(text: str) -> list[str]:
    """Formats that no number can be given in, and braces that name nothing."""
    problems = []
    for _, wanted in NAMED.findall(text):
        try:
            format(0.5, wanted)
        except ValueError:
            problems.append(f"published.toml: {wanted!r} is no format of a number, in {text!r}")
    if re.search(r"[{}]", NAMED.sub("", text)):
        problems.append(f"published.toml: a brace that names nothing, in {text!r}")
    return problems


def is_number(word: str) -> bool:
    return bool(re.fullmatch(r"\d+(\.\d+)?", word))


def keys_of(comparison: str) -> list[str]:
    """Those that "a.key * 1.01 < another.key" names."""
    return [word for word in re.split(r" [<*] ", comparison) if not is_number(word)]


def is_true(comparison: str, summary: Summary) -> bool:
    def value(word: str) -> float:
        return float(word if is_number(word) else summary[word]["value"])

    low, high = (prod(map(value, side.split(" * "))) for side in comparison.split(" < "))
    return low < high


def anchor(title: str) -> str:
    """Where a heading is found on its page, as GitHub names it."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def claim_problems(published: Published, summary: Summary) -> list[str]:
    """Claims whose verdict the summary does not bear out, or that name what is not there."""
    problems = []
    titles = {section["title"] for section in published["section"]}
    for claim in published.get("claim", []) if summary else ():
        name = f"published.toml: the claim {claim['says']!r}"
        if claim["holds"] not in VERDICTS:
            problems.append(f"{name} must hold {', '.join(VERDICTS)}, got {claim['holds']!r}")
        if claim["see"] not in titles and ".md#" not in claim["see"]:
            problems.append(f"{name} leads to {claim['see']!r}, which is no section")
        named = named_in(claim["here"]) | {k for c in claim["because"] for k in keys_of(c)}
        problems += format_problems(claim["here"])
        missing = sorted(named - summary.keys())
        problems += [f"{name} names {key}, which is not in summary.json" for key in missing]
        if not missing:
            problems += [
                f"{name} holds {claim['holds']!r} because {comparison}, which is not so"
                for comparison in claim["because"]
                if not is_true(comparison, summary)
            ]
    return problems


def claims(published: Published, summary: Summary) -> list[str]:
    """The answer in short: each claim, whether it holds and by which numbers, with a link."""
    known = published.get("claim", []) if summary else []
    if not known:
        return []
    rows = []
    for claim in known:
        link = claim["see"] if ".md#" in claim["see"] else f"#{anchor(claim['see'])}"
        said = f"[{cell(claim['says'])}](<{link}>)"
        rows.append([cell(claim["of"]), said, claim["holds"], with_numbers(claim["here"], summary)])
    verdicts = [claim["holds"] for claim in known]
    counts = [f"{verdicts.count(verdict)} {words}" for verdict, words in VERDICTS.items()]
    said = f"Of {len(known)} claims {', '.join(counts)}."
    unit = "Perplexity of test, where nothing else is said.\n"
    return [f"## {CLAIMS}\n", f"{said} {unit}", table(["of", "claim", "holds", "here"], rows)]
