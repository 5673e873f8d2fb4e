"""The state cache: where states are kept, what continues from them, and what is evicted."""

from __future__ import annotations

import pytest
from quire.pager import InvariantViolated, Pager, PageTable, StatePool, check

from .test_states import PAGE, States

PROMPT = list(range(1, 15))  # 3 full pages and 2 tokens


def prefill(states: States, tokens: list[int], *, chunk: int = 99) -> PageTable:
    """Open a table and compute the tokens in chunks, as the scheduler does."""
    table = states.pager.open(tokens)
    while table.num_tokens < len(tokens):
        end = min(table.num_tokens + chunk, states.pager.next_end(table, table.num_tokens, len(tokens)))
        extend(states, table, tokens[:end])
    return table


def extend(states: States, table: PageTable, tokens: list[int]) -> None:
    """Compute the tokens after those of the table, and commit them."""
    states.compute(table, tokens[table.num_tokens :])
    states.pager.commit(table, tokens)


def kept(states: States) -> list[int]:
    """Return the number of tokens of each kept state, the least recently used one first."""
    return [len(states.of[slot]) for slot in states.pager.cached_states.slots()]


def test_a_prompt_continues_from_the_state_at_its_last_full_page() -> None:
    states = States(2, cached=4)
    prefill(states, PROMPT).release()
    assert kept(states) == [12]
    table = states.pager.open(PROMPT)
    assert (table.num_tokens, states.pager.prefix_hit_tokens) == (12, 12)
    extend(states, table, PROMPT)
    assert states.of[table.state] == PROMPT
    other = states.pager.open([*PROMPT[:13], 99, 98])
    assert other.num_tokens == 12
    assert states.pager.open(PROMPT[:12]).num_tokens == 0  # There is no state before its last token.
    assert states.pager.cached_states.num_hits == 2


def test_a_prompt_that_ends_with_a_page_keeps_the_state_before_its_last_page() -> None:
    states = States(1, cached=4)
    prefill(states, PROMPT[:12]).release()
    assert kept(states) == [8, 12]
    assert states.pager.open(PROMPT[:12]).num_tokens == 8


@pytest.mark.parametrize("chunk", [1, 3, 5, 8, 99])
def test_a_long_prompt_keeps_states_at_multiples_of_the_interval_whatever_its_chunks(chunk: int) -> None:
    states = States(1, cached=9, interval=8)
    tokens = list(range(100, 130))
    prefill(states, tokens, chunk=chunk).release()
    for length, hit in [(9, 8), (16, 8), (17, 16), (25, 24), (28, 24), (29, 28), (30, 28)]:
        table = states.pager.open([*tokens[: length - 1], 7])
        assert (table.num_tokens, states.of[table.state][:hit]) == (hit, tokens[:hit])
        table.release()


def test_the_interval_is_whole_pages() -> None:
    states = States(1, cached=9, interval=5)
    table = states.pager.open(list(range(30)))
    assert [states.pager.next_end(table, first, 30) for first in (0, 7, 8, 25, 28)] == [8, 8, 16, 28, 30]
    assert States(1).pager.next_end(table, 3, 30) == 30


def test_a_state_is_kept_where_a_prompt_departs_from_another_one() -> None:
    states = States(1, cached=9)
    lengths = []
    for last in range(3):
        table = states.pager.open([*PROMPT[:9], *[50 + last] * 9])
        lengths.append(table.num_tokens)
        table.release()
        prefill(states, [*PROMPT[:9], *[50 + last] * 9]).release()
    assert lengths == [0, 0, 8]
    assert states.pager.stateless_tokens == 2 * 8  # the second prompt, which is opened twice


@pytest.mark.parametrize("chunk", [1, 3, 99])
@pytest.mark.parametrize(
    ("end", "hit"),
    [(10, 8), (11, 12), (12, 12), (4, 4), (3, 0), (0, 0)],
    ids=["in a page", "at a page's end", "after one", "in the second page", "in the first page", "at the start"],
)
def test_a_second_prompt_continues_where_the_first_message_ends(chunk: int, end: int, hit: int) -> None:
    states = States(1, cached=9, message_ends=(7, 77))
    first, second = ([*range(100, 120)] + [user] * 9 for user in (1, 2))
    for tokens in (first, second):
        tokens[end] = 77
        tokens[22] = 7  # the end of the second message
    prefill(states, first, chunk=chunk).release()
    table = states.pager.open(second)
    assert table.num_tokens == (hit or 20)  # the end of the second message where the first one is too short
    extend(states, table, second)
    assert states.of[table.state] == second


def test_a_prompt_without_the_end_of_a_message_is_one_message() -> None:
    states = States(1, cached=9, message_ends=(77,))
    assert [states.pager.next_end(states.pager.open(PROMPT[:length]), 0, length) for length in (3, 8, 9)] == [3, 4, 8]


