"""Whether another process of this machine still runs, so that what the dead left behind may be cleared away."""

from __future__ import annotations

import os


def is_process_alive(pid: int) -> bool:
    """Ask the system; where asking could do harm, say that it lives."""
    if os.name != "posix":
        return True  # signal 0 would end it
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
