"""Text files to token ids, read in pieces, so that a corpus need not fit in memory."""

import codecs
import hashlib
import json
import os
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from bayesrnn.data.splits import SPLITS, check_fractions, split_places
from bayesrnn.data.vocabulary import END, UNKNOWN, Vocabulary, check_limit
from bayesrnn.errors import UserError, WrongData, require
from bayesrnn.files import CHUNK_BYTES, expanded, open_atomic, read_chunks, sha256

Tokens = Literal["whitespace", "words", "characters"]
Advance = Callable[[int], None]
SPLIT_FILES = ("{}.txt", "ptb.{}.txt")
APOSTROPHES = "'’"
JOINERS = "\u200c\u200d"
"""Without width, between letters that are written apart, or as one."""
ID = np.dtype(np.int32)
CACHE_FORMAT = 3
CACHE_REMEDY = "make it writable, or set data.cache or $XDG_CACHE_HOME to another folder"


@dataclass(frozen=True)
class TextData:
    """The `[data]` table of a recipe for text.

    - `path`: a folder with train.txt, valid.txt and test.txt (or ptb.train.txt and so on); or one
      UTF-8 file; or a folder of *.txt files, read in the order of their names, subfolders included.
    - `tokens`: how the text is cut: "whitespace" at blanks, "words" into words (accents and vowel
      signs are part of them) and single punctuation marks, both with `<eos>` after each line that
      is not blank; or "characters", newlines included.
    - `lowercase`: convert capitals to lower case.
    - `max_vocabulary`, `min_count`: the most entries of the vocabulary (0: no limit), and how often
      a token must occur. The vocabulary is that of the training tokens.
    - `split`: how a text that is not in three files is split, in its order: the first `split[0]` of
      all tokens to train on, the next `split[1]` to validate, the rest to test, each bound rounded
      to the nearest token.
    - `cache`: the folder for the encoded text; by default bayesrnn in $XDG_CACHE_HOME or in
      ~/.cache.
    """

    path: str
    tokens: Tokens = "whitespace"
    lowercase: bool = False
    max_vocabulary: int = 0
    min_count: int = 1
    split: tuple[float, float, float] = (0.8, 0.1, 0.1)
    cache: str = ""
    kind: ClassVar[str] = "text"

    @property
    def unit(self) -> str:
        """What the tokens are called, in the plural."""
        return "characters" if self.tokens == "characters" else "words"

    def __post_init__(self) -> None:
        require(
            (self.path != "", "path", "must name a text file or a folder, got ''"),
            (
                self.tokens in get_args(Tokens),
                "tokens",
                f"must be one of {', '.join(get_args(Tokens))}, got {self.tokens!r}",
            ),
            check_limit(self.max_vocabulary, 3),
            (self.min_count >= 1, "min_count", f"must be at least 1, got {self.min_count}"),
            check_fractions(self.split),
        )


@dataclass(frozen=True, eq=False)
class Corpus:
    """An encoded text: its token ids by split, which stay on the disk until they are used.

    `unknown` counts, by split, the tokens that are read as `<unk>` and not written so in the text.
    `digest` is the checksum of the files' contents.
    """

    vocabulary: Vocabulary
    ids: Mapping[str, NDArray[np.int32]]
    unknown: Mapping[str, int]
    digest: str

    def part(self, split: str) -> NDArray[np.int32]:
        """The ids of a split, or of "all" splits in the order of the text."""
        return np.concatenate(list(self.ids.values())) if split == "all" else self.ids[split]


def load_text(settings: TextData | str | Path, vocabulary: Vocabulary | None = None) -> Corpus:
    """Encode the text that `settings` describe, or take it from the cache if it was encoded before.

    A path in place of `settings` is a text with the default settings. A `vocabulary` that is given
    (that of a finished run, say) is used instead of building one.
    """
    if not isinstance(settings, TextData):
        settings = TextData(str(settings))
    sources = _find_sources(expanded(settings.path))
    folder = _cache_folder(settings)
    digest = _digest(sources)
    key = _cache_key(settings, digest, vocabulary)
    corpus = _read_cache(folder, key, digest)
    if corpus is None:
        _write_cache(folder, key, settings, sources, vocabulary)
        corpus = _read_cache(folder, key, digest)
    if corpus is None:
        raise UserError(f"cannot read back the encoded text in {folder}; {CACHE_REMEDY}")
    return corpus