def test_a_restored_prompt_still_keeps_a_state_where_its_first_message_ends() -> None:
    states = States(1, cached=9, message_ends=(77,), store_slots=9)
    prompt = [*range(100, 109), 77, *range(110, 120)]
    table = states.pager.open(prompt)
    extend(states, table, prompt[:3])
    spilled = states.pager.spill(table, 3)
    assert spilled is not None
    table = states.pager.restore(spilled, prompt)
    assert table is not None
    assert [states.pager.next_end(table, first, 20) for first in (3, 8, 16)] == [8, 16, 20]


def test_a_decoding_sequence_moves_one_state_along() -> None:
    states = States(1, cached=9)
    table = prefill(states, PROMPT)
    tokens = PROMPT[:]
    copies = []
    for token in range(50, 63):
        tokens.append(token)
        extend(states, table, tokens)
        copies.append(states.pool.num_copies)
    assert kept(states) == [12, 24]
    assert copies == [1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4]  # one more for the first token after the end of a page
    table.release()
    turn = states.pager.open([*tokens, 1, 2, 3])
    assert turn.num_tokens == 24
    extend(states, turn, [*tokens, 1, 2, 3])
    assert kept(states) == [12, 24, 30]  # the last one serves 28 tokens, too
    check(states.pager, [turn])


def test_a_state_that_a_prompt_used_stays() -> None:
    states = States(2, cached=9)
    table = prefill(states, PROMPT)
    tokens = [*PROMPT, 50, 51]
    extend(states, table, tokens)
    assert kept(states) == [12, 16]
    states.pager.open([*tokens, 3]).release()
    for token in range(60, 64):
        tokens.append(token)
        extend(states, table, tokens)
    assert kept(states) == [12, 16, 20]


def test_a_state_that_a_prompt_used_stays_when_another_sequence_reaches_it() -> None:
    states = States(3, cached=9)
    table, other = (prefill(states, PROMPT) for _ in range(2))
    tokens = [*PROMPT, 50, 51]
    extend(states, table, tokens)
    states.pager.open([*tokens, 3]).release()
    extend(states, other, tokens)
    extend(states, table, [*tokens, 60, 61, 62, 63])
    assert kept(states) == [12, 16, 20]


def test_the_next_state_of_a_sequence_takes_the_place_of_its_previous_one() -> None:
    states = States(1, cached=2)
    table = prefill(states, PROMPT)
    tokens = PROMPT[:]
    for token in range(50, 60):
        tokens.append(token)
        extend(states, table, tokens)
    assert kept(states) == [12, 24]


def test_a_state_that_is_ahead_of_the_page_by_draft_tokens_serves_it() -> None:
    states = States(1, cached=9)
    table = prefill(states, PROMPT)
    tokens = [*PROMPT, 50, 51, 52]
    states.compute(table, [50, 51, 52, 53, 54])  # The tokens up to 52 are right.
    table.rollback(17)
    states.pager.commit(table, tokens)
    assert len(states.of[table.state]) == 19
    assert kept(states) == [12, 19]
    extend(states, table, [*tokens, 60, 61])
    hit = states.pager.open([*tokens, 9])
    assert (hit.num_tokens, states.of[hit.state][:16]) == (16, tokens[:16])
    extend(states, hit, [*tokens, 9])
    assert states.of[hit.state] == [*tokens, 9]
    check(states.pager, [table, hit])


def test_a_state_that_is_too_far_ahead_of_the_page_is_not_kept() -> None:
    states = States(1, cached=9)
    table = prefill(states, PROMPT)
    states.compute(table, list(range(50, 57)))  # The state goes back to 18 tokens.
    table.rollback(18)
    states.pager.commit(table, [*PROMPT, 50, 51, 52, 53])
    assert kept(states) == [12]


def test_the_least_recently_used_state_is_evicted() -> None:
    states = States(1, cached=2)
    prompts = [[first, *range(20, 26)] for first in (1, 2, 3)]
    for tokens in prompts[:2]:
        prefill(states, tokens).release()
    states.pager.open(prompts[0]).release()
    prefill(states, prompts[2]).release()
    assert [states.pager.open(tokens).num_tokens for tokens in prompts] == [4, 0, 4]
    assert states.pool.num_owned == 2


def test_a_state_that_another_sequence_reaches_is_the_most_recently_used_one() -> None:
    states = States(2, cached=2)
    prompts = [[first, *range(20, 26)] for first in (1, 2, 3)]
    table = states.pager.open(prompts[0])
    for tokens in prompts[:2]:
        prefill(states, tokens).release()
    extend(states, table, prompts[0][:4])
    prefill(states, prompts[2]).release()
    assert [states.pager.open(tokens).num_tokens for tokens in prompts] == [4, 0, 4]


