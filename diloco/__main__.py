"""`diloco` and `python -m diloco`: Ctrl-C is heard before anything is imported that takes time."""

from __future__ import annotations

import os
import signal

from diloco.base.collector import starts


def main() -> None:
    """Entry point. Until the command takes the signals over, SIGINT ends the process at once with exit code 130."""
    signal.signal(signal.SIGINT, lambda number, _: os._exit(128 + number))
    if hasattr(signal, "pthread_sigmask"):  # whoever started this process may have held the signal back until here
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    starts()
    # GNU's OpenMP reads this when torch loads it. By default its threads spin 30 times as long for their next work: two
    # peers on one machine's cores took 97 s for what takes 35 s with this. A peer alone is no slower.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    from diloco.cli.main import run

    run()


if __name__ == "__main__":
    main()
