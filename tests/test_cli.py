"""Mistakes at the command line: a cause, a fix, the right exit code, no traceback; and help that is quick."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.base.errors import ResourceError, UsageError
from diloco.cli import inspect, simulate
from diloco.cli import main as cli
from diloco.cli.lines import PeerLines
from diloco.config.load import load_site
from diloco.observe.events import Evaluated, Stamped, Started, VersionClosed, from_json
from diloco.run import operate
from diloco.run.options import remember, remembered_root
from tests.peers import DEADLINE_S, PeerProcess, ending, run_cli, tiny_contract

QUICK = Path(__file__).parent.parent / "configs" / "quick.toml"


def fails(code: int, cause: str, *arguments: str, cwd: Path | None = None) -> None:
    done = run_cli(*arguments, cwd=cwd)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert cause in errors[0]
    assert "  fix: " in done.stderr


@pytest.mark.slow(queued=False)
def test_mistyped_key(tmp_path: Path) -> None:
    contract = tmp_path / "c.toml"
    contract.write_text(QUICK.read_text().replace("batch_size", "batchsize"))
    fails(10, "unknown key inner.batchsize", "peer", str(contract))


@pytest.mark.slow(queued=False)
def test_site_key_in_a_contract(tmp_path: Path) -> None:
    contract = tmp_path / "c.toml"
    contract.write_text(QUICK.read_text() + '\n[network]\nlisten = "127.0.0.1:0"\n')
    fails(10, "[network]", "peer", str(contract))


@pytest.mark.slow(queued=False)
def test_missing_contract() -> None:
    fails(10, "contract not found", "peer", "configs/qick.toml")


@pytest.mark.slow(queued=False)
def test_contract_of_another_version(tmp_path: Path) -> None:
    contract = tmp_path / "c.toml"
    contract.write_text(QUICK.read_text().replace("[run]", "[run]\ncontract_version = 9"))
    fails(16, "contract version 9", "peer", str(contract))


@pytest.mark.slow(queued=False)
def test_nothing_to_do_and_contradictions() -> None:
    fails(2, "nothing to do", "peer")
    fails(2, "do not go together", "peer", str(QUICK), "--join", "127.0.0.1:1")
    fails(2, "--set changes a contract", "peer", "--join", "127.0.0.1:1", "--set", "inner.lr=1")
    fails(2, "has no port", "peer", "--join", "10.0.0.5")
    fails(2, "has no port", "status", "10.0.0.5")
    fails(2, "--speeds is '1,2'", "simulate", str(QUICK), "--speeds", "1,2")
    fails(2, "--speeds is", "simulate", str(QUICK), "--speeds", "fast")
    fails(2, "2 speeds for 3 peers", "simulate", str(QUICK), "--speeds", "1,0.5", "--peers", "3")
    fails(2, "ddp has no peers of different speeds", "simulate", str(QUICK), "--speeds", "1,0.5", "--compare", "ddp")
    fails(2, "is no contract's digest", "peer", "--join", "127.0.0.1:4999/xyz")
    fails(2, "cannot compare with fsdp", "simulate", str(QUICK), "--compare", "fsdp")


@pytest.mark.slow(queued=False)
def test_open_to_the_world_needs_insecure() -> None:
    fails(2, "lets anybody in", "peer", str(QUICK), "--set", "network.listen=0.0.0.0:0")


@pytest.mark.slow(queued=False)
def test_a_short_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_SECRET", "guess me")
    fails(2, "at least 16", "peer", str(QUICK))
    fails(2, "at least 16", "status", "127.0.0.1:1")


def test_a_folder_of_peers_remembers_their_data_root(tmp_path: Path) -> None:
    (tmp_path / "oslo").mkdir()
    remember(tmp_path / "oslo", load_site(None, ["data.root=/corpus"]).value, private=False)
    assert inspect._root(None, tmp_path) == Path("/corpus")


@pytest.mark.slow(queued=False)
def test_resume_from_nothing(tmp_path: Path) -> None:
    fails(13, str(tmp_path), "peer", "--resume", str(tmp_path))


@pytest.mark.slow(queued=False)
@pytest.mark.parametrize("command", ["peer --resume", "report", "audit", "replay", "eval", "export", "status"])
def test_a_missing_run_folder_is_named_whole_and_exits_with_13(command: str, tmp_path: Path) -> None:
    out = [str(tmp_path / "exported")] if command == "export" else []
    fails(13, str(tmp_path / "runs" / "none"), *command.split(), "runs/none", *out, cwd=tmp_path)


@pytest.mark.slow
def test_wrong_address() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    asked = [
        (f"nobody answers at {address}", "peer", "--join", address),
        (f"nobody answers at {address}", "status", address),
        ("nobody answers at [::1]:1", "peer", "--join", f"{address},[::1]:1/{64 * 'a'}"),
    ]
    with ThreadPoolExecutor() as pool:  # a joiner knocks for ten seconds
        list(pool.map(lambda one: fails(11, *one), asked))


@pytest.mark.slow
def test_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        here = ["--dir", str(tmp_path / "p")]
        fails(14, address.split(":")[1], "peer", str(QUICK), "--set", f"network.listen={address}", *here)


@pytest.mark.slow
def test_empty_data_folder(tmp_path: Path) -> None:
    contract = tmp_path / "c.toml"
    contract.write_text(QUICK.read_text().replace('source = "stdlib"', 'source = "text"\npaths = ["corpus"]'))
    (tmp_path / "corpus").mkdir()
    here = ["--dir", str(tmp_path / "p"), "--set", f"data.root={tmp_path}"]
    fails(18, "corpus", "peer", str(contract), *here)


@pytest.mark.slow
def test_another_contract_than_the_ticket_names(tmp_path: Path) -> None:
    with ending([PeerProcess("a", tmp_path, str(tiny_contract(tmp_path)))]) as peers:
        address = peers[0].ticket().partition("/")[0]
        fails(12, f"the address given names {16 * '0123'}", "peer", "--join", f"{address}/{16 * '0123'}")


@pytest.mark.slow
def test_the_name_of_a_live_peer(tmp_path: Path) -> None:
    with ending([PeerProcess("a", tmp_path, str(tiny_contract(tmp_path)))]) as peers:
        ticket = peers[0].ticket()
        cause = f"the run has a live peer named a, at {ticket.partition('/')[0]}"
        fails(15, cause, "peer", "--join", ticket, "--name", "a", "--dir", str(tmp_path / "b"))
        assert not (tmp_path / "b" / "checkpoints").exists()


@pytest.mark.slow
def test_another_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ending([PeerProcess("a", tmp_path, str(tiny_contract(tmp_path)))]) as peers:
        ticket = peers[0].ticket()
        monkeypatch.setenv("DILOCO_SECRET", "quite another secret")
        fails(12, "does not let us in", "status", ticket)
        fails(12, "does not let us in", "peer", "--join", ticket, "--dir", str(tmp_path / "b"))


def test_a_file_that_may_not_be_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It ended reports, exports and resumes in a traceback."""

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "runs/a/events.jsonl")

    monkeypatch.setattr(cli, "app", refused)
    with pytest.raises(SystemExit) as ended:
        cli.run()
    assert ended.value.code == ResourceError.exit_code
    assert capsys.readouterr().err.startswith("error: runs/a/events.jsonl: Permission denied\n  fix: ask its owner")