def test_an_evicted_page_takes_its_state_along() -> None:
    states = States(2, cached=4, pages=6)
    prefill(states, PROMPT).release()
    assert kept(states) == [12]
    table = states.pager.open([9] * 20)
    states.compute(table, [9] * 20)
    assert (kept(states), states.pool.num_owned) == ([], 1)
    table.release()
    check(states.pager, [])


def test_pages_after_the_last_state_are_the_first_that_are_evicted() -> None:
    states = States(1, cached=1, pages=8)
    table = prefill(states, PROMPT)
    assert kept(states) == [12]
    extend(states, table, [*PROMPT, 15, 16])
    assert kept(states) == [16]  # capacity for one
    table.release()
    assert states.pager.open(PROMPT).num_tokens == 0  # neither the state of 12 tokens nor one before it is left


def test_forks_and_the_cache_share_a_slot_until_one_of_them_writes() -> None:
    states = States(3, cached=4)
    table = prefill(states, PROMPT[:13])
    twin = table.fork()
    extend(states, table, [*PROMPT[:13], 14, 15, 16])
    check(states.pager, [table, twin])
    assert states.pool.num_owned == 3  # the states of 12, of 13 and of 16 tokens, the last one shared with the cache
    states.compute(twin, [70, 71, 72])
    states.pager.commit(twin, [*PROMPT[:13], 70, 71, 72])
    check(states.pager, [table, twin])
    assert kept(states) == [12, 16, 16]


def test_tenants_share_no_state() -> None:
    states = States(2, cached=4)
    prefill(states, PROMPT).release()
    assert states.pager.open(PROMPT, tenant_salt=b"other").num_tokens == 0


def test_the_audit_notices_a_state_without_its_page_and_too_many_states() -> None:
    states = States(1, cached=1)
    prefill(states, PROMPT).release()
    cached = states.pager.cached_states
    cached.capacity = 0
    with pytest.raises(InvariantViolated, match="1 states are kept, 0 are allowed"):
        check(states.pager, [])
    cached.capacity = 1
    cached._by_key[b"other"] = cached._by_key.pop(next(iter(cached)))
    with pytest.raises(InvariantViolated, match="outlived its page"):
        check(states.pager, [])


@pytest.mark.parametrize(("capacity", "interval"), [(-1, 8), (3, 0)])
def test_a_cache_has_states_and_an_interval(capacity: int, interval: int) -> None:
    if capacity < 0:
        assert Pager(PAGE, 4, states=StatePool(2, 1), num_cached_states=capacity).prefix is None
        return
    with pytest.raises(ValueError, match="states to keep and tokens between them"):
        Pager(PAGE, 4, states=StatePool(2, 1), num_cached_states=capacity, state_interval=interval)


def test_conversations_compute_little_of_their_earlier_turns_again() -> None:
    """8 conversations of 12 turns, in turn, with one system prompt of 700 tokens, in pages of 32."""
    recomputed = {}
    for name, pager in {
        "states": Pager(32, 2000, states=StatePool(9 + 32, 3), num_cached_states=32, message_ends=(699,)),
        "states, no messages": Pager(32, 2000, states=StatePool(9 + 32, 3), num_cached_states=32),
        "attention": Pager(32, 2000),
    }.items():
        texts = [list(range(700)) for _ in range(8)]
        known = [0] * 8  # tokens that earlier turns of the conversation, or of another one, have computed
        counts = {"first": 0, "later": 0}
        for turn in range(12):
            for index, text in enumerate(texts):
                seed = 1000 * (1 + index) + 50 * turn
                text += range(seed, seed + 20 + 7 * index % 30)
                table = pager.open(text)
                counts["later" if turn else "first"] += known[index] - table.num_tokens
                while table.num_tokens < len(text):
                    end = pager.next_end(table, table.num_tokens, len(text))
                    table.append(end - table.num_tokens)
                    pager.commit(table, text)
                for token in range(seed + 20_000, seed + 20_000 + 31 + 5 * turn % 40):
                    text.append(token)
                    table.append(1)
                    pager.commit(table, text)
                text.append(seed + 30_000)  # sampled, not computed
                known[index] = len(text) - 1
                known = [max(each, 700) for each in known]
                table.release()
        check(pager, [])
        recomputed[name] = (counts["first"], counts["later"], sum(map(len, texts)))
    # Where no token ends a message, the second conversation finds the state at 512 of the 700 tokens and leaves one at
    # 672.
    assert recomputed == {
        "states": (7 * 28, 1404, 13_224),
        "states, no messages": (188 + 6 * 28, 1404, 13_224),
        "attention": (7 * 28, 1404, 13_224),
    }
