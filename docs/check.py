"""`scripts/docs-check`: the commands in README and docs, run where they are marked `run`, parsed where they are not.

    scripts/docs-check                 everything
    scripts/docs-check --quick         without blocks marked `slow`
    scripts/docs-check README.md ...   only these pages

A block is marked behind its language, ```bash run. The blocks of a page run in one folder, one after another:

    run             run it; it must end with 0
    run slow        --quick parses it only
    run empty       in a folder of its own, without `configs/` and `peers/` beside it
    run background  start it, wait for the address to join, go on; it must end with 0 when the page is over

`10.0.0.5:4000/DIGEST` in a block stands for the address of the last background command. Pages also have links
and paths of files, which must exist.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED_FILE = re.compile(r"`((?:diloco|scripts|configs|peers|examples|tests|docs|proto)/[\w./*-]+)`")
ADDRESS = "10.0.0.5:4000/DIGEST"
FOUNDED = re.compile(r"--join (\S+)")
BESIDE = ("configs", "peers", "examples")
"""Folders of the project that the commands of a page find in their own folder."""
SYSTEM = {"pip", "openssl", "mkdir", "cp"}
"""Programs that are no part of the project: their options are not checked."""
MAX_BLOCK_S = 900.0
MAX_FOUND_S = 120.0


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, its marks, its text, and its place for messages."""

    page: Path
    line: int
    language: str
    marks: frozenset[str]
    text: str

    @property
    def place(self) -> str:
        """The block's page and line."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """README, CONTRIBUTING, and every page of docs/."""
    inside = sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *inside]


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text()
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield Block(page, line, match[1], frozenset(match[2].split()), match[3])


# ---------------------------------------------------------------- parsing


def faults(page: Path) -> Iterator[str]:
    """Every command that does not parse, every link and named file that does not exist."""
    for block in blocks(page):
        if block.language == "bash":
            for words in commands(block.text):
                fault = fault_of(words)
                if fault:
                    yield f"{block.place}: {shlex.join(words)}: {fault}"
        elif block.language == "python":
            try:
                ast.parse(block.text)
            except SyntaxError as error:
                yield f"{block.place}: {error}"
    prose = BLOCK.sub("", page.read_text())
    for target in LINK.findall(prose):
        file = target.partition("#")[0]
        if file and "://" not in file and not (page.parent / file).exists():
            yield f"{page.relative_to(ROOT)}: link to {target}, which does not exist"
    for name in NAMED_FILE.findall(prose):
        if not any(ROOT.glob(name.rstrip("/"))):
            yield f"{page.relative_to(ROOT)}: names {name}, which does not exist"


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command line; comments, `export` and settings of variables are left out."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and (words[0] == "export" or re.fullmatch(r"[A-Z_]+=.*", words[0])):
            words = words[1:]
        if words:
            yield words


def fault_of(words: Sequence[str]) -> str:
    """The reason why a command cannot be right; empty when none is seen."""
    program, arguments = words[0], list(words[1:])
    if program == "torchrun" and "-m" in arguments:
        program, arguments = "python", arguments[arguments.index("-m") :]
    if program == "python" and arguments[:2] == ["-m", "diloco"]:
        program, arguments = "diloco", arguments[2:]
    if program == "diloco":
        return diloco_fault([word for word in arguments if word != "..."])
    if program == "python" and arguments[0] != "-m":
        return "" if (ROOT / arguments[0]).is_file() else f"no file {arguments[0]}"
    if program.startswith("scripts/"):
        return script_fault(program, arguments)
    return "" if program in SYSTEM or arguments[:2] == ["-m", "sphinx"] else f"unknown program {program}"


def diloco_fault(arguments: list[str]) -> str:
    """Let the command line parse the arguments, without running anything."""
    import typer.main

    from diloco.cli.main import app

    command: Any = typer.main.get_command(app)
    while arguments and arguments[0] in getattr(command, "commands", {}):
        command = command.commands[arguments.pop(0)]
    if hasattr(command, "commands"):
        return "no such command"
    try:
        command.make_context(command.name, arguments)
    except SystemExit:
        return ""
    except Exception as error:  # typer brings click's errors along, under a name that differs by version
        return str(getattr(error, "message", error)) or type(error).__name__
    return ""


def script_fault(program: str, arguments: Sequence[str]) -> str:
    """A script must exist, and its options must be named in the sources of the scripts or the command line."""
    path = ROOT / program
    if not os.access(path, os.X_OK):
        return "no such script"
    sources = [path, *(ROOT / "scripts").rglob("*.py"), *(ROOT / "diloco/cli").glob("*.py")]
    sources += (ROOT / "diloco/simulate").rglob("*.py")
    text = "\n".join(source.read_text() for source in sources)
    unknown = [word for word in arguments if word.startswith("--") and f'"{word}"' not in text]
    return f"unknown option {unknown[0]}" if unknown else ""


# ---------------------------------------------------------------- running


@dataclass
class Shop:
    """The folder in which the commands of one page run, and the peers that it started."""

    folder: Path
    address: str = ADDRESS
    started: list[tuple[Block, subprocess.Popen[bytes]]] = field(default_factory=list)

    def run(self, block: Block) -> None:
        """Run one block to its end, or start it. Raises RuntimeError with its last lines when it fails."""
        text = block.text.replace(ADDRESS, self.address)
        folder = self.folder
        if "empty" in block.marks:
            folder = Path(tempfile.mkdtemp(dir=self.folder))
        with (self.folder / "output").open("wb") as output:
            child = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", text],
                cwd=folder, env=environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.started.append((block, child))
        if "background" in block.marks:
            self._wait_for_address(block, child)
        else:
            self._finish(block, child)

    def _wait_for_address(self, block: Block, child: subprocess.Popen[bytes]) -> None:
        (self.folder / "output").rename(self.folder / "background")
        deadline = time.monotonic() + MAX_FOUND_S
        while not (found := FOUNDED.search((self.folder / "background").read_text())):
            if child.poll() is not None or time.monotonic() > deadline:
                raise self._failure(block, "prints no address to join", "background")
            time.sleep(0.1)
        self.address = found[1]

    def _finish(self, block: Block, child: subprocess.Popen[bytes], output: str = "output") -> None:
        try:
            code = child.wait(MAX_BLOCK_S)
        except subprocess.TimeoutExpired:
            raise self._failure(block, f"runs for more than {MAX_BLOCK_S:.0f} s", output) from None
        self.started.remove((block, child))
        if code:
            raise self._failure(block, f"ended with {code}", output)

    def _failure(self, block: Block, cause: str, output: str) -> RuntimeError:
        tail = (self.folder / output).read_text(errors="replace").splitlines()[-15:]
        return RuntimeError("\n".join([f"{block.place}: {cause}", block.text.rstrip(), "", *tail]))

    def finish_background(self) -> None:
        """Wait for the commands that were started; each must end with 0."""
        for block, child in list(self.started):
            self._finish(block, child, "background")

    def close(self) -> None:
        """End whatever still runs."""
        for _, child in self.started:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def environment() -> dict[str, str]:
    """This Python's commands first, and this checkout's package."""
    here = Path(sys.executable).parent
    return {**os.environ, "PATH": f"{here}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def run_page(page: Path, quick: bool) -> int:
    """Run the marked blocks of a page. Returns how many ran. Raises RuntimeError for the first that fails."""
    chosen = [block for block in blocks(page) if "run" in block.marks and not (quick and "slow" in block.marks)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        for name in BESIDE:
            (folder / name).symlink_to(ROOT / name)
        shop = Shop(folder)
        stack.callback(shop.close)
        for block in chosen:
            began = time.monotonic()
            shop.run(block)
            print(f"{block.place}: {time.monotonic() - began:.1f} s", flush=True)
        shop.finish_background()
    return len(chosen)


def main() -> int:
    """Parse all pages, then run them. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="parse blocks marked `slow` only")
    parser.add_argument("pages", nargs="*", type=Path, help="pages to check; all by default")
    arguments = parser.parse_args()
    chosen = [page.resolve() for page in arguments.pages] or pages()
    found = [fault for page in chosen for fault in faults(page)]
    if not found:
        for page in chosen:
            try:
                run_page(page, arguments.quick)
            except RuntimeError as error:
                found.append(str(error))
    print("\n\n".join(found) if found else "docs-check: all good")
    return 1 if found else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())
