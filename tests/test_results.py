"""RESULTS.md and README's table say what results/summary.json says, and nothing else."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from ptb_jobs import made_up_job, write_jobs

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("make_tables", "claims", "compare", "tables", "collect_ptb", "drawing", "plot_ptb")
README = "# title\n\n<!-- results:begin -->\n<!-- results:end -->\n\nthe end\n"


def run(root: Path, *flags: str, script: str = "make_tables") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "results" / f"{script}.py"), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def entry(**changes: Any) -> dict[str, Any]:
    made_up = {
        "value": 12.5,
        "unit": "perplexity",
        "published": None,
        "seeds": [0, 1],
        "hardware": "a laptop | one core",
        "command": "bayesrnn train toy.toml --out runs/toy",
        "commit": "0123abc",
        "log": "toy.json",
    }
    return made_up | changes


def record(root: Path, summary: Any) -> None:
    (root / "results" / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small repository: the script, one raw log, a README with markers, no results."""
    (tmp_path / "results").mkdir()
    for name in SCRIPTS:
        shutil.copy(ROOT / "results" / f"{name}.py", tmp_path / "results")
    (tmp_path / "results" / "toy.json").write_text('{"perplexity": [12.0, 13.0]}')
    (tmp_path / "README.md").write_text(README)
    record(tmp_path, {})
    return tmp_path


