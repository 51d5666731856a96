"""A process that has imported torch and forks a child for each request, in milliseconds.

Requests and answers are lines of JSON: {"start": {...}} gives {"pid": n}; {"wait": pid} gives
{"code": n}, negative for a signal as in subprocess.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from typing import Any, TextIO


def serve() -> None:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import fault_loop
    import torch

    from dragoman.cli import app  # noqa: F401 - what the command would import
    from dragoman.runs import measured_resource_estimate

    measured_resource_estimate.PROBE_SECONDS = 0.0  # how fast this machine is does not matter here
    torch.set_num_threads(1)
    # A first step of an optimiser imports half of torch; here, once. No backward: autograd's
    # threads must not be forked.
    optimizer = torch.optim.AdamW(fault_loop.Net().parameters())
    optimizer.zero_grad()
    optimizer.step()
    answer({"ready": os.getpid()})
    with tempfile.TemporaryFile("w+") as learnt:
        for line in sys.stdin:
            request = json.loads(line)
            if "start" in request:
                answer({"pid": start(request["start"], learnt)})
            else:
                answer({"code": os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])})
                learn(learnt)


def learn(learnt: TextIO) -> None:
    """Import what a child had to import on its own, so that the next one need not."""
    learnt.seek(0)
    for name in learnt.read().split():
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    learnt.seek(0)
    learnt.truncate()


def start(request: dict[str, Any], learnt: TextIO) -> int:
    gc.freeze()  # else each child's garbage collector would copy every page of the imports
    pid = os.fork()
    if pid:
        return pid
    code, known = 1, set(sys.modules)
    try:
        code = child(request)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        learnt.write("".join(f"{name}\n" for name in list(sys.modules) if name not in known))
        learnt.flush()
        os._exit(code)


def child(request: dict[str, Any]) -> int:
    """Run the requested program in this process; return its exit code."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )
    if request.get("file_limit"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_limit"],) * 2)
    if request.get("user"):
        os.setgroups([])
        os.setgid(request["user"])
        os.setuid(request["user"])
    if request.get("clock"):
        set_clock(request["clock"])
    from dragoman.runtime import signals
    from dragoman.storage import fault_injection

    fault_injection.arm_faults(request.get("fault", ""))
    if "command" in request:
        from dragoman.__main__ import main

        sys.argv = ["dragoman", *request["command"]]
        main()
        return 0
    module = importlib.import_module(request.get("module", "fault_loop"))
    signals.install_handlers()
    return module.run(**request["loop"])


def set_clock(seconds: float) -> None:
    """Set the wall clock, jumping at every read; the monotonic clock is unchanged."""
    real, jumps = time.time, random.Random(0)

    def shifted() -> float:
        return real() + seconds + jumps.uniform(-86400, 86400)

    time.time = shifted
    time.time_ns = lambda: int(shifted() * 1e9)
    write, local = time.strftime, time.localtime
    time.strftime = lambda form, moment=None: write(form, moment or local(shifted()))
    time.localtime = lambda moment=None: local(shifted() if moment is None else moment)


def answer(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve()
