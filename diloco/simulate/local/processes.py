"""Child processes of a simulation: started apart from our signals, watched, and never left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from diloco.base.clock import monotonic_s
from diloco.base.errors import DilocoError

MAX_TAIL_LINES = 12
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class SimulationProcess:
    """A child process of `diloco simulate`, in a session of its own. Its output goes to a file."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        log: Path,
        threads: int,
        variables: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),
    ) -> None:
        """`launcher`: words before the command, which end in an exec of it."""
        self.name = name
        self.log = log
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo", **(variables or {})}
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*launcher, sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
                preexec_fn=die_with_parent,
            )

    @property
    def exit_code(self) -> int | None:
        """Exit code of the simulation's process; None while it runs."""
        return self._process.poll()

    @property
    def pid(self) -> int:
        """Process id of the simulation's process."""
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the simulation's process, if it still lives."""
        if self.exit_code is None:
            self._process.send_signal(number)

    def ask_to_leave(self) -> None:
        """Ask the simulation's process to leave in good order, by SIGINT."""
        self.send(signal.SIGINT)

    def wait(self) -> None:
        """Wait until the simulation's process has ended."""
        self._process.wait()

    def end(self, grace_s: float) -> None:
        """End the simulation's process by SIGTERM, and by SIGKILL after `grace_s`."""
        if self.exit_code is None:
            self._process.terminate()
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def failure(self) -> DilocoError:
        """Error for a process of a simulation that ended, with the last lines of its log."""
        lines = self.log.read_text(errors="replace").splitlines()[-MAX_TAIL_LINES:]
        said = [line for line in lines if line.startswith("error: ")]
        fix = [line.removeprefix("  fix: ") for line in lines if line.startswith("  fix: ")]
        cause = said[-1].removeprefix("error: ") if said else f"exit code {self.exit_code}: {' / '.join(lines[-3:])}"
        error = DilocoError(f"{self.name} ended: {cause}", fix[-1] if fix else f"see {self.log}")
        error.exit_code = self.exit_code if said and self.exit_code else 1
        return error


def die_with_parent(number: int = signal.SIGINT) -> None:
    """Called in a child process of a simulation: it gets this signal when its parent dies, however that happens. Only
    Linux has that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def end_all(children: Sequence[SimulationProcess], grace_s: float = 5.0) -> None:
    """End all child processes of a simulation side by side, within about `grace_s`."""
    for child in children:
        child.ask_to_leave()
        child.ask_to_leave()  # the second signal ends a peer at once
    deadline_s = monotonic_s() + grace_s
    for child in children:
        child.end(max(deadline_s - monotonic_s(), 0.1))