def test_every_log_is_behind_a_number_or_a_sentence():
    folder = ROOT / "results"
    said = [ROOT / "RESULTS.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("benchmarks/*.py")]
    text = "\n".join(path.read_text() for path in said)
    logs = [p for p in folder.rglob("*.json") if p != folder / "summary.json"]
    unused = [p.name for p in logs if p.relative_to(folder).as_posix() not in text]
    assert unused == []


@pytest.mark.parametrize("script", ["make_tables", "collect_ptb"])
def test_the_repository_has_not_drifted(script: str):
    checked = run(ROOT, "--check", script=script)
    assert checked.returncode == 0, checked.stderr


def test_an_empty_summary_says_so(root: Path):
    assert run(root).returncode == 0
    assert "No results have been recorded yet." in (root / "RESULTS.md").read_text()
    assert "No results have been recorded yet." in (root / "README.md").read_text()
    assert run(root, "--check").returncode == 0


def test_an_entry_is_rendered_and_a_highlight_names_it(root: Path):
    record(root, {"toy.brnn.valid": entry(), "other.lstm.test": entry(value=3, published=4.25)})
    assert run(root).returncode == 0
    page, readme = (root / "RESULTS.md").read_text(), (root / "README.md").read_text()
    assert page.index("## toy") < page.index("## other")
    assert (
        "| `brnn.valid` | 12.5 perplexity | - | 0, 1 | a laptop \\| one core "
        "| `bayesrnn train toy.toml --out runs/toy` | `0123abc` | [log](<results/toy.json>) |"
    ) in page
    assert "12.5" not in readme
    assert readme.startswith("# title\n")
    assert readme.endswith("\n\nthe end\n")
    assert run(root, "--check").returncode == 0


def test_a_changed_value_is_caught_and_nothing_is_written(root: Path):
    publish(root, brnn_valid=78.8)
    assert run(root).returncode == 0
    before = (root / "RESULTS.md").read_text(), (root / "README.md").read_text()
    publish(root, brnn_valid=78.7)
    checked = run(root, "--check")
    assert checked.returncode == 1
    assert "RESULTS.md differs" in checked.stderr
    assert "README.md differs" in checked.stderr
    assert "make results" in checked.stderr
    assert ((root / "RESULTS.md").read_text(), (root / "README.md").read_text()) == before


def test_an_edit_by_hand_is_caught(root: Path):
    run(root)
    page = root / "RESULTS.md"
    page.write_text(page.read_text() + "and the best in the world\n")
    checked = run(root, "--check")
    assert checked.returncode == 1
    assert "RESULTS.md differs" in checked.stderr
    assert "README.md" not in checked.stderr


def test_all_problems_are_named_at_once(root: Path):
    (root / "results" / "broken.json").write_text("{")
    without_unit = entry()
    del without_unit["unit"]
    record(
        root,
        {
            "valid": entry(),
            "toy.a.valid": without_unit | {"note": "hello"},
            "toy.b.valid": entry(value=True, published="79", seeds=3, commit="HEAD", hardware=""),
            "toy.c.valid": entry(log="absent.json"),
            "toy.d.valid": entry(log="broken.json"),
            "toy.e.valid": entry(log="../README.md"),
            "toy.f.valid": 12.5,
        },
    )
    checked = run(root)
    assert checked.returncode == 1
    expected = [
        "valid: a key must read <task>.<model>.<metric> or <task>.<metric>",
        "toy.a.valid: unit is missing",
        "toy.a.valid: note is not a known field",
        "toy.b.valid: value must be a finite number, got true",
        'toy.b.valid: published must be a finite number or null, got "79"',
        "toy.b.valid: seeds must be a list",
        "toy.b.valid: hardware must be one line of text",
        "toy.b.valid: commit must be 7 to 40 hexadecimal digits",
        "toy.c.valid: log: results/absent.json does not exist",
        "toy.d.valid: log: results/broken.json is not valid JSON",
        "toy.e.valid: log: must be a file of its own under results/",
        "toy.f.valid: must be an object",
    ]
    lines = checked.stderr.splitlines()
    assert len(lines) == len(expected)
    for line, start in zip(lines, expected, strict=True):
        assert line.startswith(start)
    assert not (root / "RESULTS.md").exists()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must be one object"),
        ('{"a.b.c": 1, "a.b.c": 2}', "the same key twice: a.b.c"),
        ('{"a.b.c": NaN}', "NaN is not JSON"),
    ],
)
def test_a_summary_that_is_not_one_json_object(root: Path, text: str, problem: str):
    (root / "results" / "summary.json").write_text(text)
    checked = run(root)
    assert checked.returncode == 1
    assert problem in checked.stderr


def test_readme_must_have_its_markers(root: Path):
    (root / "README.md").write_text("# title\n")
    checked = run(root)
    assert checked.returncode == 1
    assert "README.md must hold <!-- results:begin -->" in checked.stderr


# --- beside the papers -----------------------------------------------------------------------

PUBLISHED = """
highlights = [
  { of = "Toys", says = "{toy.brnn.valid}, {toy.brnn.valid:.2f}; the paper's {ptb.brnn.valid}" },
]
[[claim]]
of = "A paper"
says = "Bayes | is better"
holds = "yes"
here = "{toy.brnn.valid} against 13"
because = ["1.01 * toy.brnn.valid < 13", "12 < toy.brnn.valid"]
see = "Table 1: in figures"
[[claim]]
of = "A paper"
says = "It is fast"
holds = "no"
here = "it was not measured"
because = []
see = "docs/speed.md#how-fast"
[[chapter]]
name = "ptb"
title = "Beside the papers"
intro = "Made by machines."
figures = { "drawn.svg" = "A drawing", "missing.svg" = "None", "ptb-gap.svg" = "The gap" }
[[chapter]]
name = "others"
title = "Others"
intro = "Nothing yet."
[[section]]
chapter = "ptb"
title = "Table 1: in figures"
short = ["Bayesian", "Dropout"]
rows = [
  { model = "Bayesian", what = "valid", key = "ptb.brnn.valid", published = 78.8 },
  { model = "Bayesian", what = "test", key = "ptb.brnn.test", published = 75.5 },
  { model = "Dropout", what = "valid", key = "ptb.dropout.valid", published = 86.2 },
  { model = "Speed", what = "test", key = "ptb.a.b / ptb.c.d", published = 0.7, says = "0.7 x" },
]
[section.notes]
"Speed" = "It is faster."
"""


def publish(root: Path, **values: float) -> None:
    """published.toml, and a summary with these values."""
    (root / "results" / "published.toml").write_text(PUBLISHED)
    known = {"brnn_valid": 78.8, "brnn_test": 75.5, "dropout_valid": 86.2}
    keys = {name: f"ptb.{name.replace('_', '.')}" for name in values}
    made = {
        keys[name]: entry(value=value, published=known.get(name)) for name, value in values.items()
    }
    record(root, made | {"toy.brnn.valid": entry()})


def test_ours_stands_beside_what_was_published(root: Path):
    publish(root, brnn_valid=78.06, brnn_test=75.123, a_b=9.0, c_d=10.0)
    (root / "docs").mkdir(exist_ok=True)
    (root / "docs" / "drawn.svg").write_text("<svg/>")
    assert run(root).returncode == 0
    page, readme = (root / "RESULTS.md").read_text(), (root / "README.md").read_text()
    assert "| Bayesian | valid | 78.06 | 0, 1 | 78.8 | -0.9 % |" in page
    assert "| Bayesian | test | 75.12 | 0, 1 | 75.5 | -0.5 % |" in page
    assert "| Dropout | valid | not run yet | - | 86.2 | - |" in page
    assert "| Speed | test | 0.9 | 0, 1 | 0.7 x | +28.6 % |" in page
    assert "- Speed: It is faster.\n" in page
    assert page.index("## Beside the papers") < page.index("![A drawing](docs/drawn.svg)")
    assert page.index("![A drawing]") < page.index("## Others\n\nNothing yet.")
    assert "missing.svg" not in page
    assert "| `brnn.valid` | 78.06 perplexity | 78.8 |" in page
    assert "| Bayesian | 78.06 (78.8) | 75.12 (75.5) | 2 |" in readme
    assert "| Dropout | not run yet (86.2) | - | - |" in readme
    assert "- **Toys.** 12.5, 12.50; the paper's 78.06\n" in readme
    assert "Speed" not in readme
    assert "`toy.brnn.valid`" not in readme
    assert run(root, "--check").returncode == 0


def test_a_difference_must_be_explained_and_numbers_may_not_contradict_each_other(root: Path):
    publish(root, brnn_valid=80.0)
    checked = run(root)
    assert checked.returncode == 1
    assert "ptb.brnn.valid is 80 and 78.8 was published; say why in a note" in checked.stderr
    text = PUBLISHED.replace("86.2", "86.3").replace('"Speed" =', '"Nobody" = "x"\n"Bayesian" =')
    text = text.replace('"Dropout"]', '"No one"]')
    publish(root, brnn_valid=80.0, dropout_valid=86.2)
    (root / "results" / "published.toml").write_text(text)
    checked = run(root)
    assert "a note on Nobody, which has no row" in checked.stderr
    assert "short names No one, which has no row" in checked.stderr
    assert "published is 86.2 in summary.json and 86.3 in published.toml" in checked.stderr
    assert "say why" not in checked.stderr
    assert not (root / "RESULTS.md").exists()


def test_a_highlight_may_not_name_what_is_not_there(root: Path):
    publish(root, brnn_valid=78.8)
    record(root, {"ptb.brnn.valid": entry(value=78.8, published=78.8)})
    checked = run(root)
    assert checked.returncode == 1
    assert "a highlight names toy.brnn.valid, which is not in summary.json" in checked.stderr


def test_a_number_must_have_a_format(root: Path):
    publish(root, brnn_valid=78.8)
    text = PUBLISHED.replace("{toy.brnn.valid:.2f}", "{toy.brnn.valid:1x}")
    text = text.replace('here = "{toy.brnn.valid} against', 'here = "{toy.brnn.valid against')
    (root / "results" / "published.toml").write_text(text)
    checked = run(root)
    assert checked.returncode == 1
    assert "published.toml: '1x' is no format of a number, in" in checked.stderr
    assert "a brace that names nothing, in '{toy.brnn.valid against" in checked.stderr
    assert "Traceback" not in checked.stderr


def test_the_page_begins_with_the_claims_and_whether_they_hold(root: Path):
    publish(root, brnn_valid=78.06)
    assert run(root).returncode == 0
    page = (root / "RESULTS.md").read_text()
    assert "Of 2 claims 1 hold, 0 hold in part, 1 do not." in page
    link = "[Bayes \\| is better](<#table-1-in-figures>)"
    assert f"| A paper | {link} | yes | 12.5 against 13 |" in page
    assert "| [It is fast](<docs/speed.md#how-fast>) | no | it was not measured |" in page
    assert page.index("Of 2 claims") < page.index("## Beside the papers")


def test_a_verdict_may_not_outlive_its_numbers(root: Path):
    publish(root, brnn_valid=78.8)
    known = {"ptb.brnn.valid": entry(value=78.8, published=78.8)}
    record(root, known | {"toy.brnn.valid": entry(value=12.9)})
    checked = run(root)
    assert checked.returncode == 1
    because = "the claim 'Bayes | is better' holds 'yes' because 1.01 * toy.brnn.valid < 13"
    assert checked.stderr == f"published.toml: {because}, which is not so\n"
    assert not (root / "RESULTS.md").exists()
    text = PUBLISHED.replace('"yes"', '"surely"').replace('see = "Table 1', 'see = "Table 2')
    (root / "results" / "published.toml").write_text(text.replace('"12 <', '"ptb.a.b <'))
    checked = run(root)
    assert "must hold yes, in part, no, got 'surely'" in checked.stderr
    assert "leads to 'Table 2: in figures', which is no section" in checked.stderr
    assert "names ptb.a.b, which is not in summary.json" in checked.stderr


def test_claims_lead_to_headings_that_are_there():
    claims = tomllib.loads((ROOT / "results" / "published.toml").read_text())["claim"]
    places = [claim["see"].split("#") for claim in claims if ".md#" in claim["see"]]
    assert places
    for page, place in places:
        headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text().lower(), re.M)
        assert place in [re.sub(r"[^\w -]", "", h).replace(" ", "-") for h in headings], page


def copy_published(root: Path) -> None:
    """The repository's own, but for highlights and claims: they name more than a test has."""
    text = (ROOT / "results" / "published.toml").read_text()
    none = re.sub(r"^highlights = \[.*?^\]$", "highlights = []", text, flags=re.M | re.S)
    none = re.sub(r"^# ---- claims ----$.*^(?=# ---- number)", "", none, flags=re.M | re.S)
    assert "[[claim]]" not in none
    (root / "results" / "published.toml").write_text(none)


def collect(root: Path, *jobs: dict[str, Any]) -> dict[str, Any]:
    out = write_jobs(root / "out", *jobs)
    assert run(root, str(out), script="collect_ptb").returncode == 0
    summary: dict[str, Any] = json.loads((root / "results" / "summary.json").read_text())
    return summary


def test_jobs_become_entries_with_the_mean_over_their_seeds(root: Path):
    copy_published(root)
    record(root, {"toy.brnn.valid": entry(), "ptb.brnn.valid": entry()})
    jobs = [made_up_job("brnn", seed, level=75.0) for seed in (1, 2)]
    jobs.append(made_up_job("brnn", 3, level=75.0, commit="4567def"))
    summary = collect(root, *jobs)
    assert list(summary)[:2] == ["toy.brnn.valid", "ptb.brnn.valid"]
    assert summary["ptb.brnn.valid"] == {
        "value": 79.0,  # 78, 79, 80
        "unit": "perplexity",
        "published": 78.8,
        "seeds": [1, 2, 3],
        "hardware": "1x GPU",
        "command": "bayesrnn train recipes/ptb-brnn.toml data.path=ptb train.seed=SEED --out RUN "
        "&& bayesrnn evaluate RUN --split valid",
        "commit": "0123abc, 4567def",
        "log": "ptb/brnn.json",
    }
    values = {key.split(".", 1)[1]: round(e["value"], 3) for key, e in summary.items()}
    assert (values["brnn.test"], values["brnn.test_mc"]) == (76.0, 75.0)
    assert (values["brnn.valid_de"], values["brnn.test_de"]) == (73.5, 70.5)  # at the chosen rate
    assert summary["ptb.brnn.test_de"]["command"].endswith("--split test --dynamic 0.2")
    by_variance = (values["brnn.valid_de_by_variance"], values["brnn.test_de_by_variance"])
    assert by_variance == (73.0, 70.0)
    command = summary["ptb.brnn.test_de_by_variance"]["command"]
    assert command.endswith("--split test --dynamic 0.1 --by-variance")
    assert values["brnn.test_de_short"] == 69.0
    assert (values["brnn.test_draws_mean"], values["brnn.test_draws_50"]) == (78.0, 75.5)
    assert summary["ptb.brnn.test_draws_50"]["unit"].startswith("perplexity (20 streams; ")
    assert (values["brnn.test_tempered"], values["brnn.test_tempered_de"]) == (74.8, 70.2)
    command = summary["ptb.brnn.test_tempered_de"]["command"]
    assert command.endswith("--split test --dynamic 0.2 --temperature search")
    command = summary["ptb.brnn.test_de_short"]["command"]
    assert command.endswith("--split test --dynamic 0.1 --by-variance --segment 10")
    assert (values["brnn.valid_epoch1"], values["brnn.valid_epoch1_looks"]) == (249.0, 240.0)
    assert " train.epochs=1 " in summary["ptb.brnn.valid_epoch1_looks"]["command"]
    assert " train.epochs=1 " not in summary["ptb.brnn.valid_epoch1"]["command"]
    assert (values["brnn.gap_mean"], values["brnn.gap_1"]) == (0.65, 0.665)
    assert {name for name in values if "gap" in name} == {
        f"brnn.gap_{draws}" for draws in ("mean", 1, 2, 5, 10, 20, 50)
    }
    assert (values["brnn.prune_80"], values["brnn.prune_80_retrained"]) == (83.0, 79.3)
    assert (values["brnn.entropy_reversed"], values["test.unigram_entropy"]) == (4.45, 6.33)
    assert run(root, "--check", script="collect_ptb").returncode == 0
    # Pruned in two ways, the one that is better on valid counts; a job that tried one rate says
    # nothing of dynamic evaluation.
    other = made_up_job("brnn", 2, level=75.0)
    found = other["evaluations"]
    found["prune"]["magnitude"] = [{"fraction": 0.8, "error": 80.5}]
    found["prune_80_retrained"] |= {"by": "magnitude", "valid_perplexity": 79.1}
    del found["valid_de_0.05"], found["valid_de_0.2"], found["test_de_chosen"]
    again = collect(root, other)
    assert again["ptb.brnn.prune_80"]["value"] == 80.5
    assert again["ptb.brnn.prune_80"]["seeds"] == [2]
    assert "--by magnitude" in again["ptb.brnn.prune_80"]["command"]
    assert again["ptb.brnn.prune_80_snr"]["value"] == 83.0
    assert again["ptb.brnn.prune_80_retrained"]["value"] == 79.1
    assert again["ptb.brnn.valid_de"]["seeds"] == [1, 3]
    # A second call with a job done anew replaces the job, and nothing else.
    again = collect(root, made_up_job("brnn", 3, level=78.0))
    assert again["ptb.brnn.test"]["value"] == 77.0
    assert again["ptb.brnn.test"]["seeds"] == [1, 2, 3]


def test_a_sharpened_models_figures_are_bounds(root: Path):
    summary = collect(root, made_up_job("sharpened", 1, level=74.0))
    found = {key.removeprefix("ptb.sharpened."): e["value"] for key, e in summary.items()}
    assert (found["valid"], found["test"]) == (76.5, 73.5)
    assert (found["valid_mean"], found["test_mean"]) == (77.0, 74.0)
    assert (found["valid_de"], found["test_de"]) == (72.0, 69.0)
    assert (found["valid_de_by_variance"], found["test_de_by_variance"]) == (70.0, 67.0)
    assert (found["valid_epoch1"], found["valid_epoch1_looks"]) == (230.0, 225.0)
    assert found["test_looks"] == 73.2
    assert summary["ptb.sharpened.test_looks"]["command"].endswith("--look 1.5 --looks 4")
    weighed = summary["ptb.sharpened.test_weighed"]["command"]
    assert weighed.endswith("--look 1.5 --looks 4 --samples 16")
    assert summary["ptb.sharpened.valid_epoch1"]["command"].endswith("--sharpened --look 2")
    assert (found["test_stream"], found["test_stream_de_by_variance"]) == (73.4, 66.5)
    command = summary["ptb.sharpened.test_stream_de_by_variance"]["command"]
    assert command.endswith("--look 1.25 --streams 1 --dynamic 0.05 --by-variance")
    assert "prune_80" not in found
    command = summary["ptb.sharpened.test_de"]["command"]
    assert command.endswith("--split test --sharpened --look 1.25 --dynamic 0.1")
    assert " train.epochs=1 " in summary["ptb.sharpened.valid_epoch1"]["command"]


def test_overrides_that_the_recipe_has_by_now_are_no_other_settings(root: Path):
    job = made_up_job("best", 1, level=70.0, overrides=["model.tied=false", "train.epochs=40"])
    recipe = root / job["recipe"]
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.write_text("[model]\ntied = false\n[train]\nepochs = 39\n")
    assert "ptb.best.test" not in collect(root, job)
    recipe.write_text("[model]\ntied = false\n[train]\nepochs = 40\n")
    assert collect(root, job)["ptb.best.test"]["value"] == 70.0


def test_other_settings_and_speeds_have_files_of_their_own(root: Path):
    copy_published(root)
    speed = {"words_per_second": 2e5, "hardware": "1x GPU", "commit": "0123abc", "commands": []}
    write_jobs(root / "out")
    (root / "out" / "speed.json").write_text(json.dumps({"brnn": speed}))
    summary = collect(root, made_up_job("best", 1, level=70.0, overrides=["model.tied=false"]))
    assert list(summary) == ["ptb.brnn.words_per_second"]
    assert summary["ptb.brnn.words_per_second"]["value"] == 2e5
    tried = json.loads((root / "results" / "ptb" / "search.json").read_text())
    assert [(job["name"], job["valid"], job["valid_de"]) for job in tried] == [
        ("best-tried-1", 73.0, 67.5)
    ]
    assert "test" not in json.dumps(tried)
    assert run(root).returncode == 0
    assert (
        "| `best-tried-1` | 73.00 | 67.50 | 40 | `model.tied=false` |"
        in (root / "RESULTS.md").read_text()
    )
    changed = json.loads((root / "results" / "summary.json").read_text())
    changed["ptb.brnn.words_per_second"]["value"] = 3e5
    record(root, changed)
    checked = run(root, "--check", script="collect_ptb")
    assert checked.returncode == 1
    assert "ptb.brnn.words_per_second" in checked.stderr


def test_figures_are_drawn_from_the_jobs(root: Path):
    pytest.importorskip("matplotlib")
    (root / "docs").mkdir()
    assert run(root, script="plot_ptb").stdout == ""  # nothing is there yet
    collect(root, made_up_job("brnn", 1, level=75.0), made_up_job("dropout", 1, level=82.0))
    drawn = run(root, script="plot_ptb")
    assert drawn.returncode == 0, drawn.stderr
    names = {path.name for path in (root / "docs").iterdir()}
    assert names == {f"ptb-{name}.svg" for name in ("learning", "gap", "pruning", "pruning-map")}
    (root / "results" / "published.toml").write_text(PUBLISHED)
    record(root, {})
    assert run(root).returncode == 0
    assert "(docs/ptb-gap.svg)" in (root / "RESULTS.md").read_text()
