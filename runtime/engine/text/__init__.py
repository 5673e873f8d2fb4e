"""Text to token ids and back: tokenizer, streaming detokenizer with stop strings, chat templates."""

from .chat import ChatTemplate
from .detokenizer import IncrementalDetokenizer
from .tokenizer import Tokenizer, has_tokenizer

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "Tokenizer", "has_tokenizer"]
