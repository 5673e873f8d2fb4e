"""The tokenizer of a Hugging Face folder: tokenizer.json, with the tokens and settings of other files.

All files are read as in transformers. They are untrusted: types and sizes are checked before use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from ...common.errors import CorruptCheckpoint, ModelNotFound
from .text_files import read_file, read_json
from .tokenizer_limits import check_limits

TOKENIZER = "tokenizer.json"
MAX_TOKENIZER_BYTES = 128 << 20  # Gemma 3's file, with 262,144 tokens, has 33 MB
SETTINGS = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
MAX_DECLARED = 1 << 16  # tokens in one file
MAX_DECLARED_CHARACTERS = 1 << 20  # characters of all declared tokens
TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# Classes of transformers 4 that read begin and end tokens from tokenizer_config.json and ignore tokenizer.json.
CONFIGURED_CLASSES = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer")


def read_folder(folder: Path) -> tuple[FastTokenizer, frozenset[int]]:
    """Return a folder's tokenizer, and the ids that end a generation. Raises ModelNotFound or CorruptCheckpoint."""
    fast = _load_fast(folder)
    settings = read_settings(folder)
    limit = _vocab_size(folder)
    _add_tokens(fast, folder, settings, limit)
    _put_ends(fast, settings)
    return fast, _eos_token_ids(folder, fast, settings, limit)


def _load_fast(folder: Path) -> FastTokenizer:
    path = folder / TOKENIZER
    data = read_file(path, MAX_TOKENIZER_BYTES)
    if data is None:
        raise ModelNotFound(f"{folder} has no {TOKENIZER}; Quire needs a Hugging Face folder with a fast tokenizer")
    check_limits(path, data)
    try:
        fast = FastTokenizer.from_buffer(data)
        # A file saved during training may enable these; prompts must be neither truncated nor padded.
        fast.no_truncation()
        fast.no_padding()
        if isinstance(fast.model, BPE):
            fast.model.dropout = None  # the tokens of a text would vary
        with suppress(Exception):  # the vocabulary may lack these letters
            fast.encode_batch_fast(["a", ("a", "b")])
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception, and its panics are BaseException
        raise CorruptCheckpoint(f"{path} is not a readable tokenizer: {error}") from error
    return fast


