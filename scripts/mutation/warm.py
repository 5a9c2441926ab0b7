"""Programs that begin where all imports of other packages are done, which take longer than a seed of the simulator.

A server imports them, and forks for each program that it is asked for: a JSON object in a line, answered by the
number of the process. It has nothing of `diloco`: each program imports that from a folder of its own.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from diloco.simulate.local.processes import die_with_parent

IMPORTS = (
    "torch", "torch._dynamo", "torch.distributed.pipelining", "torch.distributed.tensor", "torch.distributed.launcher",
    "grpc.aio", "google.protobuf.message", "pydantic", "safetensors.torch", "typer", "rich.console", "zstandard",
    "cryptography.x509", "xxhash", "blake3", "tqdm",
)  # fmt: skip
MAX_DATA_BYTES = 4 * 2**30
"""Memory of one program: a mutant may allocate without end. Torch needs a tenth of it."""


class WarmServer:
    """The server, as those see it that ask it for programs."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "scripts.mutation.warm"],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for us
            preexec_fn=die_with_parent,
        )

    def start(self, folder: Path, words: Sequence[str], output: Path, errors: Path) -> WarmProgram:
        """A program, as `python` with these words in this folder, which comes first in its path."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"folder": str(folder), "words": list(words), "output": str(output), "errors": str(errors)}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return WarmProgram(int(self._process.stdout.readline()))

    def close(self) -> None:
        """End the server, and all that it started."""
        self._process.kill()
        self._process.communicate()


class WarmProgram:
    """A program that the server forked."""

    def __init__(self, pid: int) -> None:
        try:
            self._fd: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._fd = None

    @property
    def ended(self) -> bool:
        """Whether it is over."""
        return self.wait(0.0)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, unless it is over."""
        if not self.ended and self._fd is not None:
            signal.pidfd_send_signal(self._fd, number)

    def wait(self, seconds: float) -> bool:
        """Wait for its end, for at most so long. Whether it is over."""
        if self._fd is not None and select.select([self._fd], [], [], seconds)[0]:
            os.close(self._fd)
            self._fd = None
        return self._fd is None


def serve() -> None:
    """Fork a program for each line of the input."""
    for name in IMPORTS:
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "diloco"]:
        del sys.modules[name]
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks for exit codes
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            _be(**json.loads(line))
        print(pid, flush=True)


def _be(folder: str, words: Sequence[str], output: str, errors: str) -> NoReturn:
    """Be one of the programs, and end."""
    code: Any = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent()
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, MAX_DATA_BYTES))
        for stream, (name, flags) in enumerate(_files(output, errors).items()):
            os.dup2(os.open(name, flags, 0o644), stream)
        os.chdir(folder)
        sys.path[0] = folder
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
        module, program, arguments = words[0] == "-m", words[words[0] == "-m"], words[1 + (words[0] == "-m") :]
        sys.argv = [program, *arguments]
        run = runpy.run_module if module else runpy.run_path
        run(program, run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def _files(output: str, errors: str) -> Mapping[str, int]:
    write = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    return {os.devnull: os.O_RDONLY, output: write, errors: write}


if __name__ == "__main__":
    serve()
