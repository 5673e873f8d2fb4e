"""Text in and out of token ids: the tokenizer, streaming decode with stop strings, chat templates. Knows no engine."""

from .chat import ChatTemplate
from .detokenizer import IncrementalDetokenizer
from .tokenizer import Tokenizer

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "Tokenizer"]
