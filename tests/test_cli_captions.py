"""The command line with captions."""

import json
from pathlib import Path

import numpy as np
import pytest

from bayesrnn.evaluate.captioned import CaptionFile
from bayesrnn.train import loop
from caption_runs import NUMBERS, caption_recipe
from labelled_runs import image_recipe
from small_runs import Cli


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("captions")
    recipe = caption_recipe(folder, train={"epochs": 15})
    loop.train(recipe, folder / "run", quiet=True)
    return folder / "run"


def test_evaluate_prints_perplexity_and_scores(run: Path, cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("pycocoevalcap", reason="the extra captions is not installed")
    code, out, _ = cli("evaluate", run, "--predictions", tmp_path / "c.json", "--json")
    assert code == 0
    figures = json.loads(out)
    assert figures["pictures"] == 9
    assert figures["tokens"] == 9 * (4 + 7 + 12)
    assert 1 < figures["perplexity"] < 3
    assert 0 < figures["bleu4"] <= 1
    assert figures["cider"] > 0.5
    written = CaptionFile.read(tmp_path / "c.json")
    assert len(written.pictures) == 9
    assert written.pictures[0].caption.startswith("a red dog")
    code, out, _ = cli("evaluate", run, "--samples", 2, "--beam", 1)
    assert code == 0
    assert "expected perplexity" in out
    assert "cider" in out


def test_uncertainty_of_captions(run: Path, cli: Cli) -> None:
    code, out, _ = cli("uncertainty", run, "--samples", "0,3", "--split", "valid", "--json")
    assert code == 0
    mean, three = json.loads(out)["by_draws"]
    assert mean["epistemic"] == 0
    assert three["epistemic"] > 0
    assert {"wrong_picture_total_auroc", "noise_epistemic_auroc"} <= set(three)
    assert cli("uncertainty", run, "--samples", "2").code == 0


def test_caption_pictures_of_ones_own(run: Path, cli: Cli, tmp_path: Path) -> None:
    vectors = np.zeros((2, NUMBERS), dtype=np.float32)
    vectors[0, [0, 3]] = vectors[1, [2, 4]] = 1
    np.savez(tmp_path / "f.npz", features=vectors, filenames=np.array(["x.jpg", "y.jpg"]))
    command = ["caption", run, "--features", tmp_path / "f.npz"]
    code, out, _ = cli(*command, "--json", "--draws", 2)
    assert code == 0
    found = json.loads(out)["pictures"]
    first = [each["caption"].split()[:3] for each in found]
    assert first == [["a", "red", "dog"], ["a", "blue", "cat"]]
    assert all(0 < each["confidence"] <= 1 for each in found)
    assert len(found[0]["draws"]) == 2
    code, out, _ = cli(*command, "--image", "y.jpg", "--out", tmp_path / "y.json", "--samples", 2)
    assert code == 0
    assert "y.jpg" in out
    assert "x.jpg" not in out
    assert list(CaptionFile.read(tmp_path / "y.json").captions) == ["y.jpg"]
    code, out, _ = cli(*command, "--beam", 1, "--temperature", 1.5, "--seed", 3)
    assert code == 0


def test_features_that_were_moved_are_found_beside_the_captions(cli: Cli, tmp_path: Path) -> None:
    place = tmp_path / "old" / "captions"
    recipe = caption_recipe(
        tmp_path / "old", data={"features": str(place / "features.npz")}, train={"epochs": 1}
    )
    loop.train(recipe, tmp_path / "run", quiet=True)
    asked = ["evaluate", tmp_path / "run", "--json"]
    before = json.loads(cli(*asked).out)
    place.rename(tmp_path / "new")
    found = cli(*asked, "--data", tmp_path / "new" / "captions.json")
    assert found.code == 0, found.err
    assert json.loads(found.out) == before


def test_bad_input_gets_one_line(run: Path, cli: Cli, tmp_path: Path) -> None:
    def fails(code: int, message: str, *arguments: object) -> None:
        result = cli(*arguments)
        assert result.code == code
        assert message in result.err.replace("\n│ ", "").replace("  ", "")
        assert "Traceback" not in result.err

    np.savez(tmp_path / "f.npz", features=np.zeros((1, 4)), filenames=np.array(["x.jpg"]))
    fails(1, "vectors of 4 numbers", "caption", run, "--features", tmp_path / "f.npz")
    np.savez(tmp_path / "g.npz", features=np.zeros((1, NUMBERS)), filenames=np.array(["x.jpg"]))
    given = ["caption", run, "--features", tmp_path / "g.npz"]
    fails(1, "have no features (z.jpg, say)", *given, "--image", "z.jpg")
    fails(1, "there is no folder", *given, "--out", tmp_path / "no" / "c.json")
    fails(2, "--beam 1", *given, "--temperature", 1.0)
    fails(1, "cannot read", "caption", run, "--features", tmp_path / "none.npz")
    fails(2, "--dynamic is not for a run on captions", "evaluate", run, "--dynamic", "0.1")
    fails(2, "--gap is not for a run on captions", "uncertainty", run, "--gap")
    fails(2, "--bins is not for a run on captions", "uncertainty", run, "--bins", 3)
    fails(2, "--out must end in", "features", tmp_path, "--out", tmp_path / "f.csv")
    fails(1, "there is no folder", "features", tmp_path, "--out", tmp_path / "no" / "f.npz")
    loop.train(image_recipe(tmp_path), tmp_path / "images-run", quiet=True)
    other = ["caption", tmp_path / "images-run", "--features", tmp_path / "g.npz"]
    fails(1, "is a run on images, which captions no pictures", *other)


def test_features_of_pictures(cli: Cli, tmp_path: Path) -> None:
    from vision_extra import Image

    (tmp_path / "p").mkdir()
    Image.fromarray(np.zeros((40, 40, 3), dtype=np.uint8)).save(tmp_path / "p" / "a.png")
    command = ["features", tmp_path / "p", "--network", "resnet18", "--weights", "random"]
    code, out, _ = cli(*command, "--out", tmp_path / "f.npz", "--json")
    assert code == 0
    assert json.loads(out) == {"pictures": 1, "numbers": 512, "file": str(tmp_path / "f.npz")}
    with np.load(tmp_path / "f.npz", allow_pickle=False) as arrays:
        assert arrays["filenames"].tolist() == ["a.png"]
