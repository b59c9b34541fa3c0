"""Data: from files to batches."""

from bayesrnn.data.audio import SpeechData, read_audio, spectrogram
from bayesrnn.data.batching import Batch, Loader, StreamLoader
from bayesrnn.data.captions import CaptionData, Captions, Pictures, load_captions
from bayesrnn.data.features import Features, read_features, write_features
from bayesrnn.data.images import ImageData, load_images
from bayesrnn.data.labelled import ExampleLoader, Examples, Labelled
from bayesrnn.data.padded import CaptionLoader, choose_lengths
from bayesrnn.data.reviews import ReviewData, load_reviews
from bayesrnn.data.series import Rows, Series, SeriesData, load_rows, load_series
from bayesrnn.data.speech import Speech, Utterance, load_speech, prepare_speech
from bayesrnn.data.text import Corpus, TextData, decode_text, encode_file, encode_text, load_text
from bayesrnn.data.utterances import UtteranceLoader
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
    "Rows",
    "Series",
    "SeriesData",
    "Speech",
    "SpeechData",
    "StreamLoader",
    "TextData",
    "Utterance",
    "UtteranceLoader",
    "Vocabulary",
    "choose_lengths",
    "decode_text",
    "encode_file",
    "encode_text",
    "load_captions",
    "load_images",
    "load_reviews",
    "load_rows",
    "load_series",
    "load_speech",
    "load_text",
    "prepare_speech",
    "read_audio",
    "read_features",
    "spectrogram",
    "write_features",
]
