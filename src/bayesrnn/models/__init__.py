"""Plain modules; nothing here knows of distributions over weights."""

from bayesrnn.models.language import LanguageModel, LanguageSettings, detach

__all__ = ["LanguageModel", "LanguageSettings", "detach"]
