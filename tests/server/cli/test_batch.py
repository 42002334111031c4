"""`quire batch` with a real server: submit, wait, list, and one line for each error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.server import Server
from tests.e2e.test_batches import SMALL, line


def batch(server: Server, *args: str) -> subprocess.CompletedProcess[str]:
    quire = Path(sys.executable).with_name("quire")
    command = [str(quire), "batch", *args, "--url", server.url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_batch_command_submits_waits_lists_and_reports_errors(tmp_path: Path) -> None:
    input_path, out = tmp_path / "asked.jsonl", tmp_path / "out.jsonl"
    input_path.write_text("\n".join(json.dumps(line(number)) for number in range(12)))
    server = Server(tmp_path / "log", *SMALL, "--data-dir", str(tmp_path / "data"))
    try:
        done = batch(server, "submit", str(input_path), "-o", str(out))
        id = done.stdout.strip()
        assert (done.returncode, id.startswith("batch_")) == (1, True), "line 6 has a wrong temperature"
        assert "completed" in done.stderr
        results = [json.loads(each) for each in out.read_text().splitlines()]
        assert {each["custom_id"] for each in results} == {f"r{number}" for number in range(12)}
        assert [each["custom_id"] for each in results if each["response"]["status_code"] != 200] == ["r6"]
        assert id in batch(server, "list").stdout
        assert id in batch(server, "status", id).stdout
        again = batch(server, "wait", id, "-o", str(tmp_path / "again.jsonl"))
        assert (again.returncode, (tmp_path / "again.jsonl").read_bytes()) == (1, out.read_bytes())
        for args, message in (
            (("cancel", id), "the batch is completed already"),
            (("status", "batch_0"), "No batch `batch_0` is known here"),
            (("submit", str(tmp_path / "none")), "cannot read"),
            (("status",), "status needs the id of a batch"),
        ):
            wrong = batch(server, *args)
            assert wrong.returncode != 0
            assert message in wrong.stderr
        input_path.write_text(json.dumps(line(0)) + "\n{")
        failed = batch(server, "submit", str(input_path), "-o", str(out))
        assert failed.returncode == 1
        assert "line 2: not JSON" in failed.stderr
    finally:
        server.process.kill()
        server.process.wait()
