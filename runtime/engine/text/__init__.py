"""Text to token ids and back: tokenizer, streaming detokenizer with stop strings, chat templates."""

from .chat import ChatTemplate
from .detokenizer import IncrementalDetokenizer
from .tokenizer import Token, Tokenizer, has_tokenizer

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "Token", "Tokenizer", "has_tokenizer"]
