"""The command line as a whole: all commands, and how errors end. Heavy imports happen inside the commands, so that
--help is quick."""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
from typing import Annotated, Any, NoReturn

from typer import Exit, Option, Typer

from diloco import __version__
from diloco.base.errors import DilocoError, ResourceError, UsageError
from diloco.base.readable import printable
from diloco.cli import bench, config, inspect, peer, plan, simulate

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
ELSEWHERE = {
    "darwin": "note: peers are tested on Linux only; on macOS bytes on the wire are not counted\n",
    "win32": "note: hivemind does not run on Windows: plans, audits and reports work here, peers in WSL 2\n",
}
"""By `sys.platform`: what works there."""
READER_GONE = 141
"""Exit code when nobody reads the output to its end, as a shell gives for SIGPIPE."""

app = Typer(
    help="Train one model over several datacenters, over ordinary networks, with peers that come and go.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for commands in (
    config.commands,
    peer.commands,
    simulate.commands,
    plan.commands,
    peer.operator_commands,
    inspect.commands,
):
    app.add_typer(commands)
app.add_typer(config.config_app, name="config")
app.add_typer(config.data_app, name="data")
app.add_typer(bench.bench_app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"diloco {__version__}")
        raise Exit


@app.callback()
def _options(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def run() -> NoReturn:
    """Run the `diloco` command that the arguments name. An error for people goes to standard error in two lines, and
    its class gives the exit code."""
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine("%(levelname)s %(name)s: %(message)s"))
    level = os.environ.get("DILOCO_LOG", "WARNING").upper()
    if level not in logging.getLevelNamesMapping():
        _fail(UsageError(f"DILOCO_LOG is {level!r}", f"use one of {', '.join(LOG_LEVELS)}, or unset it"))
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("grpc").setLevel(logging.CRITICAL)  # it logs what the network damaged; we report what follows
    arguments = sys.argv[1:]
    if arguments[:1] == ["simulate"] and "--virtual" in arguments:  # its name before it was a command of its own
        arguments = ["virtual", *(argument for argument in arguments[1:] if argument != "--virtual")]
    sys.stderr.write(ELSEWHERE.get(sys.platform, ""))
    try:
        try:
            app(arguments, standalone_mode=True)
        finally:
            print(end="", flush=True)  # so that a full disk is noticed here, and not at the interpreter's end
    except SystemExit as ended:
        if isinstance(
            ended.__context__, BrokenPipeError
        ):  # typer exits with 1, which is an audit's word for violations
            sys.exit(READER_GONE)
        raise
    except DilocoError as error:
        _fail(error)
    except PermissionError as error:  # in a folder of runs any file may be somebody else's
        logging.getLogger(__name__).debug("not permitted", exc_info=True)
        _fail(ResourceError(f"{error.filename}: {error.strerror}", "ask its owner, or run as the user who wrote it"))
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EPIPE):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else the interpreter's end tries once more
        if error.errno == errno.EPIPE:
            sys.exit(READER_GONE)
        _fail(ResourceError(f"cannot write: {error.strerror}", "make room, or send the output elsewhere"))
    except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError
        if not isinstance(error, MemoryError) and not re.search("out of memory|allocate memory", str(error)):
            raise
        logging.getLogger(__name__).debug("out of memory", exc_info=True)
        said = (str(error) or "out of memory").partition("\n")[0]
        _fail(ResourceError(said[:300], "train a smaller model, or fewer sequences at once: inner.batch_size"))
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


class _OneLine(logging.Formatter):
    """A command's log record on one line of plain characters: it may quote bytes that another machine sent."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return "\n".join(map(printable, super().formatException(ei).split("\n")))


def _fail(error: DilocoError) -> NoReturn:
    sys.stderr.write(f"error: {printable(error.cause)}\n")
    if error.fix:
        sys.stderr.write(f"  fix: {printable(error.fix)}\n")
    if isinstance(error, UsageError):
        sys.stderr.write("  see: diloco --help\n")
    sys.exit(error.exit_code)