def encode_text(text: str, settings: TextData, vocabulary: Vocabulary) -> list[int]:
    """The ids of a text in memory, cut into tokens as the files are.

    >>> vocabulary = Vocabulary(("a", "<eos>", "<unk>"))
    >>> encode_text("a b", TextData("corpus.txt"), vocabulary)
    [0, 2, 1]
    """
    return [i for piece in tokenise([text], settings) for i in vocabulary.encode(piece)]


def encode_file(path: Path, settings: TextData, vocabulary: Vocabulary) -> NDArray[np.int32]:
    """The ids of any text file, cut into tokens as `settings` say; their own path is not read."""
    return np.array(vocabulary.encode(file_tokens(path, settings)), ID)


def file_tokens(path: Path, settings: TextData) -> Iterator[str]:
    """The tokens of any one text file, known or not, cut as `settings` says."""
    for piece in _read_tokens([path], settings, lambda _: None):
        yield from piece


def decode_text(ids: Iterable[int], settings: TextData, vocabulary: Vocabulary) -> str:
    """Token ids as readable text: `<eos>` becomes a new line, and punctuation stands by its word.

    >>> vocabulary = Vocabulary(("yes", "<eos>", ",", "<unk>"))
    >>> decode_text([0, 2, 0, 1, 0], TextData("corpus.txt", tokens="words"), vocabulary)
    'yes, yes\\nyes'
    """
    tokens = vocabulary.decode(list(ids))
    if settings.tokens == "characters":
        return "".join(tokens)
    text = " ".join("\n" if token == END else token for token in tokens)
    if settings.tokens == "words":
        text = re.sub(r" (?=[.,;:!?)\]%])", "", text)
        text = re.sub(r"(?<=[(\[$]) ", "", text)
    return re.sub(r" ?\n ?", "\n", text)


def tokenise(chunks: Iterable[str], settings: TextData) -> Iterator[list[str]]:
    """The tokens of one text that comes in chunks, wherever these are torn.

    Lower case is that of each token by itself, so that it does not depend on the chunks.

    >>> list(tokenise(["Don't st", "op!"], TextData("corpus.txt", tokens="words")))
    [["Don't"], ['stop', '!'], ['<eos>']]
    """
    if settings.tokens == "characters":
        for chunk in chunks:
            yield [c for char in chunk for c in char.lower()] if settings.lowercase else list(chunk)
        return
    find, inside = (
        (str.split, _inside_blanks)
        if settings.tokens == "whitespace"
        else (_find_words, _inside_word)
    )
    line_open = False
    for text in _untorn(chunks, inside):
        piece: list[str] = []
        for number, line in enumerate(text.split("\n")):
            if number > 0 and line_open:
                piece.append(END)
                line_open = False
            found = find(line)
            piece += found
            line_open = line_open or bool(found)
        if piece:
            yield [token.lower() for token in piece] if settings.lowercase else piece
    if line_open:
        yield [END]


def _inside_blanks(character: str) -> bool:
    return not character.isspace()


def _inside_word(character: str) -> bool:
    return character.isalnum() or character in f"_{APOSTROPHES}" or _is_mark(character)


def _is_mark(character: str) -> bool:
    """Whether it belongs to the letter before it: an accent, or a vowel sign (of Hindi, say)."""
    return character in JOINERS or unicodedata.category(character).startswith("M")


def _find_words(line: str) -> list[str]:
    """Words, with the marks that belong to their letters, and single other characters."""
    marked = not (line.isascii() or _marks().isdisjoint(line))
    return _words(marked).findall(line)


@cache
def _words(marked: bool) -> re.Pattern[str]:
    """Without marks it is the same for lines that have none, and several times as fast."""
    letters = rf"\w[\w{''.join(sorted(_marks()))}]*" if marked else r"\w+"
    return re.compile(rf"{letters}(?:[{APOSTROPHES}]{letters})?|[^\w\s]")


