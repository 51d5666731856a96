"""Whether a process of this machine is alive."""

from __future__ import annotations

import os


def is_process_alive(pid: int) -> bool:
    """Whether a process is alive; True where the system cannot be asked safely."""
    if os.name != "posix":
        return True  # signal 0 would end it
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
