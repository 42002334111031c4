"""`quire serve` with scripted answers, whose processes are killed and restarted."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.agent_loop.scripted_model import save_scripted_model
from tests.clients.scripted import MODEL
from tests.e2e.server import Server, free_port

FLAGS = (
    "--tool-call-parser",
    "hermes",
    "--reasoning-parser",
    "think",
    "--threads",
    "1",
    "--speculative-config",
    "none",
)
"""Without drafts a step computes one token, so that a stream lasts long enough to be cut in the middle."""


class KilledServer:
    def __init__(self, folder: Path, names: Sequence[str] = (MODEL,), flags: Sequence[str] = ()) -> None:
        """`folder` must contain script.json. The model, data and logs are written there."""
        self._folder, self._num_starts = folder, 0
        save_scripted_model(folder / "model")
        self._args = [str(folder / "model"), "--data-dir", str(folder / "data"), *FLAGS, *flags]
        self._args += ["--served-model-name", *names]
        self._port = free_port()
        self._restart: threading.Thread | None = None
        self.url = f"http://127.0.0.1:{self._port}"
        self._start()

    def _start(self) -> None:
        self._num_starts += 1
        scripting = Path(__file__).parent / "scripting"
        env = {"AGENT_LOOP": str(self._folder), "PYTHONPATH": f"{scripting}:{Path(__file__).parents[2]}"}
        self._server = Server(self._folder / f"server-{self._num_starts}.log", *self._args, env=env, port=self._port)

    def kill(self, process: str) -> None:
        """Sends SIGKILL. Quire restarts an engine itself. A thread restarts the API process, as systemd would."""
        if process == "engine":
            while (engine := self._server.engine_pid()) is None:
                time.sleep(0.01)
            os.kill(engine, signal.SIGKILL)
            return
        self._server.process.kill()
        self._server.process.wait()
        self._restart = threading.Thread(target=self._start)
        self._restart.start()

    def find_prompt(self, answer_id: str) -> str:
        """Reads the log that scripting/sitecustomize.py writes."""
        lines = (self._folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
        return next(str(json.loads(line)["prompt"]) for line in reversed(lines) if answer_id in line)

    def stop(self) -> None:
        if self._restart is not None:
            self._restart.join()
        self._server.stop()