@cache
def _marks() -> frozenset[str]:
    return frozenset(filter(_is_mark, map(chr, range(sys.maxunicode + 1))))


def _untorn(chunks: Iterable[str], inside: Callable[[str], bool]) -> Iterator[str]:
    """The same text, only cut after a character that cannot be inside a longer token."""
    held: list[str] = []
    for chunk in chunks:
        cut = next((i for i in range(len(chunk), 0, -1) if not inside(chunk[i - 1])), 0)
        if cut:
            yield "".join([*held, chunk[:cut]])
            held = []
        held.append(chunk[cut:])
    yield "".join(held)


def _find_sources(path: Path) -> dict[str, list[Path]]:
    """The files of each split, or, under "all", those that are still to be split."""
    try:
        if path.is_file():
            return {"all": [path]}
        if not path.is_dir():
            problem = "is neither a file nor a folder" if path.exists() else "does not exist"
            raise WrongData(f"{path} {problem}", "a text file or a folder of them")
        layouts = [{name: path / form.format(name) for name in SPLITS} for form in SPLIT_FILES]
        for layout in layouts:
            if all(file.is_file() for file in layout.values()):
                return {name: [file] for name, file in layout.items()}
        for layout in layouts:
            present = [file.name for file in layout.values() if file.is_file()]
            missing = [file.name for file in layout.values() if not file.is_file()]
            if present:
                raise UserError(
                    f"{path} has {', '.join(present)} but not {', '.join(missing)}; "
                    "add what is missing, or give one file to be split"
                )
        texts = [file for file in path.rglob("*.txt") if file.is_file()]
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or error}; check its permissions"
        ) from error
    for file in texts:
        if file.name == "log.txt" and (file.parent / "recipe.toml").exists():
            raise UserError(
                f"{file.parent} is a run's folder, and its log is no text to learn; give a file, "
                "or a folder with texts alone"
            )
    if not texts:
        raise WrongData(f"{path} has no .txt files", "a text file or a folder that has some")
    return {"all": sorted(texts, key=lambda file: file.relative_to(path).parts)}


def _read_text(path: Path, advance: Advance) -> Iterator[str]:
    """The text of a UTF-8 file in chunks, without a byte order mark."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    read = 0
    try:
        for chunk in read_chunks(path, CHUNK_BYTES, advance):
            nul = chunk.find(b"\0")
            if nul >= 0:
                raise UserError(
                    f"{path} is binary (NUL at byte {read + nul}); give a text file in UTF-8"
                )
            read += len(chunk)
            yield decoder.decode(chunk)
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        offset = read - len(error.object) + error.start
        raise UserError(
            f"{path} is not UTF-8 (at byte {offset}); convert it, or give a text file"
        ) from error


def _read_tokens(paths: list[Path], settings: TextData, advance: Advance) -> Iterator[list[str]]:
    """The tokens of files that follow each other; no token or line goes on in the next file."""
    blank = True

    def watched(path: Path) -> Iterator[str]:
        nonlocal blank
        for chunk in _read_text(path, advance):
            blank = blank and not chunk.strip()
            yield chunk

    for path in paths:
        yield from tokenise(watched(path), settings)
    if blank:
        where = paths[0] if len(paths) == 1 else settings.path
        raise UserError(f"{where} is empty or blank; give a file with text in it")


def _read_splits(
    settings: TextData, sources: Mapping[str, list[Path]], total: int, advance: Advance
) -> Iterator[tuple[str, list[str]]]:
    """The name of a split and some of its tokens, in order. `total` tokens are to be split."""
    if "all" not in sources:
        for name, paths in sources.items():
            for piece in _read_tokens(paths, settings, advance):
                yield name, piece
        return
    places = split_places(total, settings.split)
    start = 0
    for piece in _read_tokens(sources["all"], settings, advance):
        for name, place in places.items():
            part = piece[max(place.start - start, 0) : max(place.stop - start, 0)]
            if part:
                yield name, part
        start += len(piece)


@contextmanager
def _progress(what: str, sources: Mapping[str, list[Path]]) -> Iterator[Advance]:
    """A bar over the bytes of all sources, where someone is there to see it."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    size = sum(path.stat().st_size for paths in sources.values() for path in paths)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=size)
        yield lambda length: bar.update(task, advance=length)


