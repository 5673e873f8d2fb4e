"""Text to token ids and back: tokenizer, streaming detokenizer with stop strings, chat templates, markup of outputs."""

from .chat import ChatTemplate
from .detokenizer import IncrementalDetokenizer
from .markup import Markup
from .markup_parser import OutputParser
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
