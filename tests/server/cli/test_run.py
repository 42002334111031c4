"""`quire run`: OpenAI batch lines in, OpenAI batch lines out; finished lines are not computed again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.engine.common.errors import ConfigError, InvalidRequest
from quire.server.batches.batch_lines import (
    custom_id_or_line_name,
    find_duplicate_lines,
    parse_line,
    read_line_numbers_by_custom_id,
)
from quire.server.cli.main import main
from quire.server.cli.run import is_permanent_failure, trim_output_and_read_finished_ids
from tests.server.cli.processes import engines, needs_proc

SMALL = ["--max-model-len", "1024", "--num-kv-blocks", "256", "--max-num-seqs", "8", "--threads", "1"]
KEPT = {"status_code": 200, "request_id": "kept", "body": {}}


FOX = [{"role": "user", "content": "A story about a fox."}]


def request(name: str, **body: Any) -> dict[str, Any]:
    body = {"model": "quire-demo", "prompt": "Once upon a time", "max_tokens": 4, "seed": 1} | body
    url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    if "messages" in body:
        del body["prompt"]
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def write(path: Path, *entries: dict[str, Any] | str) -> Path:
    lines = [entry if isinstance(entry, str) else json.dumps(entry) for entry in entries]
    path.write_text("\n".join(lines) + "\n")
    return path


def read(path: Path) -> dict[str, dict[str, Any]]:
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({entry["custom_id"] for entry in entries}) == len(entries), "an id was answered twice"
    return {entry["custom_id"]: entry for entry in entries}


def command(*argv: str | Path) -> list[str]:
    return [sys.executable, "-m", "quire", "run", *map(str, argv), *SMALL]


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """`quire run` with these arguments, in this process, with its engine in another."""

    def call(*argv: str | Path) -> subprocess.CompletedProcess[str]:
        status = main(["run", *map(str, argv), *SMALL])
        return subprocess.CompletedProcess(argv, status, *capfd.readouterr())

    return call


def test_run_writes_response_or_error_for_every_line(run: Run, tmp_path: Path) -> None:
    file = write(
        tmp_path / "in.jsonl",
        request("text"),
        "",
        request("chat", messages=FOX),
        {"custom_id": "message", "url": "/v1/messages", "body": {"messages": FOX, "max_tokens": 4, "ignore_eos": True}},
        {"custom_id": "response", "url": "/v1/responses", "body": {"input": FOX, "max_output_tokens": 2}},
        request("range", temperature=9),
        request("stranger", model="gpt-unknown"),
        request("streamed", stream=True),
        {"custom_id": "where", "url": "/v1/images", "body": {}},
        "no json",
    )
    out = tmp_path / "out.jsonl"
    done = run(file, "-o", out)
    assert done.returncode == 1, done.stderr
    assert "4 done, 5 failed, 0 left, 14 tokens generated" in done.stderr
    assert "continue with --resume" in done.stderr
    results = read(out)
    answered, refused = ("text", "chat", "message", "response"), ("range", "stranger", "streamed", "where", "line-10")
    assert results.keys() == {*answered, *refused}
    text = results["text"]
    assert text["id"].startswith("batch_req_")
    assert text["error"] is None
    assert text["response"]["status_code"] == 200
    assert text["response"]["request_id"]
    assert text["response"]["body"]["object"] == "text_completion"
    assert text["response"]["body"]["usage"]["completion_tokens"] == 4
    assert results["chat"]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert results["message"]["response"]["body"]["stop_reason"] == "max_tokens"
    assert results["response"]["response"]["body"]["output"][0]["content"][0]["text"]
    rejection = results["range"]["response"]
    assert (rejection["status_code"], rejection["body"]["error"]["param"]) == (400, "temperature")
    assert results["stranger"]["response"]["status_code"] == 404
    for name, number in (("streamed", 8), ("where", 9), ("line-10", 10)):
        assert results[name]["response"] is None
        assert results[name]["error"]["message"].startswith(f"line {number}: ")


@pytest.mark.slow
def test_resume_computes_missing_lines_and_repairs_torn_line(run: Run, tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", *(request(f"r{number}") for number in range(6)))
    out = tmp_path / "out.jsonl"
    whole = [json.dumps({"custom_id": f"r{number}", "response": KEPT}) for number in (0, 3)]
    out.write_text("\n".join([*whole, '{"custom_id": "r1", "resp']))

    rejection = run(file, "-o", out)
    assert rejection.returncode == 1
    assert "--resume" in rejection.stderr
    assert out.read_text().endswith('"resp'), "refusing must leave the file alone"

    done = run(file, "-o", out, "--resume", "--served-model-name", "quire-demo", "--concurrency", "2")
    assert done.returncode == 0, done.stderr
    assert "2 already done, 4 to do" in done.stderr
    assert "--retry-refused" not in done.stderr, "nothing was refused"
    results = read(out)
    assert results.keys() == {f"r{number}" for number in range(6)}
    assert results["r0"]["response"] == results["r3"]["response"] == KEPT
    texts = {results[name]["response"]["body"]["choices"][0]["text"] for name in ("r1", "r2", "r4", "r5")}
    assert len(texts) == 1, "the same seed gives the same text"

    second = run(file, "-o", out, "--resume")
    assert second.returncode == 0
    assert "0 done, 0 failed" in second.stderr


@pytest.mark.slow
def test_resume_retries_failures_and_keeps_one_row_per_id(run: Run, tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", request("good"), request("odd", temperature=9), request("lost"), "no json")
    out = tmp_path / "out.jsonl"
    rows = {name: {"custom_id": name, "response": None, "error": {"code": "old"}} for name in ("lost", "other input")}
    rows["good"] = {"custom_id": "good", "response": KEPT, "error": None}
    rows["odd"] = {"custom_id": "odd", "response": {"status_code": 503, "body": {}}, "error": None}
    real = write(tmp_path / "real.jsonl", *rows.values())
    real.chmod(0o640)
    out.symlink_to(real)
    done = run(file, "-o", out, "--resume")
    assert done.returncode == 1
    assert "1 already done, 3 to do" in done.stderr
    assert "1 done, 2 failed, 0 left" in done.stderr
    assert out.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    results = read(out)
    assert results.keys() == {"good", "odd", "lost", "line-4", "other input"}
    assert (results["good"], results["other input"]) == (rows["good"], rows["other input"])
    assert results["odd"]["response"]["status_code"] == 400
    assert results["lost"]["response"]["status_code"] == 200

    write(file, request("good"), request("odd"), request("lost"))
    unretried = run(file, "-o", out, "--resume")
    assert unretried.returncode == 1
    assert "2 already done, 1 refused for good, 0 to do" in unretried.stderr
    assert read(out)["odd"]["response"]["status_code"] == 400
    retried = run(file, "-o", out, "--resume", "--retry-refused")
    assert retried.returncode == 0, retried.stderr
    assert "1 done, 0 failed, 0 left" in retried.stderr
    assert "--resume" not in retried.stderr
    assert read(out)["odd"]["response"]["status_code"] == 200
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "real.jsonl"]


@pytest.mark.slow
def test_interrupted_run_keeps_results_and_resumes(run: Run, tmp_path: Path) -> None:
    file = write(
        tmp_path / "in.jsonl", *(request(f"r{number}", max_tokens=40, ignore_eos=True) for number in range(16))
    )
    out = tmp_path / "out.jsonl"
    process = subprocess.Popen(command(file, "-o", out, "--concurrency", "2"), stderr=subprocess.PIPE, text=True)
    while not out.exists() or b"\n" not in out.read_bytes():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.search(r"[1-9]\d* left.*: continue with --resume", err)
    before = read(out)
    assert 0 < len(before) < 16
    assert run(file, "-o", out, "--resume").returncode == 0
    after = read(out)
    assert len(after) == 16
    assert all(after[name] == entry for name, entry in before.items())


@pytest.mark.slow
@needs_proc
def test_run_replaces_killed_engine_and_keeps_all_answers(tmp_path: Path) -> None:
    body = {"max_tokens": 100, "ignore_eos": True, "temperature": 1.0, "seed": 3}
    file = write(tmp_path / "in.jsonl", *(request(f"r{number}", **body) for number in range(12)))
    out = tmp_path / "out.jsonl"
    process = subprocess.Popen(command(file, "-o", out, "--concurrency", "4"), stderr=subprocess.PIPE, text=True)
    while not out.exists() or b"\n" not in out.read_bytes():
        assert process.poll() is None
        time.sleep(0.02)
    (engine,) = engines(process.pid)
    os.kill(engine, signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    texts = {entry["response"]["body"]["choices"][0]["text"] for entry in read(out).values()}
    assert len(read(out)) == 12
    assert len(texts) == 1, "one prompt, one seed: one answer, before and after the death"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[]", "custom_id must be a string"),
        ('{"custom_id": 3}', "custom_id must be a string"),
        ('{"custom_id": "a", "method": "GET"}', "method must be POST, got 'GET'"),
        ('{"custom_id": "a", "url": "/v1/files"}', "url must be one of /v1/chat/completions, "),
        ('{"custom_id": "a", "url": "/v1/completions", "body": []}', "body must be an object"),
    ],
)
def test_parse_line_rejects_invalid_line_with_reason(line: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse_line(line)


def test_line_without_custom_id_is_named_by_number() -> None:
    assert [
        custom_id_or_line_name(7, line) for line in ('{"custom_id": "a"}', "{}", "[]", "x", '{"custom_id": 1}')
    ] == ["a", *["line-7"] * 4]


@pytest.mark.slow
def test_duplicate_custom_id_fails_only_repeated_line(run: Run, tmp_path: Path) -> None:
    """Also from a pipe to a pipe: the input is kept until all lines are answered."""
    misspelled = {"temprature": 1}
    file = write(
        tmp_path / "in.jsonl", request("a", **misspelled), request("b"), request("a"), request("odd", temperature=9)
    )
    assert (read_line_numbers_by_custom_id(file), find_duplicate_lines(file, read_line_numbers_by_custom_id(file))) == (
        {"a": 1, "b": 2, "odd": 4},
        {3},
    )
    with file.open("rb") as input_file:
        done = subprocess.run(command("-", "-o", "-"), stdin=input_file, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "2 done, 2 failed, 0 left" in done.stderr
    assert "s: fix them, and continue with --resume --retry-refused" in done.stderr
    assert "  1 x invalid_request custom_id, such as line-3: line 3: the custom_id 'a' was used" in done.stderr
    assert "  without effect, in so many requests: temprature (1)" in done.stderr
    assert "  1 x 400 temperature, such as odd: temperature must be in [0, 2]" in done.stderr
    out = tmp_path / "out.jsonl"
    out.write_text(done.stdout)
    results = read(out)
    assert results.keys() == {"a", "b", "line-3", "odd"}
    assert results["a"]["response"]["status_code"] == 200
    second = run(file, "-o", out, "--resume")
    assert second.returncode == 1, "two requests of the file have failed"
    assert "2 already done, 2 refused for good, 0 to do" in second.stderr
    assert "requests refused for good are retried only with --retry-refused" in second.stderr
    assert "s: fix them, and continue with --resume --retry-refused" in second.stderr
    rejection = subprocess.run(command(file, "-o", "-", "--resume"), capture_output=True, text=True, timeout=120)
    assert rejection.returncode == 2
    assert "stdout cannot be read" in rejection.stderr


@pytest.mark.parametrize(
    ("result", "permanent"),
    [
        ({"response": {"status_code": 400}}, True),
        ({"response": {"status_code": 404}}, True),
        ({"response": {"status_code": 408}}, False),
        ({"response": {"status_code": 429}}, False),
        ({"response": {"status_code": 500}}, False),
        ({"response": None, "error": {"code": "invalid_request"}}, True),
        ({"response": None, "error": {"code": "old"}}, False),
    ],
)
def test_is_permanent_failure_is_true_only_for_unretryable_results(result: dict[str, Any], permanent: bool) -> None:
    assert is_permanent_failure(result) is permanent


def test_resume_leaves_foreign_file_untouched(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    for text in (
        "my notes\nmore notes",
        '{"custom_id": "a", "response": null}\n{"custom_id": "b", "response": "c"}\n',
        json.dumps(request("a")) + "\n",
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match="not an output of quire run"):
            trim_output_and_read_finished_ids(file, {"a"})
        assert file.read_text() == text


def test_unusable_input_or_output_file_prints_one_line(run: Run, tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", request("a"))
    for argv, message in (
        ([tmp_path / "none.jsonl", "-o", tmp_path / "out"], f"cannot read {tmp_path / 'none.jsonl'}: "),
        ([tmp_path, "-o", tmp_path / "out"], f"cannot read {tmp_path}: "),
        ([file, "-o", tmp_path / "none" / "out"], f"cannot write {tmp_path / 'none' / 'out'}: "),
        ([file, "-o", tmp_path], f"cannot write {tmp_path}: "),
    ):
        done = run(*argv)
        assert done.returncode == 1
        assert done.stderr.startswith(f"quire run: {message}")
        assert done.stderr.count("\n") == 1