@pytest.mark.slow
def test_full_disk(tmp_path: Path) -> None:
    """The run goes on without checkpoints; its end, which must write one, says why it cannot."""
    contract = tiny_contract(tmp_path, tokens=12_288)
    done = run_limited(60_000, "peer", str(contract), "--dir", str(tmp_path / "p"))
    assert done.returncode == 14, done.stdout + done.stderr
    assert "no checkpoint" in done.stdout
    assert "100%" in done.stdout
    assert "Traceback" not in done.stderr
    assert "  fix: " in done.stderr


@pytest.mark.slow
def test_a_disk_too_full_for_the_ledgers_first_record(tmp_path: Path) -> None:
    """Nothing starts: what is trained would be in no life of the ledger."""
    contract = tiny_contract(tmp_path, tokens=12_288)
    folder = tmp_path / "p"
    done = run_limited(600, "peer", str(contract), "--dir", str(folder))
    assert done.returncode == ResourceError.exit_code, done.stdout + done.stderr
    assert "cannot write the ledger" in done.stderr
    assert "File too large" in done.stderr
    assert "  fix: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "ledger.jsonl").read_bytes()
    assert not (folder / "peer.json").exists()  # nobody was let in
    assert '"version"' not in (folder / "events.jsonl").read_text()


def run_limited(limit_bytes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One command of a process whose files may not grow beyond so many bytes."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit_bytes}, {limit_bytes})); "
    quiet = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    program = limit + quiet + "from diloco.__main__ import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_config_show_says_where_values_come_from() -> None:
    shown = run_cli("config", "show", str(QUICK), "--set", "outer.lr=0.5", "--json")
    values = json.loads(shown.stdout)["values"]
    assert values["outer.lr"] == {"value": 0.5, "from": "the command line"}
    assert values["run.name"]["from"].endswith("quick.toml")
    assert values["outer.momentum"]["from"] == "default"
    assert values["timeouts.suspect_s"]["value"] == 4.0


@pytest.mark.slow(queued=False)
def test_data_pack(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello world\n" * 500)
    done = run_cli("data", "pack", str(tmp_path / "a.txt"), "--output", str(tmp_path / "a.bin"), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"] >= 6000


@pytest.mark.parametrize("command", [[], ["peer"], ["simulate"], ["status"], ["config", "show"], ["data", "pack"]])
def test_help_has_text_and_an_example(command: list[str]) -> None:
    done = run_cli(*command, "--help")
    assert done.returncode == 0
    assert "Usage" in done.stdout
    if command and command != ["data"]:
        assert "diloco " + " ".join(command) in done.stdout


def test_init_writes_a_contract_and_a_site_and_replaces_nothing(tmp_path: Path) -> None:
    done = run_cli("init", "my-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "diloco simulate my-run/contract.toml" in done.stdout
    shown = run_cli("config", "show", "my-run/contract.toml", "--site", "my-run/site.toml", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    fails(2, f"{tmp_path}/my-run/contract.toml is there already", "init", "my-run", cwd=tmp_path)


# ---------------------------------------------------------------- what a peer prints


def run_python(program: str, **streams: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], text=True, timeout=DEADLINE_S, check=False, **streams)


SAYING = """
import sys
import diloco.cli.lines
diloco.cli.lines.LAST_LINES_S = 0.1
with diloco.cli.lines.saying() as say:
    for number in range(20_000):
        say("x" * 100)
sys.stderr.write("trained on")
"""


def test_a_full_disk_or_a_reader_that_is_gone_or_asleep_ends_no_peer() -> None:
    with Path("/dev/full").open("wb") as full:
        said = run_python(SAYING, stdout=full, stderr=subprocess.PIPE)
    assert (said.returncode, "trained on" in said.stderr) == (0, True)
    assert "nothing more is printed: No space left on device" in said.stderr
    for gone in (True, False):
        reading, writing = os.pipe()
        if gone:
            os.close(reading)
        said = run_python(SAYING, stdout=writing, stderr=subprocess.PIPE)
        assert (said.returncode, "trained on" in said.stderr) == (0, True)
        for end in (writing,) if gone else (reading, writing):
            os.close(end)


@pytest.mark.parametrize("command", ["['config', 'presets']", "['config', 'show', 'quick', '--json']"])
def test_an_answer_that_cannot_be_printed_is_no_traceback(command: str) -> None:
    """Whether it fits into the buffer, which is written at the end, or not."""
    program = f"import sys; sys.argv[1:] = {command}; from diloco.cli import main; main.run()"
    with Path("/dev/full").open("wb") as full:
        done = run_python(program, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == ResourceError.exit_code
    assert done.stderr.startswith("error: cannot write: No space left on device\n  fix: ")
    reading, writing = os.pipe()
    os.close(reading)
    done = run_python(program, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (cli.READER_GONE, "")


def test_what_is_said_comes_out_whole_and_in_order() -> None:
    said = run_python(SAYING.replace('"x" * 100', "str(number)").replace("20_000", "5000"), stdout=subprocess.PIPE)
    assert said.stdout.split() == [str(number) for number in range(5000)]


def test_a_hangup_is_heard_where_the_terminal_is_gone() -> None:
    program = "import os, signal; from diloco.cli.options import stop_asked; stop = stop_asked(); "
    program += "os.kill(os.getpid(), signal.SIGHUP); print(stop())"
    with Path("/dev/full").open("wb") as gone:
        done = run_python(program, stdout=subprocess.PIPE, stderr=gone)
    assert (done.returncode, done.stdout) == (0, "True\n")


def test_names_of_other_machines_do_nothing_to_the_terminal() -> None:
    lines: list[str] = []
    show = PeerLines(lines.append)
    hostile = "\x1b]0;owned\x07\u202eevil\r\njoin with:  diloco peer --join 6.6.6.6:66"
    stamp = {"t": 0.0, "time": 0.0, "peer": "a", "version": 3, "tokens": 9}
    version = {"kind": "version", "loss": None, "own": True, "counted": [hostile, "zoë"], "tokens_per_s": 1.0}
    for event in (
        version,
        {"kind": "view", "joined": [hostile], "left": [{"peer": hostile, "reason": "lost"}]},
        {"kind": "skip", "reason": f"{hostile} sent nonsense"},
        {"kind": "reason", "text": hostile, "routine": False},
    ):
        stamped = from_json(stamp | event)
        assert stamped is not None
        show(stamped)
    assert len(lines) == 4
    assert all(line.isprintable() and "\\x1b]0;owned\\x07\\u202eevil\\r\\njoin" in line for line in lines)
    assert "zoë" in lines[0]


def test_a_loss_that_is_no_number_ends_no_peer() -> None:
    lines: list[str] = []
    show = PeerLines(lines.append)
    for event in (Started(run="x", total_tokens=200), VersionClosed(3, 50, loss=math.nan), Evaluated(50, 3, math.nan)):
        show(Stamped(0.0, 0.0, "a", event))
    assert lines[1:] == ["v3   25%  50 tokens  0 tok/s  counted ", "v3  held-out loss –"]


def test_a_mistake_is_told_before_torch_is_imported() -> None:
    mistakes: list[list[str]] = [["qick.toml"], [], [str(QUICK), "--set", "inner.lr=fast"], ["--join", "10.0.0.5"]]
    for arguments in (*mistakes, ["--join", "a:1", "--name", "-"], ["--join", "a:1,b"], ["--join", "a:1/xyz"]):
        program = f"import sys, atexit; sys.argv = ['diloco', 'peer', *{arguments}]; "
        program += "atexit.register(lambda: print('torch' in sys.modules)); from diloco.__main__ import main; main()"
        done = run_python(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert done.returncode in (2, 10), done.stderr
        assert done.stdout == "False\n", arguments


def test_a_simulation_in_virtual_time_takes_no_contract(tmp_path: Path) -> None:
    contract = tiny_contract(tmp_path)
    before = contract.read_text()
    fails(2, "virtual time does not read", "virtual", "--seed", "1", "--json", str(contract))
    assert contract.read_text() == before


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"seed": 0, "seeds": "0:2"}, "--seed and --seeds do not go together"),
        ({"seed": 0, "planted": True}, "--seed and --planted do not go together"),
        ({"plan": Path("x.txt"), "size": "nightly"}, "are for seeds, not for --plan"),
        ({"planted": True, "policy": "async"}, "are for seeds, not for --planted"),
    ],
)
def test_options_of_virtual_time_that_exclude_each_other(given: dict[str, Any], cause: str) -> None:
    with pytest.raises(UsageError, match=cause):
        simulate.virtual(**given)


def test_what_was_found_is_told_though_it_cannot_be_written() -> None:
    done = run_cli("virtual", "--seed", "1", "--json", "/no/such/folder/x.json")
    assert done.returncode == 2
    assert "COMMIT" in done.stdout.upper()
    assert "cannot write /no/such/folder/x.json" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_an_eviction_is_told_to_all_who_answer(tmp_path: Path) -> None:
    with ending([]) as peers:
        a = PeerProcess("a", tmp_path, str(tiny_contract(tmp_path, peers=4)), "--set", "timeouts.suspect_s=60")
        peers.append(a)
        peers += [PeerProcess(name, tmp_path, "--join", a.ticket()) for name in "bcd"]
        a.reaches(1, list("abcd"))
        for peer in peers[1:3]:
            peer.process.send_signal(signal.SIGSTOP)
        told = run_cli("evict", a.ticket(), "b")
        assert told.returncode == 0, told.stderr
        assert "b is declared dead; reported to a, d" in told.stdout
        assert "c did not answer" in told.stdout


@pytest.mark.parametrize(
    ("peer", "in_view", "text"),
    [
        ("b", False, "the view has no peer named b\n  fix: it has no members yet: the run has not begun"),
        ("a", True, "a answers at 10.0.0.1:1: it lives\n  fix: stop it first"),
    ],
)
def test_an_eviction_that_cannot_be_is_explained(peer: str, in_view: bool, text: str) -> None:
    entry = {"peer": "a", "address": "10.0.0.1:1", "alive": True, "in_view": in_view, "incarnation": 1}
    tree = {"run": "r", "contract_digest": "d", "lineage": "l", "answering": "a", "peers": [entry]}

    async def status(*_: object) -> str:
        return json.dumps(tree)

    with pytest.raises(UsageError) as caught:
        asyncio.run(operate.evict(SimpleNamespace(status=status), "10.0.0.1:1", peer))  # type: ignore[arg-type]
    assert str(caught.value).startswith(text)


def test_a_folder_that_was_copied_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    remember(tmp_path, load_site(None).value, private=False)
    shutil.copytree(tmp_path, tmp_path / "copy")
    assert [remembered_root(tmp_path / "copy") for _ in range(3)] == [None] * 3
    assert caplog.text.count("was copied or restored") == 1


@pytest.mark.slow
def test_an_eviction_that_nobody_takes_is_an_error(tmp_path: Path) -> None:
    with ending([]) as peers:
        a = PeerProcess("a", tmp_path, str(tiny_contract(tmp_path, peers=1)))
        peers.append(a)
        a.reaches(1, ["a"])
        told = run_cli("evict", a.ticket(), "a")
    assert told.returncode == 2
    assert re.match(r"error: a answers at 127\.0\.0\.1:\d+: it lives\n", told.stderr)
    assert told.stdout == ""


@pytest.mark.slow(queued=False)
@pytest.mark.parametrize(("level", "shown"), [(None, ["warning"]), ("info", ["info", "warning"]), ("ERROR", [])])
def test_the_environment_says_what_is_logged(level: str | None, shown: list[str]) -> None:
    done = logging_command(level)
    assert done.returncode == 0
    assert done.stderr.splitlines() == [f"{word.upper()} diloco.peer.peer: of {word}" for word in shown]


@pytest.mark.slow(queued=False)
def test_a_level_that_there_is_not_is_refused() -> None:
    done = logging_command("loud")
    assert done.returncode == 2
    fix = "use one of DEBUG, INFO, WARNING, ERROR, or unset it"
    assert done.stderr.startswith(f"error: DILOCO_LOG is 'LOUD'\n  fix: {fix}\n")


def logging_command(level: str | None) -> subprocess.CompletedProcess[str]:
    """The entry point, with a command that logs a line of three levels."""
    environment = {name: value for name, value in os.environ.items() if name != "DILOCO_LOG"}
    environment |= {"DILOCO_LOG": level} if level else {}
    program = "import logging; from diloco.cli import main as cli; say = logging.getLogger('diloco.peer.peer'); "
    program += (
        "cli.app = lambda *_, **__: [getattr(say, name)('of ' + name) for name in ('debug', 'info', 'warning')]; "
    )
    command = [sys.executable, "-c", program + "cli.run()"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


@pytest.mark.parametrize("system", ["darwin", "win32", "linux"])
def test_elsewhere_one_line_says_what_works(
    system: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("sys.argv", ["diloco", "--version"])
    with pytest.raises(SystemExit):
        cli.run()
    assert len(capsys.readouterr().err.splitlines()) == (system != "linux")
