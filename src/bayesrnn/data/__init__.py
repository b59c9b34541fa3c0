"""Data: from files to batches."""

from bayesrnn.data.batching import Batch, StreamLoader
from bayesrnn.data.text import Corpus, TextData, decode_text, encode_text, load_text
from bayesrnn.data.vocabulary import Vocabulary

__all__ = [
    "Batch",
    "Corpus",
    "StreamLoader",
    "TextData",
    "Vocabulary",
    "decode_text",
    "encode_text",
    "load_text",
]
