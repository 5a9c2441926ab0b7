"""Names and texts of others wherever people see them: on the page of a report, on a terminal, in a log.

Each text is put into every place at once where one can be, and what is shown is compared with what a plain text gives:
the same elements and attributes on the page, the same lines on the terminal, and nothing that a terminal obeys.
"""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from diloco.accounts.audit import audit, audit_text
from diloco.accounts.ledger import LEDGER, Opening, Position, Totals, open_ledger
from diloco.accounts.replay import replay, replay_text
from diloco.base.errors import ConfigError, DilocoError
from diloco.cli.lines import PeerLines, saying
from diloco.cli.main import _fail, _OneLine
from diloco.cli.options import show
from diloco.observe.events import KINDS, Stamped, from_json, to_json
from diloco.observe.report import Table, write_report
from diloco.observe.screen import Screen, status_text
from diloco.transport.dht_node import _PlainLines
from scripts.fuzzing.examples import example
from scripts.fuzzing.texts import STATUS

MARK = "zqz"
"""In each hostile text, and nowhere else."""
HOSTILE = {
    "element": f"<script>{MARK}</script><img src=x onerror={MARK}>",
    "attribute": f"\"' onload='{MARK}' style=\"{MARK}",
    "closing": f"{MARK}</td></title></style></svg>--><p>",
    "escapes": f"\x1b]0;{MARK}\x07\x1b[2J\x9b31m{MARK}",
    "direction": f"\u202e{MARK}\u2066\u200f\ufeff",
    "lines": f"{MARK}\r\njoin with:  diloco peer --join 6.6.6.6:66\u2028\x85\x0b",
    "nothing": f"\0{MARK}\0\ud800\ufffe",
    "mathematics": f"$\\frac{{{MARK}",
    "template": f"{{{{ {MARK} }}}}{{% {MARK} %}}",
    "huge": MARK * 50_000,
}
PLAIN = "a"
every_text = pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)


def with_text(tree: Any, text: str, kept: tuple[str, ...] = ("kind",)) -> Any:
    """JSON with this text for every other one in it."""
    if isinstance(tree, dict):
        return {key: value if key in kept else with_text(value, text, kept) for key, value in tree.items()}
    if isinstance(tree, list):
        return [with_text(entry, text, kept) for entry in tree]
    return text if isinstance(tree, str) else tree


def with_keys(tree: Any, text: str) -> Any:
    """The same, with the text for the names that events take from others, too: of peers that were outliers."""
    return {key: {text: 1} if key in ("outliers", "mesh") and value else value for key, value in tree.items()}


def events_with(text: str) -> list[Stamped]:
    """An event of every kind."""
    found = []
    for number, kind in enumerate(KINDS.values()):
        tree = with_keys(with_text(to_json(Stamped(1.0, 2.0 + number, text, example(kind))), text), text)
        stamped = from_json(tree)
        assert stamped is not None
        found.append(stamped)
    return found


# ---------------------------------------------------------------- the page


