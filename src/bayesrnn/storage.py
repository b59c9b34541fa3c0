"""A folder of tensors: safetensors files beside a JSON manifest with the SHA-256 of each.

Data, never code: nothing is pickled. A folder is written under another name, synced and renamed,
so it is there whole or not at all. safetensors and JSON load flipped bits without a word, hence the
checksums; the manifest's own is under `manifest_sha256`.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from bayesrnn.errors import UserError
from bayesrnn.files import fsync_folder, writing

FORMAT_VERSION = 1
OWN_SUM = "manifest_sha256"


class Damaged(UserError):
    """A folder that is ours but is incomplete or altered."""


def write_folder(
    path: Path,
    kind: str,
    manifest: str,
    tensors: Mapping[str, Mapping[str, Tensor]],
    facts: Mapping[str, Any],
) -> None:
    """Write `tensors` (by file, then by name) and `facts`; a folder already there is replaced.
    Through a link, the folder that it points to is written."""
    path = Path(os.path.realpath(path)) if path.is_symlink() else path
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with writing(path):
        try:
            temporary.mkdir(parents=True)
            sums: dict[str, str] = {}
            for file, named in tensors.items():
                whole = {n: t.detach().cpu().contiguous().clone() for n, t in named.items()}
                try:
                    data = save(whole)
                except KeyError as error:
                    kinds = {n: t.dtype for n, t in whole.items() if t.dtype in error.args}
                    name = next(iter(kinds), "a tensor")
                    said = f"cannot save {name}: a safetensors file holds no {error}"
                    raise UserError(said) from error
                sums[file] = hashlib.sha256(data).hexdigest()
                _write_synced(temporary / file, data)
            head = {"format": f"bayesrnn {kind}", "version": FORMAT_VERSION, "sha256": sums}
            contents = {**head, **facts}
            contents[OWN_SUM] = _sum_of_facts(contents)
            text = json.dumps(contents, indent=1, ensure_ascii=False)
            _write_synced(temporary / manifest, text.encode())
            fsync_folder(temporary)
            _swap_in(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def read_folder(
    path: Path, kind: str, manifest: str
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The tensors and facts of a folder, every file checked against its SHA-256."""
    facts = read_facts(path, kind, manifest)
    tensors: dict[str, dict[str, Tensor]] = {}
    for file, expected in facts["sha256"].items():
        try:
            data = (path / file).read_bytes()
        except OSError as error:
            raise Damaged(f"{path / file} cannot be read: {error.strerror or error}") from error
        if hashlib.sha256(data).hexdigest() != expected:
            raise Damaged(
                f"{path / file} is damaged: its SHA-256 is not the one in {manifest}; "
                "restore it from a copy"
            )
        try:
            tensors[file] = load(data)
        except SafetensorError as error:
            raise Damaged(f"{path / file} is not a safetensors file: {error}") from error
    return tensors, facts


def read_facts(path: Path, kind: str, manifest: str) -> dict[str, Any]:
    """The manifest alone; says so where the folder is not one of ours."""
    file = path / manifest
    try:
        facts = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise Damaged(f"{path} has no {manifest}, so it is no bayesrnn {kind}") from error
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{file} is not JSON: {error}") from error
    if not isinstance(facts, dict) or facts.get("format") != f"bayesrnn {kind}":
        raise Damaged(f"{file} does not describe a bayesrnn {kind}")
    if facts.get("version") != FORMAT_VERSION or not isinstance(facts.get("sha256"), dict):
        raise Damaged(
            f"{file} has format version {facts.get('version')}, expected {FORMAT_VERSION}"
        )
    if facts.pop(OWN_SUM, None) != _sum_of_facts(facts):
        raise Damaged(f"{file} is damaged: it does not match its own {OWN_SUM}")
    return facts


def _sum_of_facts(facts: Mapping[str, Any]) -> str:
    """The SHA-256 of what a manifest says, however it is laid out."""
    as_read = json.loads(json.dumps(facts))
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _swap_in(temporary: Path, path: Path) -> None:
    """Rename onto `path`; the folder it replaces is moved aside first and deleted last."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.old")
    replaces = path.exists()
    if replaces:
        path.rename(aside)
    try:
        temporary.rename(path)
    except OSError:
        if replaces:
            aside.rename(path)
        raise
    fsync_folder(path.parent)
    if replaces:
        shutil.rmtree(aside, ignore_errors=True)
