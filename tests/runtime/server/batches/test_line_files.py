"""The files of a batch: lines with their numbers, and answers after which a run continues."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest
from quire.runtime.common.errors import ConfigError, Unavailable
from quire.runtime.server.batches import line_files
from quire.runtime.server.batches.line_files import AnswerFile, read_lines
from quire.runtime.server.batches.lines import LineAnswer, answer_line, read_line

LINE = '{"custom_id":"%d","method":"POST","url":"/v1/completions","body":{}}\n'


def write_input(folder: Path, count: int = 3) -> Path:
    path = folder / "in.jsonl"
    path.write_text("\n".join(LINE % number for number in range(count)))  # a blank line between two
    return path


def answers_of(path: Path) -> list[bytes]:
    status = [200, 400, 200]
    return [
        answer_line(read_line(number, line), LineAnswer(status[index % 3], b"{}"))
        for index, (number, line) in enumerate(read_lines(path))
    ]


def test_lines_have_numbers_and_blank_ones_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n a \r\n\t\nb")
    assert list(read_lines(path)) == [(1, b" a \r\n"), (3, b"b")]


def test_a_line_that_is_too_long_is_cut_and_the_next_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_files, "MAX_LINE_BYTES", 4)
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"0123\n01234\n0123456789\nab\n" + b"x" * 9)
    assert list(read_lines(path)) == [(0, b"0123\n"), (1, b"01234"), (2, b"01234"), (3, b"ab\n"), (4, b"xxxxx")]


def test_a_run_continues_wherever_it_was_killed(tmp_path: Path) -> None:
    path = write_input(tmp_path)
    answers = answers_of(path)
    whole = b"".join(answers)
    ends = [len(b"".join(answers[:number])) for number in range(4)]
    for end in {*range(0, len(whole), 23), *ends, *(end - 1 for end in ends[1:])}:
        out = tmp_path / "out.jsonl"
        out.write_bytes(whole[:end])
        file = AnswerFile(out)
        lines = read_lines(path)
        file.resume(lines)
        known = file.num_lines
        assert known == whole[:end].count(b"\n")
        assert file.num_errors == (known >= 2)
        rest = list(lines)
        assert len(rest) == 3 - known
        for index in range(known, 3):
            file.write(answers[index], is_error=index == 1)
        file.close()
        assert out.read_bytes() == whole


@pytest.mark.parametrize("content", ["{}\n", "no json\n", '{"id":"batch_req_0"}\n', LINE % 0, '{"id":5}\n'])
def test_answers_of_other_lines_are_not_overwritten(tmp_path: Path, content: str) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text(content)
    file = AnswerFile(out)
    with pytest.raises(ConfigError, match="its line 1 does not belong to them; remove the file"):
        file.resume(read_lines(write_input(tmp_path)))
    file.close()
    assert out.read_text() == content


def test_more_answers_than_lines_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_bytes(b"".join(answers_of(write_input(tmp_path, 3))))
    file = AnswerFile(out)
    with pytest.raises(ConfigError, match="its line 3 does not belong"):
        file.resume(read_lines(write_input(tmp_path, 2)))
    file.close()


def test_one_process_writes_a_file(tmp_path: Path) -> None:
    first = AnswerFile(tmp_path / "out.jsonl")
    with pytest.raises(ConfigError, match="is being written by another process"):
        AnswerFile(tmp_path / "out.jsonl")
    first.close()
    AnswerFile(tmp_path / "out.jsonl").close()
    with pytest.raises(ConfigError, match="cannot be written: No such file or directory"):
        AnswerFile(tmp_path / "gone" / "out.jsonl")


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit on the size of files stands for the end of a disk: the system takes the first part of a line."""
    path = write_input(tmp_path)
    answers = answers_of(path)
    file = AnswerFile(tmp_path / "out.jsonl")
    file.write(answers[0], is_error=False)
    file.sync()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(answers[0]) + 10, before[1]))
    try:
        with pytest.raises(Unavailable, match="cannot be written"):
            file.write(answers[1], is_error=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "out.jsonl").read_bytes() == answers[0]
    assert (file.num_lines, file.num_errors) == (1, 0)
    assert "the disk is full" in str(line_files.disk_error(path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    file.close()
