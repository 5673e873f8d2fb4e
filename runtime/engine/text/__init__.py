"""Text to token ids and back: tokenizer, streaming detokenizer with stop strings, chat templates, markup of outputs."""

from ..markup.markup import Markup
from ..markup.markup_parser import OutputParser
from .chat import ChatTemplate
from .detokenizer import Detokenizer, IncrementalDetokenizer, StopDetokenizer
from .tokenizer import Token, Tokenizer, has_tokenizer

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "IncrementalDetokenizer",
    "Markup",
    "OutputParser",
    "StopDetokenizer",
    "Token",
    "Tokenizer",
    "has_tokenizer",
]
