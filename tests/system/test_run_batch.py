"""`quire run-batch` with the bundled models: the answers of single requests, in order, also after kills."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quire.runtime.cli.main import run
from quire.runtime.model.files import BUNDLED_EMBEDDING_MODEL

from tests.support.http_client import connection

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
QUICK = ("--kv-cache-memory", "32MiB", "--max-num-seqs", "4")


def written(number: int, url: str, **body: Any) -> str:
    return json.dumps({"custom_id": f"line {number}", "method": "POST", "url": url, "body": body})


def requests(count: int) -> list[str]:
    """Return lines of which every fifth is an error."""
    lines = []
    for number in range(count):
        message = [{"role": "user", "content": f"Write about queue {number}."}]
        lines.append(
            [
                written(number, CHAT, messages=message, max_tokens=1 + number % 9),
                written(number, COMPLETIONS, prompt=f"The module {number}", max_tokens=3, logprobs=1, n=2),
                written(number, "/v1/responses", input=f"queue {number}", max_output_tokens=4),
                written(number, CHAT, messages=message, max_tokens=2, temperature=0),
                written(number, CHAT, messages=message, max_tokens=0),
            ][number % 5]
        )
    return lines


def without_times(data: bytes) -> bytes:
    return re.sub(rb'"created(_at)?":\d+', b'"created":0', data)


def run_batch(source: Path, output: Path, *flags: str) -> bytes:
    """Return the answers without their times."""
    assert run(["run-batch", "-i", str(source), "-o", str(output), *(flags or QUICK)]) == 0
    return without_times(output.read_bytes())


def write_lines(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_answers_equal_those_of_single_requests(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    embedding = "/v1/embeddings"
    lines = [*requests(10), "no request", written(11, embedding, input=["a", "b"]), written(12, embedding, input=5)]
    source = write_lines(tmp_path / "in.jsonl", lines)
    answers = [
        json.loads(line)
        for line in run_batch(
            source, tmp_path / "out.jsonl", *QUICK, "--embedding-model", str(BUNDLED_EMBEDDING_MODEL), "--in-process"
        ).splitlines()
    ]
    assert "13 of 13 lines, 4 errors" in capfd.readouterr().err
    assert [each["custom_id"] for each in answers] == [
        *(f"line {number}" for number in range(10)), None, "line 11", "line 12",
    ]  # fmt: skip
    assert [each["response"] and each["response"]["status_code"] for each in answers] == [
        200, 200, 200, 200, 400, 200, 200, 200, 200, 400, None, 200, 400,
    ]  # fmt: skip
    assert answers[4]["error"]["message"] == "max_tokens must be between 1 and 2048, not 0"
    assert answers[0]["response"]["body"]["id"] == f"chatcmpl-{answers[0]['response']['request_id']}"
    assert len(answers[11]["response"]["body"]["data"]) == 2
    # The run is complete: another one answers nothing.
    assert len(run_batch(source, tmp_path / "out.jsonl").splitlines()) == 13


async def test_a_server_answers_the_same(serving: Callable[..., Any], tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", requests(10))
    here = await asyncio.to_thread(run_batch, source, tmp_path / "here.jsonl", *QUICK, "--served-model-name", "quire")
    async with serving() as real:
        url = f"http://{real.server.openai_address}/v1"
        there = await asyncio.to_thread(run_batch, source, tmp_path / "there.jsonl", "--server", url)
        single = json.loads(requests(10)[3])["body"]
        async with connection(real) as client:
            answer = await client.ask("POST", CHAT, single)
    found = [[json.loads(line) for line in data.splitlines()] for data in (here, there)]
    for one, other in zip(*found, strict=True):
        assert outcome(one) == outcome(other)
    assert found[0][3]["response"]["body"]["choices"] == answer.json["choices"]


def outcome(answer: dict[str, Any]) -> Any:
    """Return an answer line without the ids that each server makes, and without what depends on its settings."""
    body = answer["response"]["body"]
    texts = body.get("choices") or [each.get("content") for each in body.get("output", ())] or body["error"]
    return answer["id"], answer["custom_id"], answer["response"]["status_code"], texts, answer["error"]


def test_a_killed_run_continues_without_repeating_or_losing_a_line(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", requests(60))
    expected = run_batch(source, tmp_path / "undisturbed.jsonl")
    output = tmp_path / "out.jsonl"
    for num_answers in (7, 31):
        command = [sys.executable, "-P", "-m", "quire.runtime.cli.main", "run-batch"]
        process = subprocess.Popen([*command, "-i", str(source), "-o", str(output), *QUICK], stderr=subprocess.DEVNULL)
        try:
            while not output.exists() or output.read_bytes().count(b"\n") < num_answers:
                assert process.poll() is None, "the run ended before it was killed"
                time.sleep(0.005)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        with output.open("ab") as file:  # a kill within a write
            file.write(b'{"id":"batch_req_')
    assert run_batch(source, output) == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-i", "gone", "-o", "out"], "--input-file: gone cannot be read: No such file or directory"),
        (["-i", ".", "-o", "out"], "--input-file: . cannot be read: Is a directory"),
        (["-i", "in", "-o", "in"], "--output-file is the input file; name another one"),
        (["-i", "in", "-o", "."], "--output-file: . is not a file"),
        (["-i", "in", "-o", "gone/out"], "gone/out cannot be written: No such file or directory"),
        (["-i", "in", "-o", "out", "--max-concurrency", "0"], "--max-concurrency must be at least 1, not 0"),
        (
            ["-i", "in", "-o", "new", "--server", "host:1"],
            "--server: 'host:1' is not allowed; write http://HOST:PORT/v1",
        ),
        (["model", "-i", "in", "-o", "new", "--server", "http://a"], "give MODEL or --server, not both"),
        (["-i", "in", "-o", "other"], "other has other content than the answers to these lines"),
        (["-o", "out"], "--input-file"),
    ],
)
def test_what_cannot_be_run_is_refused(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "in", requests(2))
    (tmp_path / "other").write_text("text\n")
    assert run(["run-batch", *flags]) == 2
    assert message in capfd.readouterr().err


def test_a_run_at_a_server_reads_no_model_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_MODEL", "organization/model")
    source = write_lines(tmp_path / "in", requests(2))
    assert run(["run-batch", "-i", str(source), "-o", str(tmp_path / "out"), "--server", "host:1"]) == 2
    assert capfd.readouterr().err.endswith("--server: 'host:1' is not allowed; write http://HOST:PORT/v1\n")
