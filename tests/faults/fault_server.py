"""A process that has imported torch and forks a victim for each request: a kill costs milliseconds, not an import.

Requests and answers are lines of JSON: {"start": {...}} gives {"pid": n}; {"wait": pid} gives {"code": n}, negative for
a signal as in subprocess.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import traceback
from typing import Any


def serve() -> None:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import fault_loop
    import torch

    import dragoman.runs.train  # noqa: F401 - what `dragoman train` would import
    from dragoman.cli import app  # noqa: F401

    torch.set_num_threads(1)
    # A first step of an optimiser imports half of torch; here, once. No backward: autograd's threads must not be forked.
    optimiser = torch.optim.AdamW(fault_loop.Net().parameters())
    optimiser.zero_grad()
    optimiser.step()
    answer({"ready": os.getpid()})
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            answer({"pid": start(request["start"])})
        else:
            answer({"code": os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])})


def start(request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = victim(request)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def victim(request: dict[str, Any]) -> int:
    """Become what was asked for; returns the exit code."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if request.get("file_limit"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_limit"],) * 2)
    if request.get("user"):
        os.setgroups([])
        os.setgid(request["user"])
        os.setuid(request["user"])
    from dragoman import stopping
    from dragoman.files import faults

    faults.arm(request.get("fault", ""))
    if "command" in request:
        from dragoman.__main__ import main

        sys.argv = ["dragoman", *request["command"]]
        main()
        return 0
    module = importlib.import_module(request.get("module", "fault_loop"))
    stopping.install()
    return module.run(**request["loop"])


def answer(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve()
