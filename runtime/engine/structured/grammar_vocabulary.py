"""A model's vocabulary in the form that llguidance reads: the bytes of each token, and the tokens of a text."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from llguidance import LLTokenizer, TokenizerWrapper

from ...common.errors import GenerationFailed, QuireError
from ...common.heap import return_unused_memory
from ...model import read_spec
from ..text import Tokenizer
from ..text_processor import TextProcessor

MAX_FORCED_CHARACTERS = 2048  # characters read of a forced text: its first token is allowed, MAX_FORCED are drafts
MAX_KNOWN_TEXTS = 2000  # forced texts whose tokens are kept
MAX_KNOWN_CHARACTERS = 100  # longest forced text that is remembered
LEAD = "\x02"  # control character after which SentencePiece puts no space before a text
# Tokens that the library checks together where a grammar allows all of them: masks of words and names take a quarter of
# the time. The library's own slices are for JSON strings.
SLICES = (r"[a-z ]{1,30}", r"[a-zA-Z0-9_]{1,30}")


def load_tables(path: Path) -> LLTokenizer:
    """Return llguidance's tables of a model's vocabulary, which keep the tokenizer.

    Raises GenerationFailed if no token ends the output, and the errors of loading the tokenizer.
    """
    spec = read_spec(path)
    tokenizer = TextProcessor.load(path).tokenizer
    assert tokenizer is not None, "Validator.check_options refuses grammars for a model without tokenizer"
    known = tokenizer.eos_token_ids.union(spec.eos_token_ids)
    ends = sorted(token_id for token_id in known if token_id < spec.vocab_size)
    if not ends:
        raise GenerationFailed("structured_outputs need a token that ends the output; this model has none")
    tokenizer.encode_special_as_text()  # forced text is plain text and does not end the output
    vocabulary = GrammarVocabulary(tokenizer, spec.vocab_size, ends)
    slices = [*SLICES, *LLTokenizer.general_slices()]
    vocabulary.tables = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=ends, slices=slices)
    return vocabulary.tables


class ModelTables:
    """The tables of the model at `path`, loaded at their first use. Any thread may call `get`.

    Loading takes seconds for a large vocabulary. One call of the library holds the GIL for a part of that time, a
    second for 262,144 tokens; `holding_up` encloses the call.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.holding_up: Callable[[], AbstractContextManager[None]] = nullcontext
        self._loaded: LLTokenizer | QuireError | None = None  # tables, or the reason why there are none
        self._loading = threading.Lock()

    def get(self) -> LLTokenizer:
        """Return the tables. Raises as `load_tables`, which is called once."""
        with self._loading:
            if self._loaded is None:
                try:
                    with self.holding_up():
                        self._loaded = load_tables(self._path)
                    return_unused_memory()
                except QuireError as error:
                    self._loaded = error
        if isinstance(self._loaded, QuireError):
            raise self._loaded.with_traceback(None)
        return self._loaded


class GrammarVocabulary:
    """A tokenizer in the form that llguidance reads, with as many tokens as the model has logits.

    Logits beyond the tokenizer's ids pad the model's matrix: their tokens have no bytes, so no grammar allows them. A
    model may also have fewer logits.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = ends[0]
        self.tokens = tokenizer.all_bytes(vocab_size)
        self._known: dict[str, list[int]] = {}  # forced texts are mostly names of properties, which recur
        # An end token is not text, even where the tokenizer's files do not call it special.
        special = tokenizer.special_token_ids.union(ends)
        self.special_token_ids = sorted(token_id for token_id in special if token_id < vocab_size)
        self._special = frozenset(self.special_token_ids)
        self._lead = self._encoded(LEAD)
        self.tables: LLTokenizer | None = None  # made from this object

    def __call__(self, text: str) -> list[int]:
        """Return the ids of forced text, or of its beginning if it is long or the model has no token for the rest."""
        known = self._known.get(text)
        if known is None:
            known = self._token_ids(text[:MAX_FORCED_CHARACTERS])
            if len(text) <= MAX_KNOWN_CHARACTERS:
                if len(self._known) >= MAX_KNOWN_TEXTS:
                    self._known.clear()
                self._known[text] = known
        return known

    def _token_ids(self, text: str) -> list[int]:
        """Return ids with exactly the bytes of the text: with other ids llguidance fails.

        Many tokenizers change a text before they encode it: they put a space before it, compose its characters (NFC),
        or convert it to lower case. In such cases the text is read with the longest tokens, from left to right.
        """
        data = text.encode()
        token_ids = self._encoded(text)
        if self._have_bytes(token_ids, data):
            return token_ids
        after_lead = self._encoded(LEAD + text)
        num_lead = len(self._lead)
        if after_lead[:num_lead] == self._lead and self._have_bytes(after_lead[num_lead:], data):
            return after_lead[num_lead:]
        longest = self.tables.greedy_tokenize(text) if self.tables is not None else []
        while longest and not self._have_bytes(longest, data, is_beginning=True):
            longest.pop()  # the library skips bytes without a token
        return longest

    def _encoded(self, text: str) -> list[int]:
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # includes the library's panics: an exception here is a panic of llguidance
            return []

    def _have_bytes(self, token_ids: Sequence[int], data: bytes, *, is_beginning: bool = False) -> bool:
        """Return whether the model has the tokens, and they have these bytes or a prefix of them."""
        num_tokens = len(self.tokens)
        if any(token_id >= num_tokens or token_id in self._special for token_id in token_ids):
            return False
        found = b"".join([self.tokens[token_id] for token_id in token_ids])
        return data.startswith(found) if is_beginning else data == found
