"""The streaming detokenizer: pieces join to the decoded text, characters stay whole, stop strings are held back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.runtime.common.errors import InvalidRequest
from quire.runtime.engine.markup.markup import MARK
from quire.runtime.engine.text.detokenizer import Detokenizer, IncrementalDetokenizer, StopDetokenizer
from quire.runtime.engine.text.tokenizer import Tokenizer

CHARACTERS = st.sampled_from("abcEND \n\t é中文字👩👧🇩🇪\u200d") | st.characters(exclude_categories=["Cs"])
TEXT = st.text(alphabet=CHARACTERS)


def stream(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.push([token_id]) for token_id in token_ids), detokenizer.finish()]


@given(text=TEXT)
def test_pieces_join_to_the_decoded_text(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text)
    assert "".join(stream(IncrementalDetokenizer(byte_level), ids)) == byte_level.decode(ids) == text


@given(ids=st.lists(st.integers(0, 5000), max_size=60))
def test_pieces_of_any_token_ids_join_to_the_decoded_text(byte_level: Tokenizer, ids: list[int]) -> None:
    """Include broken UTF-8, special tokens and padded ids, which a random model generates."""
    assert "".join(stream(IncrementalDetokenizer(byte_level), ids)) == byte_level.decode(ids)


@given(ids=st.lists(st.integers(0, 255).map(lambda byte: byte + 1), max_size=40))
def test_broken_utf8_gives_the_same_replacement_characters(byte_level: Tokenizer, ids: list[int]) -> None:
    assert "".join(stream(IncrementalDetokenizer(byte_level), ids)) == byte_level.decode(ids)


@given(text=TEXT, cuts=st.lists(st.integers(1, 4), max_size=40))
def test_the_grouping_of_tokens_does_not_matter(byte_level: Tokenizer, text: str, cuts: list[int]) -> None:
    ids = byte_level.encode(text)
    detokenizer = StopDetokenizer(IncrementalDetokenizer(byte_level), ["END"])
    grouped = []
    rest = ids
    for cut in cuts:
        grouped.append(detokenizer.push(rest[:cut]))
        rest = rest[cut:]
    grouped += [detokenizer.push(rest), detokenizer.finish()]
    assert "".join(grouped) == "".join(stream(StopDetokenizer(IncrementalDetokenizer(byte_level), ["END"]), ids))


@pytest.mark.parametrize("text", ["👩‍👩‍👧", "日本語", "é", "🇩🇪 ok"])
def test_a_character_appears_only_when_complete(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text)
    detokenizer = IncrementalDetokenizer(byte_level)
    seen = ""
    for token_id in ids:
        seen += detokenizer.push([token_id])
        assert text.startswith(seen)
        assert "\ufffd" not in seen
    assert seen == text
    assert len(ids) > len(text), "the text must be split below characters for this test to mean anything"


def test_an_unfinished_character_is_replaced_at_the_end(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("日")[:-1]
    assert stream(IncrementalDetokenizer(byte_level), ids) == [""] * len(ids) + ["\ufffd"]


@given(text=TEXT)
def test_sentencepiece_pieces_join_to_the_decoded_text(sentencepiece: Tokenizer, text: str) -> None:
    ids = sentencepiece.encode(text)
    assert "".join(stream(IncrementalDetokenizer(sentencepiece), ids)) == sentencepiece.decode(ids)


@given(
    ids=st.lists(st.integers(256 + 3, 256 + 18) | st.integers(3 + 0x20, 3 + 0x7E) | st.sampled_from([0, 1, 2, 9999]))
)
def test_sentencepiece_spaces_depend_on_their_context(sentencepiece: Tokenizer, ids: list[int]) -> None:
    """Use pieces, ASCII bytes, special and unknown ids in any order; only the first space of the text is dropped."""
    assert "".join(stream(IncrementalDetokenizer(sentencepiece), ids)) == sentencepiece.decode(ids)


@given(ids=st.lists(st.integers(0, 3)))
def test_a_space_depends_on_the_token_just_before(word_ends: Tokenizer, ids: list[int]) -> None:
    assert "".join(stream(IncrementalDetokenizer(word_ends), ids)) == word_ends.decode(ids)


def test_sentencepiece_byte_fallback_waits_for_the_whole_character(sentencepiece: Tokenizer) -> None:
    ids = [3 + byte for byte in "日".encode()]
    assert stream(IncrementalDetokenizer(sentencepiece), ids) == ["", "", "日", ""]


def test_sentencepiece_invalid_byte_before_text_is_replaced(sentencepiece: Tokenizer) -> None:
    ids = [3 + 0xE6, *sentencepiece.encode("the cat")]
    assert "".join(stream(IncrementalDetokenizer(sentencepiece), ids)) == "\ufffd the cat"


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "word_ends"])
@given(data=st.data())
def test_text_goes_on_after_the_prompts_text(
    byte_level: Tokenizer, sentencepiece: Tokenizer, word_ends: Tokenizer, name: str, data: st.DataObject
) -> None:
    """Draw tokens that begin and end at characters: printable ASCII, pieces, special and unknown ids."""
    tokenizer, ids = {
        "byte_level": (byte_level, st.integers(1, 94) | st.integers(300, 600) | st.sampled_from([0, 9999])),
        "sentencepiece": (sentencepiece, st.integers(259, 274) | st.integers(35, 129) | st.sampled_from([0, 1, 9999])),
        "word_ends": (word_ends, st.integers(0, 3)),
    }[name]
    prompt = data.draw(st.lists(ids, max_size=8))
    output = data.draw(st.lists(ids, max_size=8))
    text = "".join(stream(IncrementalDetokenizer(tokenizer, context=prompt), output))
    assert tokenizer.decode(prompt) + text == tokenizer.decode([*prompt, *output])


@pytest.mark.parametrize("prompt", [["▁the"], ["a", "</s>"], ["</s>", "t", "<s>", "</s>"], ["▁"], ["<0x0A>"]])
def test_the_first_word_after_a_prompt_keeps_its_space(sentencepiece: Tokenizer, prompt: list[str]) -> None:
    vocabulary = sentencepiece._fast.get_vocab()
    context = [vocabulary[piece] for piece in prompt]
    assert IncrementalDetokenizer(sentencepiece, context=context).push([vocabulary["▁cat"]]) == " cat"
    stopped = StopDetokenizer(IncrementalDetokenizer(sentencepiece, context=context), [" ca"])
    assert stopped.push([vocabulary["▁cat"]]) == ""
    assert stopped.stop_string == " ca"


@pytest.mark.parametrize("prompt", [[], ["<s>"], ["<s>", "</s>"]])
def test_the_first_word_of_a_text_loses_its_space(sentencepiece: Tokenizer, prompt: list[str]) -> None:
    vocabulary = sentencepiece._fast.get_vocab()
    context = [vocabulary[piece] for piece in prompt]
    assert IncrementalDetokenizer(sentencepiece, context=context).push([vocabulary["▁cat"]]) == "cat"
    read = IncrementalDetokenizer(sentencepiece, context=context, as_bytes=True)
    assert read.push([vocabulary["▁cat"]]) == " cat", "a grammar has allowed a space"


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        (b"a\xe6\x97", b"\xa5b", "日b"),  # the output completes the character
        (b"a\xe6\x97", b"b", "b"),  # the U+FFFD is in the prompt's text
        (b"a\xe6\x97", b"", ""),
        (b"a\xe6", b"\x97", ""),
        (b"\xf0\x9f\x91", b"\xa7", "👧"),
        (b"\xa5\xa5", b"\xc3\xa9", "é"),
    ],
)
def test_a_character_that_the_prompt_begins(
    byte_level: Tokenizer, sentencepiece: Tokenizer, name: str, prompt: bytes, output: bytes, expected: str
) -> None:
    if name == "byte_level":
        tokenizer = byte_level
        id_of = {byte_level.token(each).data: each for each in range(1, 257)}
    else:
        tokenizer = sentencepiece
        id_of = {bytes([byte]): 3 + byte for byte in range(256)}
    context, ids = ([id_of[bytes([byte])] for byte in part] for part in (prompt, output))
    assert "".join(stream(IncrementalDetokenizer(tokenizer, context=context), ids)) == expected


STOPS = st.lists(st.sampled_from(["END", "EN", "ND a", "aab", "aa", "中文", "\n\n", " ", "👧"]), min_size=1, max_size=4)
STOP_TEXT = st.text(alphabet="abEND \n中文👧", max_size=40)


def first_stop(text: str, stops: list[str]) -> tuple[int, int] | None:
    """Return (start, end) of the stop string that ends first, of several the longest, by brute force."""
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    return None if not ends else (min(ends)[0] + min(ends)[1], min(ends)[0])


@pytest.mark.parametrize("include", [False, True])
@given(text=STOP_TEXT, stops=STOPS)
def test_text_is_cut_at_the_first_stop_string(
    byte_level: Tokenizer, text: str, stops: list[str], include: bool
) -> None:
    detokenizer = StopDetokenizer(IncrementalDetokenizer(byte_level), stops, include)
    pieces = stream(detokenizer, byte_level.encode(text))
    found = first_stop(text, stops)
    expected = text if found is None else text[: found[1] if include else found[0]]
    assert "".join(pieces) == expected
    assert (detokenizer.stop_string is not None) == (found is not None)


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["aab"], "aaab", "a"),  # begins inside a match that failed
        (["abac"], "ababac", "ab"),
        (["ababb"], "abaababb", "aba"),
        (["b", "ab"], "cab", "c"),  # the longest of two that end together, in either order
        (["ab", "b"], "cab", "c"),
        (["abcd", "bc"], "abcd", "a"),  # the first that ends, though another began earlier
    ],
)
def test_overlapping_stop_strings(byte_level: Tokenizer, stops: list[str], text: str, expected: str) -> None:
    ids = [byte_level.encode(character)[0] for character in text]
    assert "".join(stream(StopDetokenizer(IncrementalDetokenizer(byte_level), stops), ids)) == expected


@given(text=STOP_TEXT, stops=STOPS)
def test_stop_token_index_is_the_first_token_that_completes_a_stop_string(
    byte_level: Tokenizer, text: str, stops: list[str]
) -> None:
    ids = byte_level.encode(text)
    detokenizer = StopDetokenizer(IncrementalDetokenizer(byte_level), stops)
    detokenizer.push(ids)
    decoded = [byte_level.decode(ids[: count + 1]) for count in range(len(ids))]
    holding = [index for index, prefix in enumerate(decoded) if any(stop in prefix for stop in stops)]
    assert detokenizer.stop_token_index == (holding[0] if holding else None)


def test_a_stop_string_across_tokens_is_held_back(byte_level: Tokenizer) -> None:
    detokenizer = StopDetokenizer(IncrementalDetokenizer(byte_level), ["END"])
    ids = [byte_level.encode(character)[0] for character in "xENyENDz"]
    assert [detokenizer.push([token_id]) for token_id in ids] == ["x", "", "", "ENy", "", "", "", ""]
    assert detokenizer.stop_string == "END"
    assert detokenizer.stop_token_index == 6
    assert detokenizer.finish() == ""


def test_finish_returns_held_text(byte_level: Tokenizer) -> None:
    detokenizer = StopDetokenizer(IncrementalDetokenizer(byte_level), ["END"])
    assert detokenizer.push(byte_level.encode("the EN")) == "the "
    assert detokenizer.finish() == "EN"
    assert detokenizer.stop_string is None


def test_finish_returns_held_text_before_an_unfinished_character(byte_level: Tokenizer) -> None:
    detokenizer = StopDetokenizer(IncrementalDetokenizer(byte_level), ["END"])
    assert detokenizer.push([*byte_level.encode("xEN"), byte_level.encode("é")[0]]) == "x"
    assert detokenizer.finish() == "EN\ufffd"


def test_a_stop_string_before_min_tokens_is_text(byte_level: Tokenizer) -> None:
    ids = [byte_level.encode(character)[0] for character in "aENDbENDc"]
    detokenizer = StopDetokenizer(IncrementalDetokenizer(byte_level), ["END"], min_tokens=5)
    assert "".join(stream(detokenizer, ids)) == "aENDb"
    assert detokenizer.stop_token_index == 7


@pytest.mark.parametrize(("min_tokens", "last"), [(3, 3), (4, 3), (5, 7)])
def test_a_stop_string_counts_if_it_ends_at_min_tokens_or_later(
    byte_level: Tokenizer, min_tokens: int, last: int
) -> None:
    """The first END ends with the fourth token, so it counts if `min_tokens` is at most 4."""
    ids = [byte_level.encode(character)[0] for character in "aENDbENDc"]
    detokenizer = StopDetokenizer(IncrementalDetokenizer(byte_level), ["END"], min_tokens=min_tokens)
    detokenizer.push(ids)
    assert detokenizer.stop_token_index == last


@pytest.mark.parametrize(
    ("stop", "text", "min_tokens", "expected"),
    [("aa", "baaab", 4, "ba"), ("aba", "cababab", 6, "cab"), ("abab", "abababx", 5, "ab")],
)
def test_a_stop_string_may_overlap_one_before_min_tokens(
    byte_level: Tokenizer, stop: str, text: str, min_tokens: int, expected: str
) -> None:
    ids = [byte_level.encode(character)[0] for character in text]
    detokenizer = StopDetokenizer(IncrementalDetokenizer(byte_level), [stop], min_tokens=min_tokens)
    assert "".join(stream(detokenizer, ids)) == expected
    assert detokenizer.stop_token_index == len(expected) + len(stop) - 1


def test_an_empty_stop_string_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="must not be empty"):
        StopDetokenizer(IncrementalDetokenizer(byte_level), [""])


def test_an_unfinished_character_ends_before_a_marker(byte_level: Tokenizer) -> None:
    first, *_ = byte_level.encode("é")
    (marker,) = byte_level.encode("a")
    ids = [first, marker, *byte_level.encode("b")]
    assert len(byte_level.encode("é")) == 2
    detokenizer = IncrementalDetokenizer(byte_level, markup={marker})
    assert "".join(stream(detokenizer, ids)) == f"\ufffd{MARK}ab"
