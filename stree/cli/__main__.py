"""``python -m stree.cli``, the same as ``stree``."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn

from stree.cli import main

__all__ = ["run"]


def run() -> NoReturn:
    """Run a command, then end the process without freeing its objects one by one, which takes a second.

    With other threads the process ends as usual, which joins them.
    """
    status = main()
    if threading.active_count() == 1:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    run()
