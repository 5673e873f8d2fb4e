"""Recorded streams: the requests read from each format, and errors that name file, line and field."""

from __future__ import annotations

from pathlib import Path

import pytest
from quire.runtime.common.errors import ConfigError
from quire.runtime.tools.traffic import Arrival, read_azure, read_burstgpt, read_mooncake

DATA = Path(__file__).parents[3] / "data"
MOONCAKE = '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}\n'
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"
)
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"


def test_mooncake() -> None:
    assert read_mooncake(DATA / "mooncake.jsonl") == [
        Arrival(0.0, 1024, 2, blocks=(0, 1)),
        Arrival(0.5, 1100, 1, blocks=(0, 1, 2)),
        Arrival(0.5, 600, 3, blocks=(3, 4)),
    ]


def test_azure() -> None:
    assert read_azure(DATA / "azure.csv") == [
        Arrival(0.0, 374, 44),
        Arrival(4.314579, 396, 109),
        Arrival(4.541877, 879, 1),  # a prefill samples one token, even if none was recorded
    ]


def test_azure_times_may_have_a_time_zone(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n")
    assert read_azure(path) == [Arrival(0.0, 2162, 5)]


def test_burstgpt_leaves_out_failed_requests() -> None:
    assert read_burstgpt(DATA / "burstgpt.csv") == [
        Arrival(0.0, 472, 18),
        Arrival(40.0, 1087, 230),
        Arrival(113.5, 417, 276),
    ]
    assert len(read_burstgpt(DATA / "burstgpt.csv", 2)) == 2


def test_lines_beyond_the_limit_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(MOONCAKE + "nonsense\n")
    assert len(read_mooncake(path, 1)) == 1


def test_requests_are_sorted_and_empty_lines_and_byte_order_mark_skipped(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("\ufeff" + MOONCAKE.replace("0,", "2500,", 1) + "\r\n\n" + MOONCAKE.replace("600", "601"))
    assert [(each.time_s, each.prompt_tokens) for each in read_mooncake(path)] == [(0.0, 601), (2.5, 600)]


def test_hash_ids_may_be_text(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(MOONCAKE.replace("[1, 2]", '["c0ffee", "f00"]') + MOONCAKE.replace("[1, 2]", '["c0ffee"]'))
    assert [each.blocks for each in read_mooncake(path)] == [(0, 1), (0,)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no requests"),
        ("\n\n", "has no requests"),
        (MOONCAKE + "nonsense", "line 2: JSON is malformed"),
        (MOONCAKE + "[" * 100_000, "line 2"),
        ("17", "line 1: Expected `object`"),
        (MOONCAKE.replace('"timestamp": 0, ', ""), "line 1: Object missing required field `timestamp`"),
        (MOONCAKE.replace("600", '"600"'), r"line 1: Expected `int`, got `str` - at `\$.input_length`"),
        (MOONCAKE.replace("600", "0"), r"`int` >= 1 - at `\$.input_length`"),
        (MOONCAKE.replace("600", "1e99"), r"at `\$.input_length`"),
        (MOONCAKE.replace("600", "9" * 5000), r"\$.input_length|out of range"),
        (MOONCAKE.replace("0,", "-1,", 1), r"`float` >= 0.0 - at `\$.timestamp`"),
        (MOONCAKE.replace("0,", "NaN,", 1), "line 1: JSON is malformed"),
        (MOONCAKE.replace('"output_length": 1', '"output_length": -1'), r"at `\$.output_length`"),
        (MOONCAKE.replace("[1, 2]", "[1, 2.5]"), r"at `\$.hash_ids\[1\]`"),
        (MOONCAKE.replace("[1, 2]", "[1, 2, 3]"), "hash_ids names 3 blocks of 512 tokens, more than"),
    ],
)
def test_malformed_mooncake_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"bad.jsonl.*{message}"):
        read_mooncake(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: must be TIMESTAMP,ContextTokens,GeneratedTokens"),
        (MOONCAKE, "line 1: must be TIMESTAMP,ContextTokens,GeneratedTokens"),
        (AZURE.splitlines()[0], "has no requests"),
        (AZURE + "2023-11-16 18:15:46.6805900,374\n", "line 3: has 2 fields"),
        (AZURE + "yesterday,374,44\n", "line 3: TIMESTAMP 'yesterday'"),
        (AZURE + "2023-11-16 18:15:46,x,44\n", "line 3: ContextTokens must be a whole number"),
        (AZURE + "2023-11-16 18:15:46,0,44\n", "line 3: ContextTokens must be a whole number from 1"),
        (AZURE + "2023-11-16 18:15:46,374,-1\n", "line 3: GeneratedTokens must be a whole number from 0"),
        (AZURE + "2023-11-16 18:15:46,99999999999999,1\n", "line 3: ContextTokens"),
        (AZURE + '"' + "x" * 200_000 + '",1,1\n', "line 3: field larger than"),
    ],
)
def test_malformed_azure_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"bad.csv.*{message}"):
        read_azure(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: must name the field 'Timestamp'"),
        ("Timestamp,Request tokens\n", "line 1: must name the field 'Response tokens'"),
        (BURSTGPT.splitlines()[0], "has no requests"),
        (BURSTGPT + "5,ChatGPT,472\n", "line 3: has 3 fields, must have 6"),
        (BURSTGPT.replace("5,C", "soon,C"), "line 2: Timestamp must be seconds"),
        (BURSTGPT.replace("472", "many"), "line 2: Request tokens must be a whole number from 0"),
        (BURSTGPT.replace("18,", "-1,"), "line 2: Response tokens must be a whole number from 0"),
    ],
)
def test_malformed_burstgpt_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"bad.csv.*{message}"):
        read_burstgpt(path)


@pytest.mark.parametrize("read", [read_mooncake, read_azure, read_burstgpt])
def test_files_that_are_not_text_are_refused(read: object, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "binary", tmp_path / "missing", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            read(path)  # type: ignore[operator]
