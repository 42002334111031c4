"""Forks a process for each run of pytest, from one that has imported what takes long and is not ours.

Reads a line of JSON a run: a file for the output, a working directory, pytest's arguments. Answers with the process id,
then with the exit status. Its own arguments are the modules to import.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from contextlib import suppress

import pytest


def main(modules: list[str]) -> int:
    for module in modules:
        with suppress(ImportError):
            importlib.import_module(module)
    answers = os.fdopen(os.dup(1), "w")
    while line := sys.stdin.readline():
        output, folder, *arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.chdir(folder)
            _redirect(output)
            return int(pytest.main(arguments))
        print(pid, file=answers, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)
    return 0


def _redirect(output: str) -> None:
    nothing, file = os.open(os.devnull, os.O_RDONLY), os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for target, source in ((0, nothing), (1, file), (2, file)):
        os.dup2(source, target)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
