"""Data: from files to batches."""

from bayesrnn.data.batching import Batch, Loader, StreamLoader
from bayesrnn.data.captions import CaptionData, Captions, Pictures, load_captions
from bayesrnn.data.features import Features, read_features, write_features
from bayesrnn.data.images import ImageData, load_images
from bayesrnn.data.labelled import ExampleLoader, Examples, Labelled
from bayesrnn.data.padded import CaptionLoader, choose_lengths
from bayesrnn.data.reviews import ReviewData, load_reviews
from bayesrnn.data.text import Corpus, TextData, decode_text, encode_file, encode_text, load_text
from bayesrnn.data.vocabulary import Vocabulary

__all__ = [
    "Batch",
    "CaptionData",
    "CaptionLoader",
    "Captions",
    "Corpus",
    "ExampleLoader",
    "Examples",
    "Features",
    "ImageData",
    "Labelled",
    "Loader",
    "Pictures",
    "ReviewData",
    "StreamLoader",
    "TextData",
    "Vocabulary",
    "choose_lengths",
    "decode_text",
    "encode_file",
    "encode_text",
    "load_captions",
    "load_images",
    "load_reviews",
    "load_text",
    "read_features",
    "write_features",
]
