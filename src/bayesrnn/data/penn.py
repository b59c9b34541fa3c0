"""Words as the tokeniser of the caption scores splits them, without Java.

That is Stanford's PTBTokenizer in lower case, with punctuation taken out. Flickr8k's 40,455
captions all come out the same.
"""

import re

_ABBREVIATIONS = "mr|mrs|ms|dr|st|jr|sr|vs|rd|ave|etc"
_TOKENS = re.compile(
    rf"""
    \.\.\.                                # an ellipsis
  | (?:[a-z]\.)+(?=\s\S)                  # u.s. and u. within a sentence
  | (?:[a-z]\.){{2,}}
  | (?:{_ABBREVIATIONS})\.                # abbreviations keep their stop
  | \d+(?:[.,:]\d+)+                      # 3.50, 10:30
  | [^\W_]+\.(?:com|org|net)\b
  | o'clock\b | 'n'
  | [^\W_]+?(?=n't\b) | n't\b             # do n't
  | '(?:s|m|d|ll|re|ve)\b                 # dog 's
  | [^\W_]+(?:[-/][^\W_]+)*               # words, with hyphens inside
  | \S
    """,
    re.VERBOSE,
)
_LEFT_OUT = frozenset(["''", "'", "``", "`", '"', ".", "?", "!", ",", ":", "-", "--", "...", ";"])
_WRITTEN = {
    "(": ["-lrb-"],
    ")": ["-rrb-"],
    "[": ["-lsb-"],
    "]": ["-rsb-"],
    "{": ["-lcb-"],
    "}": ["-rcb-"],
    "cannot": ["can", "not"],
    "gonna": ["gon", "na"],
    "wanna": ["wan", "na"],
    "gotta": ["got", "ta"],
    "lemme": ["lem", "me"],
    "gimme": ["gim", "me"],
}


def penn_words(sentence: str) -> list[str]:
    """The words of a sentence.

    >>> penn_words("The dog's ball isn't red-ish, is it?")
    ['the', 'dog', "'s", 'ball', 'is', "n't", 'red-ish', 'is', 'it']
    """
    return [
        word
        for token in _TOKENS.findall(sentence.lower())
        if token not in _LEFT_OUT
        for word in _WRITTEN.get(token, [token])
    ]
