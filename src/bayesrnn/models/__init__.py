"""Plain modules: nothing here knows of distributions over weights."""

from bayesrnn.models.captioner import Captioner, CaptionerSettings
from bayesrnn.models.classifier import Mlp, MlpSettings, ReviewModel, ReviewSettings
from bayesrnn.models.dropout import DropoutSettings, Mask, MaskedEmbedding, MaskedRNN
from bayesrnn.models.language import LanguageModel, LanguageSettings
from bayesrnn.models.layers import detach
from bayesrnn.models.linear import Linear
from bayesrnn.models.series import Forecaster, SeriesSettings
from bayesrnn.models.speech import SpeechSettings, build_speech_network

__all__ = [
    "Captioner",
    "CaptionerSettings",
    "DropoutSettings",
    "Forecaster",
    "LanguageModel",
    "LanguageSettings",
    "Linear",
    "Mask",
    "MaskedEmbedding",
    "MaskedRNN",
    "Mlp",
    "MlpSettings",
    "ReviewModel",
    "ReviewSettings",
    "SeriesSettings",
    "SpeechSettings",
    "build_speech_network",
    "detach",
]