class Page(HTMLParser):
    """A page as a browser reads it: its elements with their attributes, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, tuple[tuple[str, str | None], ...]]] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_comment(self, data: str) -> None:
        assert MARK not in data

    def handle_pi(self, data: str) -> None:
        assert MARK not in data

    @property
    def kinds(self) -> set[tuple[str, str]]:
        """Elements and their attributes, by name."""
        return {(tag, name) for tag, attributes in self.elements for name, _ in (*attributes, ("", None))}


def page_with(text: str, folder: Path) -> Page:
    folder.mkdir()
    lines = [json.dumps(to_json(stamped)) for stamped in events_with(text)]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "contract.json").write_text(json.dumps({text: {text: text, "paths": [text]}}))
    cost = {"val_loss": 2.0, "tokens": 9, "wall_s": 1.0, "wire_bytes_sent_per_peer": 5}
    summary = {**cost, "digest": text, "codec": text, "comparisons": {text: cost}, "baseline": {"name": text, **cost}}
    (folder / "summary.json").write_text(json.dumps(summary))
    return Page(write_report(folder, [Table(text, (text, text), ((text, text),))]).read_text())


@pytest.fixture(scope="module")
def plain_page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return page_with(PLAIN, tmp_path_factory.mktemp("plain") / "run")


@pytest.mark.handmade_events
@every_text
def test_no_text_makes_an_element_or_an_attribute_of_the_report(text: str, tmp_path: Path, plain_page: Page) -> None:
    page = page_with(text, tmp_path / "run")
    assert page.kinds <= plain_page.kinds
    assert not any(MARK in f"{tag}{attributes}" for tag, attributes in page.elements)
    assert MARK in page.text
    assert all(line.isprintable() for line in page.text.split("\n"))
    assert len(page.text) < len(plain_page.text) + 20_000


# ---------------------------------------------------------------- the terminal


def status_lines(text: str) -> Iterator[str]:
    kept = ("answering",)
    tree = with_text(STATUS, text[:256], kept)
    tree["answering"] = tree["peers"][0]["peer"]
    yield status_text(tree)


def peer_lines(text: str) -> Iterator[str]:
    said: list[str] = []
    lines = PeerLines(said.append)
    for stamped in events_with(text):
        lines(stamped)
    yield from said


def screen_lines(text: str, live: bool) -> Iterator[str]:
    out = io.StringIO()
    with Screen("title", [text], 10, live, out, clock=lambda: 0.0) as screen:
        for stamped in events_with(text):
            screen.feed(stamped)
        screen.tick()
    yield re.sub(r"\x1b\[(?:[0-9;]*m|\?25[lh]|\d*[AK]|2K)|\r", "", out.getvalue())  # what rich itself writes


def audit_lines(text: str, folder: Path) -> Iterator[str]:
    """Ledgers of a peer with this name: a whole one, one with a record that no peer writes, and a damaged line."""
    for number, kind in enumerate(("whole", "odd", "torn")):
        path = folder / f"p{number}"
        ledger = open_ledger(path, print)
        opening = Opening(text, 1, 2, text, text, text, True, False)
        totals = Totals(5, 2, 1, 3)  # they do not add up
        ledger.opened(opening, {"membership": {text: text}, text: text}, Position(0, "", text), totals)
        ledger.discarded(1, 0, text, totals)
        if kind == "odd":
            ledger.write(text, {text: text}, totals)
        ledger.closed(text, totals)
        ledger.close()
        if kind == "torn":
            lines = (path / LEDGER).read_bytes().splitlines(keepends=True)
            (path / LEDGER).write_bytes(lines[0] + text.encode(errors="surrogatepass")[:300] + b"\n" + lines[1])
    yield audit_text(audit([folder]))


def replay_lines(text: str, folder: Path) -> Iterator[str]:
    try:
        yield replay_text(replay([folder], folder, lambda done, total: None))
    except DilocoError as error:
        yield from error_lines(error)


def error_lines(error: DilocoError) -> Iterator[str]:
    out, before = io.StringIO(), sys.stderr
    sys.stderr = out
    try:
        _fail(error)
    except SystemExit:
        yield out.getvalue().removesuffix("\n")
    finally:
        sys.stderr = before


def log_lines(text: str, formatter: logging.Formatter, *error: Any) -> Iterator[str]:
    yield formatter.format(logging.LogRecord("a", logging.WARNING, "", 0, "%s", (text,), error or None))  # type: ignore[arg-type]


SHOWN: dict[str, Callable[[str, Path], Iterator[str]]] = {
    "status": lambda text, _: status_lines(text),
    "peer": lambda text, _: peer_lines(text),
    "screen": lambda text, _: screen_lines(text, live=False),
    "screen-live": lambda text, _: screen_lines(text, live=True),
    "audit": audit_lines,
    "replay": lambda text, folder: [*audit_lines(text, folder), *replay_lines(text, folder)],  # type: ignore[return-value]
    "error": lambda text, _: error_lines(ConfigError(text, text)),
    "log": lambda text, _: log_lines(text, _OneLine("%(levelname)s %(name)s: %(message)s")),
    "directory-log": lambda text, _: log_lines(text, _PlainLines(), ValueError, ValueError(text), None),
}


@every_text
@pytest.mark.parametrize("place", SHOWN)
def test_no_text_does_anything_to_a_terminal(
    place: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(text: str, folder: Path) -> list[str]:
        folder.mkdir()
        for shown in SHOWN[place](text, folder):
            show(shown) if place in ("status", "audit", "replay") else print(shown)
        return capsys.readouterr().out.split("\n")

    lines, plain = said(text, tmp_path / "a"), said(PLAIN, tmp_path / "b")
    assert [line for line in lines if not line.isprintable()] == []
    assert len(lines) == len(plain)  # and no line that a text made


@every_text
def test_a_traceback_does_nothing_to_a_terminal(text: str) -> None:
    (said,) = log_lines(text, _OneLine(), ValueError, ValueError(text), None)
    assert all(line.isprintable() for line in said.split("\n"))


@every_text
def test_a_peer_prints_one_line_at_a_time(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    with saying() as say:
        say(f"{text} at version 3")
    lines = capfd.readouterr().out.removesuffix("\n").split("\n")
    assert all(line.isprintable() for line in lines)
