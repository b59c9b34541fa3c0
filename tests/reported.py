"""A report's page as a test reads it: what is in its tables, its words and its figures."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


class Page(HTMLParser):
    """Elements by the text in them; `data` is what the page's script is given."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: dict[str, list[str]] = {}
        self.words: list[str] = []
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self._texts: dict[str, str] = {}
        self.feed(self.source)
        self.data: dict[str, Any] = json.loads(self._texts["data"])

    @property
    def text(self) -> str:
        return self._texts[""]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "input", "br", "img"):
            self._open.append(self.tags[-1])
        if tag == "td":
            self.rows.setdefault(self._row(), []).append("")
        if tag == "span" and "w" in (dict(attrs).get("class") or "").split():
            self.words.append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        tag, attributes = self._open[-1] if self._open else ("", {})
        key = (attributes.get("id") or "script") if tag in ("script", "style") else ""
        self._texts[key] = self._texts.get(key, "") + data
        if tag == "td":
            self.rows[self._row()][-1] += data
        if tag == "span" and "w" in (attributes.get("class") or "").split():
            self.words[-1] += data

    def _row(self) -> str:
        return next((a["data-row"] or "" for _, a in reversed(self._open) if "data-row" in a), "")

    def lines(self, figure: str) -> list[tuple[str, list[Any]]]:
        """The name and the y values of each line of a figure."""
        return [(trace["name"], trace["y"]) for trace in self.data["figures"][figure]["data"]]