def read_settings(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json, with the special tokens of special_tokens_map.json if that is in use.

    transformers reads the latter only in folders of older versions, without `added_tokens_decoder` in
    tokenizer_config.json.
    """
    settings = read_json(folder / SETTINGS)
    special = {} if "added_tokens_decoder" in settings else read_json(folder / SPECIAL_TOKENS)
    return {**settings, **special}


def _vocab_size(folder: Path) -> int | None:
    """Return the number of the model's logits if config.json has it."""
    config = read_json(folder / "config.json")
    for part in (config, config.get("text_config")):
        size = part.get("vocab_size") if isinstance(part, dict) else None
        if type(size) is int and size > 0:
            return size
    return None


def _add_tokens(fast: FastTokenizer, folder: Path, settings: Mapping[str, Any], limit: int | None) -> None:
    """Add the tokens that the other files declare, except tokens without a logit."""
    added = fast.get_added_tokens_decoder()
    known = {token.content: token for token in added.values()}
    named = dict(_named_tokens(fast, settings))
    others = dict(_other_special_tokens(settings))
    if "added_tokens_decoder" in settings:
        declared = dict(_declared_tokens(settings["added_tokens_decoder"]))
    else:
        declared = dict(_tokens_of_old_folder(folder, named | others))
        declared = {text: token for text, token in declared.items() if text not in known}
    wanted = {text: token for text, token in declared.items() if repr(known.get(text)) != repr(token)}
    wanted |= {text: token for text, token in (named | others).items() if text not in known and text not in wanted}
    wanted |= {text: known[text] for text in named if text in known and text not in wanted}
    if len(wanted) > MAX_DECLARED or sum(map(len, wanted)) > MAX_DECLARED_CHARACTERS:
        raise CorruptCheckpoint(
            f"{folder} declares more than {MAX_DECLARED} tokens beside tokenizer.json, or these have more than "
            f"{MAX_DECLARED_CHARACTERS} characters"
        )
    next_id = max(fast.get_vocab_size(with_added_tokens=False), max(added, default=-1) + 1)
    tokens = []
    for text, token in wanted.items():
        if fast.token_to_id(text) is None:
            if limit is not None and next_id >= limit:
                continue
            next_id += 1
        token.special = token.special or text in named
        tokens.append(token)
    if tokens:
        fast.add_tokens(tokens)


def _declared_tokens(declared: object) -> Iterator[tuple[str, AddedToken]]:
    """Yield the tokens of `added_tokens_decoder` in the order of their ids."""
    where = f"{SETTINGS}: added_tokens_decoder"
    if not isinstance(declared, dict) or not all(key.isdecimal() and len(key) < 10 for key in declared):
        raise CorruptCheckpoint(f"{where} must hold tokens by their ids")
    for _, each in sorted((int(key), each) for key, each in declared.items()):
        yield _token(each, where)


def _tokens_of_old_folder(folder: Path, special: Mapping[str, AddedToken]) -> Iterator[tuple[str, AddedToken]]:
    """Yield the tokens of added_tokens.json in the order of their ids."""
    declared = read_json(folder / ADDED_TOKENS)
    if not all(type(token_id) is int for token_id in declared.values()):
        raise CorruptCheckpoint(f"{ADDED_TOKENS} must hold token ids by the texts of tokens")
    for text in sorted(declared, key=declared.__getitem__):
        yield _token({"content": text, "special": text in special}, ADDED_TOKENS)


def _named_tokens(fast: FastTokenizer, settings: Mapping[str, Any]) -> Iterator[tuple[str, AddedToken]]:
    """Yield the tokens with a role, such as `eos_token`. A rare role, such as `image_token`, makes no new token."""
    for name in TOKEN_ROLES:
        declared = settings.get(name)
        if isinstance(declared, str | dict) and token_text(declared) != "":
            yield _special_token(declared, name)
    extra = settings.get("extra_special_tokens")
    few = {name: declared for name, declared in settings.items() if name.endswith("_token") and name not in TOKEN_ROLES}
    for name, declared in (few | (extra if isinstance(extra, dict) else {})).items():
        if not name.startswith("add_") and token_text(declared):
            text, token = _special_token(declared, name)
            if fast.token_to_id(text) is not None:
                yield text, token


def _other_special_tokens(settings: Mapping[str, Any]) -> Iterator[tuple[str, AddedToken]]:
    """Yield the tokens that are declared special and have no role."""
    for name in ("extra_special_tokens", "additional_special_tokens"):
        declared = settings.get(name)
        for each in declared if isinstance(declared, list) else ():
            yield _special_token(each, name)


def _special_token(declared: object, where: str) -> tuple[str, AddedToken]:
    content = declared if isinstance(declared, dict) else {"content": declared}
    return _token({**content, "special": True}, where)


def _token(declared: object, where: str) -> tuple[str, AddedToken]:
    """Return a token and its text. Raises CorruptCheckpoint, which says where the token is declared."""
    text = declared.get("content") if isinstance(declared, dict) else None
    if not isinstance(declared, dict) or not isinstance(text, str) or not text:
        raise CorruptCheckpoint(f"{where}: a token must be an object with content, a text, not {declared!r:.60}")
    flags = {name: declared[name] for name in TOKEN_FLAGS if declared.get(name) is not None}
    if not all(type(flag) is bool for flag in flags.values()):
        raise CorruptCheckpoint(f"{where}: {', '.join(TOKEN_FLAGS)} must be true or false")
    try:
        return text, AddedToken(text, **flags)
    except UnicodeEncodeError as error:  # JSON can have half of a surrogate pair
        raise CorruptCheckpoint(f"{where}: {text!r:.60} is not a text: {error}") from error


def _put_ends(fast: FastTokenizer, settings: Mapping[str, Any]) -> None:
    """Put the begin and end tokens around texts according to `add_bos_token` and `add_eos_token`.

    transformers 5 uses the template of tokenizer.json unchanged: e5-mistral's texts lack the end token that is pooled.
    Version 4 has its own template for some classes. For other classes, true adds the token and false changes nothing.
    """
    if not any(type(settings.get(f"add_{role}_token")) is bool for role in ("bos", "eos")):
        return
    name = settings.get("tokenizer_class")
    is_configured = isinstance(name, str) and name.removesuffix("Fast") in CONFIGURED_CLASSES
    before, after = _around(fast)
    new_before, new_after = before.copy(), after.copy()
    for role, ids, place in (("bos", new_before, 0), ("eos", new_after, -1)):
        text = token_text(settings.get(f"{role}_token"))
        token_id = None if text is None else fast.token_to_id(text)
        is_added = settings.get(f"add_{role}_token")
        if token_id is None or type(is_added) is not bool:
            continue
        has_token = bool(ids) and ids[place] == token_id
        if is_added and not has_token:
            ids.insert(0 if role == "bos" else len(ids), token_id)
        elif has_token and not is_added and is_configured:
            del ids[place]
    if (new_before, new_after) != (before, after):
        fast.post_processor = _template(fast, new_before, new_after)


def _around(fast: FastTokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer puts before and after a text."""
    try:
        encoding = fast.encode_batch_fast(["a"])[0]
    except Exception:  # the vocabulary lacks the letter
        return [], []
    ids = encoding.ids
    is_special = encoding.special_tokens_mask
    first = is_special.index(0) if 0 in is_special else len(ids)
    count = len(ids) - sum(is_special)
    return ids[:first], ids[first + count :]


def _template(fast: FastTokenizer, before: list[int], after: list[int]) -> TemplateProcessing:
    names = {token_id: fast.id_to_token(token_id) for token_id in (*before, *after)}
    parts = [[f"{token_id}:{number}" for token_id in ids] for number in (0, 1) for ids in (before, after)]
    single = [*parts[0], "$A:0", *parts[1]]
    special = [{"id": str(token_id), "ids": [token_id], "tokens": [text]} for token_id, text in names.items()]
    return TemplateProcessing(single=single, pair=[*single, *parts[2], "$B:1", *parts[3]], special_tokens=special)


def _eos_token_ids(folder: Path, fast: FastTokenizer, settings: Mapping[str, Any], limit: int | None) -> frozenset[int]:
    """Return the ids of generation_config.json or else of config.json, and the id of the tokenizer's own end token."""
    config = read_json(folder / "config.json")
    declared = read_json(folder / "generation_config.json").get("eos_token_id", config.get("eos_token_id"))
    ids = set()
    for token_id in declared if isinstance(declared, list) else [] if declared is None else [declared]:
        if type(token_id) is not int:
            raise CorruptCheckpoint(
                f"{folder}: eos_token_id must be a token id or a list of token ids, not {declared!r:.60}"
            )
        if token_id < 0 or (limit is not None and token_id >= limit):
            bound = "at least 0" if limit is None else f"0 to {limit - 1}"
            raise CorruptCheckpoint(f"{folder}: eos_token_id is {token_id}; the model's tokens are {bound}")
        ids.add(token_id)
    text = token_text(settings.get("eos_token"))
    if text is not None:
        ids |= {token_id for token_id in [fast.token_to_id(text)] if token_id is not None}
    return frozenset(ids)


def unknown_end_ids(folder: Path) -> tuple[list[int], int | None]:
    """Return the end ids of config.json without a logit, and the number of logits if it is known."""
    config = read_json(folder / "config.json")
    limit = _vocab_size(folder)
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    declared = [part.get("eos_token_id") for part in parts]
    ids = {each for ids in declared for each in (ids if isinstance(ids, list) else [ids]) if type(each) is int}
    return sorted(each for each in ids if limit is not None and not 0 <= each < limit), limit


def token_text(declared: object) -> str | None:
    """Return the text of a special token, which is declared as text or as an AddedToken object."""
    if isinstance(declared, dict):
        declared = declared.get("content")
    return declared if isinstance(declared, str) else None
