"""Numbers, cells and tables as Markdown."""


def number(x: float | int | None) -> str:
    if x is None:
        return "-"
    if isinstance(x, int) or abs(x) >= 1e5:
        return f"{x:.0f}"
    return f"{x:.6g}"


def cell(text: str) -> str:
    return text.strip().replace("|", r"\|")


def code(text: str) -> str:
    ticks = "``" if "`" in text else "`"
    space = " " if "`" in text else ""
    return f"{ticks}{space}{cell(text)}{space}{ticks}"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
