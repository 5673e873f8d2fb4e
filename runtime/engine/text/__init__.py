"""Text to token ids and back: tokenizer, streaming detokenizer with stop strings, chat templates, markup of outputs."""

from ..markup.markup import Markup
from ..markup.markup_parser import OutputParser
from .chat import ChatTemplate
from .detokenizer import IncrementalDetokenizer
from .tokenizer import Token, Tokenizer, has_tokenizer

__all__ = [
    "ChatTemplate",
    "IncrementalDetokenizer",
    "Markup",
    "OutputParser",
    "Token",
    "Tokenizer",
    "has_tokenizer",
]