def _cache_folder(settings: TextData) -> Path:
    if settings.cache:
        return expanded(settings.cache)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "bayesrnn"


def _digest(sources: Mapping[str, list[Path]]) -> str:
    """Of the contents of all files, in their order."""
    with _progress("looking at the text", sources) as advance:
        digests = {
            name: [sha256(path, advance) for path in paths] for name, paths in sources.items()
        }
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def _cache_key(settings: TextData, digest: str, vocabulary: Vocabulary | None) -> str:
    """A digest of all that the encoded text depends on, but not of where the files are."""
    choices = asdict(settings)
    del choices["path"], choices["cache"]
    tokens = None if vocabulary is None else vocabulary.tokens
    everything = json.dumps([CACHE_FORMAT, digest, choices, tokens])
    return hashlib.sha256(everything.encode()).hexdigest()


def _read_cache(folder: Path, key: str, digest: str) -> Corpus | None:
    """The text encoded before; None if it is not there, or not whole."""
    file = folder / f"{key}.ids"
    try:
        facts = json.loads((folder / f"{key}.json").read_bytes())
        vocabulary = Vocabulary(tuple(facts["vocabulary"]))
        lengths = {name: int(facts["lengths"][name]) for name in SPLITS}
        unknown = {name: int(facts["unknown"][name]) for name in SPLITS}
        if file.stat().st_size != sum(lengths.values()) * ID.itemsize:
            return None
        if facts.pop("sha256") != _checksum(file, facts):
            return None
        ids: dict[str, NDArray[np.int32]] = {}
        start = 0
        for name, length in lengths.items():
            ids[name] = np.memmap(file, ID, mode="r", offset=start * ID.itemsize, shape=(length,))
            start += length
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Corpus(vocabulary, ids, unknown, digest)


def _write_cache(
    folder: Path,
    key: str,
    settings: TextData,
    sources: Mapping[str, list[Path]],
    vocabulary: Vocabulary | None,
) -> None:
    """Encode the text: KEY.ids has the ids of all splits, KEY.json what is needed to read them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make {folder}: {error.strerror or error}; {CACHE_REMEDY}"
        ) from error
    total = 0
    if "all" in sources:
        with _progress("counting tokens", sources) as advance:
            total = sum(len(piece) for piece in _read_tokens(sources["all"], settings, advance))
    if vocabulary is None:
        vocabulary = _build_vocabulary(settings, sources, total)
    lengths, unknown = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
    unknown_id = vocabulary.index[UNKNOWN]
    with (
        _progress("encoding", sources) as advance,
        open_atomic(folder / f"{key}.ids", CACHE_REMEDY) as file,
    ):
        for name, piece in _read_splits(settings, sources, total, advance):
            ids = vocabulary.encode(piece)
            file.write(np.array(ids, ID).tobytes())
            lengths[name] += len(ids)
            unknown[name] += ids.count(unknown_id) - piece.count(UNKNOWN)
        if not all(lengths.values()):
            raise WrongData(
                f"{settings.path} has {total} tokens, too few to split as {list(settings.split)}",
                "more text",
                "data.split",
            )
    facts = {"vocabulary": vocabulary.tokens, "lengths": lengths, "unknown": unknown}
    facts["sha256"] = _checksum(folder / f"{key}.ids", facts)
    with open_atomic(folder / f"{key}.json", CACHE_REMEDY) as file:
        file.write(json.dumps(facts).encode())


def _checksum(ids: Path, facts: Mapping[str, object]) -> str:
    """Of the ids and of what is said of them."""
    return hashlib.sha256(json.dumps([sha256(ids), facts], sort_keys=True).encode()).hexdigest()


def _build_vocabulary(
    settings: TextData, sources: Mapping[str, list[Path]], total: int
) -> Vocabulary:
    counts: Counter[str] = Counter()
    with _progress("counting words", sources) as advance:
        for name, piece in _read_splits(settings, sources, total, advance):
            if name != "train":
                break
            counts.update(piece)
    return Vocabulary.build(counts, settings.max_vocabulary or None, settings.min_count)
