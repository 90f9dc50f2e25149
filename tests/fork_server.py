"""Forks processes from one that has imported what they import: seconds less for each of them.

It reads requests, one a line, and answers each by a line when its processes have ended: `0`, or the
status of the first that failed, which ends the others. It starts no thread: forks are whole.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaForCausalLM  # noqa: F401 - many models are of this class

import shardwright as sw


def serve() -> None:
    """Returns at the end of the requests; in a forked process, at the end of its program."""
    sw.plan(nn.Linear(2, 2), (torch.ones(2, 2),), devices=1)  # imports what is imported late
    gc.freeze()
    for line in sys.stdin:
        running = set()
        for process in json.loads(line):
            pid = os.fork()
            if pid == 0:
                run_program(**process)
                return
            running.add(pid)
        status = 0
        while running and not status:
            pid, ended = os.wait()
            running.remove(pid)
            status = os.waitstatus_to_exitcode(ended)
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        print(status, flush=True)


def run_program(
    command: list[str], folder: str, environment: dict[str, str], stdout: str, stderr: str
) -> None:
    """Is `python COMMAND`, with a script, `-m` and a module or `-c` and a text.

    Args:
        stdout, stderr: the files that are written.
    """
    streams: tuple[tuple[str, int], ...] = ((os.devnull, os.O_RDONLY), (stdout, os.O_WRONLY))
    for number, (path, mode) in enumerate((*streams, (stderr, os.O_WRONLY))):
        os.dup2(os.open(path, mode | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = command if command[0].endswith(".py") else [command[0], *command[2:]]
    sys.path[0] = str(Path(command[0]).parent) if command[0].endswith(".py") else folder
    if command[0] == "-c":
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(command[1], "<string>", "exec"), names)
    elif command[0] == "-m":
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    serve()
