"""Data: from files to batches."""

from bayesrnn.data.audio import SpeechData, read_audio, spectrogram
from bayesrnn.data.batching import Batch, Loader, StreamLoader
from bayesrnn.data.images import ImageData, load_images
from bayesrnn.data.labelled import ExampleLoader, Examples, Labelled
from bayesrnn.data.reviews import ReviewData, load_reviews
from bayesrnn.data.speech import Speech, Utterance, load_speech, save_features
from bayesrnn.data.text import Corpus, TextData, decode_text, encode_file, encode_text, load_text
from bayesrnn.data.utterances import UtteranceLoader
from bayesrnn.data.vocabulary import Vocabulary

__all__ = [
    "Batch",
    "Corpus",
    "ExampleLoader",
    "Examples",
    "ImageData",
    "Labelled",
    "Loader",
    "ReviewData",
    "Speech",
    "SpeechData",
    "StreamLoader",
    "TextData",
    "Utterance",
    "UtteranceLoader",
    "Vocabulary",
    "decode_text",
    "encode_file",
    "encode_text",
    "load_images",
    "load_reviews",
    "load_speech",
    "load_text",
    "read_audio",
    "save_features",
    "spectrogram",
]
