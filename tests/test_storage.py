"""Folders of tensors: written whole or not at all, and damage is seen."""

import errno
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from bayesrnn import storage
from bayesrnn.errors import UserError
from bayesrnn.storage import Damaged, read_facts, read_folder, write_folder
from small_runs import folder_contents

TENSORS = {
    "a.safetensors": {"x": torch.arange(6.0).view(2, 3), "n": torch.tensor(3)},
    "b.safetensors": {"y": torch.tensor([1.5, -0.0], dtype=torch.float64)},
}
FACTS = {"step": 17, "rate": 1e-05, "name": "Gödel", "nested": {"list": [1, None, True]}}


def write(path: Path) -> None:
    write_folder(path, "thing", "manifest.json", TENSORS, FACTS)


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    write(tmp_path / "deep/folder")
    tensors, facts = read_folder(tmp_path / "deep/folder", "thing", "manifest.json")
    assert tensors.keys() == TENSORS.keys()
    for file, named in TENSORS.items():
        for name, expected in named.items():
            found = tensors[file][name]
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            assert found.numpy().tobytes() == expected.numpy().tobytes()
    assert {key: facts[key] for key in FACTS} == FACTS
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["folder"]


def test_the_files_can_be_read_without_this_package(tmp_path: Path) -> None:
    write(tmp_path / "folder")
    assert torch.equal(
        load_file(tmp_path / "folder/a.safetensors")["x"], TENSORS["a.safetensors"]["x"]
    )
    assert json.loads((tmp_path / "folder/manifest.json").read_text())["name"] == "Gödel"


@given(st.dictionaries(st.text(max_size=5), st.floats() | st.integers() | st.text()))
def test_any_facts_survive_and_pass_their_checksum(
    tmp_path_factory: pytest.TempPathFactory, facts: dict[str, object]
) -> None:
    folder = tmp_path_factory.mktemp("facts") / "folder"
    write_folder(folder, "thing", "manifest.json", {}, {"facts": facts})
    assert repr(read_facts(folder, "thing", "manifest.json")["facts"]) == repr(facts)


def test_no_single_flipped_bit_of_a_manifest_changes_what_is_read(tmp_path: Path) -> None:
    write(tmp_path / "folder")
    file = tmp_path / "folder/manifest.json"
    good = file.read_bytes()
    expected = read_facts(tmp_path / "folder", "thing", "manifest.json")
    noticed = 0
    for place in range(8 * len(good)):
        bad = bytearray(good)
        bad[place // 8] ^= 1 << place % 8
        file.write_bytes(bad)
        try:
            assert read_facts(tmp_path / "folder", "thing", "manifest.json") == expected
        except Damaged:
            noticed += 1
    assert noticed > 0.99 * 8 * len(good)  # 1e-05 and 1E-05 are the same number


@given(data=st.data())
def test_a_flipped_bit_of_a_tensor_file_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("bits") / "folder"
    write(folder)
    file = folder / data.draw(st.sampled_from(sorted(TENSORS)))
    bad = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, 8 * len(bad) - 1))
    bad[place // 8] ^= 1 << place % 8
    file.write_bytes(bad)
    with pytest.raises(Damaged, match=file.name):
        read_folder(folder, "thing", "manifest.json")


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[]", "does not describe a bayesrnn thing"),
        (b'{"format": "bayesrnn model"}', "does not describe a bayesrnn thing"),
        (b'{"format": "bayesrnn thing", "version": 99}', "format version 99, expected 1"),
        (b'{"format": "bayesrnn thing", "version": 1, "sha256": {}}', "does not match its own"),
    ],
)
def test_a_manifest_that_is_not_ours_is_named(contents: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(contents)
    with pytest.raises(Damaged, match=said) as caught:
        read_folder(tmp_path, "thing", "manifest.json")
    assert str(tmp_path / "manifest.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_manifest_is_named(tmp_path: Path) -> None:
    with pytest.raises(Damaged, match=r"has no manifest.json, so it is no bayesrnn thing"):
        read_folder(tmp_path, "thing", "manifest.json")


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.ENOSPC, "free some space"), (errno.EACCES, "choose another folder")],
)
@pytest.mark.parametrize("there_before", [False, True])
def test_a_write_that_fails_leaves_what_was_there(
    there_before: bool, number: int, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if there_before:
        write(tmp_path / "folder")
    before = folder_contents(tmp_path)

    def fails(path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2])
        if path.name != "a.safetensors":
            raise OSError(number, "it failed")

    monkeypatch.setattr(storage, "_write_synced", fails)
    with pytest.raises(UserError, match=rf"cannot write .*folder: it failed; {remedy}"):
        write(tmp_path / "folder")
    assert folder_contents(tmp_path) == before
    assert len(list(tmp_path.iterdir())) == there_before  # nor half a folder under another name


def test_a_rename_that_fails_brings_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "folder")
    before = folder_contents(tmp_path)
    rename = Path.rename

    def fails(self: Path, target: Path) -> Path:
        if self.name.endswith(".tmp"):
            raise OSError(errno.EIO, "it failed")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(UserError, match="cannot write"):
        write_folder(tmp_path / "folder", "thing", "manifest.json", {}, {})
    assert folder_contents(tmp_path) == before


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    write(tmp_path / "folder")
    write_folder(tmp_path / "folder", "thing", "manifest.json", {"c.safetensors": {}}, {})
    assert {path.name for path in (tmp_path / "folder").iterdir()} == {
        "c.safetensors",
        "manifest.json",
    }
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
