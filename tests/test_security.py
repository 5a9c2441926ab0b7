"""Files, folders, contracts and answers of others do no harm; secrets stay where they are."""

from __future__ import annotations

import os
import stat
from enum import IntEnum
from pathlib import Path

import pytest

from diloco.base.errors import ConfigError, DilocoError, UsageError
from diloco.base.files import make_folders
from diloco.base.types import Closed, Commit
from diloco.cli import main, peer
from diloco.cli.options import show
from diloco.config.contract import Contract
from diloco.config.load import load_contract
from diloco.identity.keys import keys_of, secret_from_environment, without_secret
from diloco.island.plain import packed, unpacked
from diloco.plan.model import check_size
from diloco.protocol import messages as m
from scripts.attacks import files
from scripts.attacks.victims import Attack
from scripts.bench.smalls import commit_of

SHORT = [one for one in files.ATTACKS if not one.name.startswith(("hostile", "secrets"))]
LONG = [one for one in files.ATTACKS if one not in SHORT]


@pytest.mark.parametrize("attack", SHORT, ids=lambda one: one.name)
def test_an_attack_without_a_run_is_held(attack: Attack, tmp_path: Path) -> None:
    attack.act(tmp_path)  # type: ignore[arg-type]


@pytest.mark.handmade_events
@pytest.mark.slow(queued=True)
@pytest.mark.parametrize("attack", LONG, ids=lambda one: one.name)
def test_an_attack_on_processes_is_held(attack: Attack, tmp_path: Path) -> None:
    attack.act(tmp_path)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the secret


def test_the_secret_may_be_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    path.write_text("a secret of the run\n")
    path.chmod(0o600)
    monkeypatch.delenv("DILOCO_SECRET", raising=False)
    monkeypatch.setenv("DILOCO_SECRET_FILE", str(path))
    assert secret_from_environment() == "a secret of the run"
    monkeypatch.setenv("DILOCO_SECRET", "another secret of it")
    with pytest.raises(UsageError, match="both set"):
        secret_from_environment()


@pytest.mark.parametrize(
    ("mode", "content", "cause"),
    [
        (0o640, b"a secret of the run", "others can read"),
        (0o604, b"a secret of the run", "others can read"),
        (0o600, b"guess me", "at least 16"),
        (0o600, b"", "at least 16"),
        (0o600, b"\xff" * 20, "no text"),
        (0o600, b"x" * 5000, "more than 4096 bytes"),
        (None, b"", "No such file"),
    ],
)
def test_a_file_that_keeps_no_secret_is_refused(
    mode: int | None, content: bytes, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret"
    if mode is not None:
        path.write_bytes(content)
        path.chmod(mode)
    monkeypatch.delenv("DILOCO_SECRET", raising=False)
    monkeypatch.setenv("DILOCO_SECRET_FILE", str(path))
    with pytest.raises(UsageError, match=cause) as caught:
        secret_from_environment()
    assert content.decode(errors="replace") not in str(caught.value) or not content
    assert caught.value.__suppress_context__ or caught.value.__context__ is None  # a traceback would show the bytes


def test_a_key_is_in_no_text_of_its_object() -> None:
    assert "PRIVATE" not in repr(keys_of("a secret of the run"))


def test_a_process_without_the_secret() -> None:
    given = {"DILOCO_SECRET": "s", "DILOCO_SECRET_FILE": "f", "PATH": "/bin"}
    assert without_secret(given) == {"PATH": "/bin"}


# ---------------------------------------------------------------- files


def test_the_folder_of_a_peer_is_its_users(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "run" / "peer"
    make_folders(folder, 0o700)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


# ---------------------------------------------------------------- contracts


def test_a_model_larger_than_this_peer_takes_is_refused_with_its_size() -> None:
    contract = load_contract("diloco-150m").value
    check_size(contract, 0, None)
    with pytest.raises(
        ConfigError, match=r"has [\d,]+ parameters, [\d.]+ MB in fp32; the limit here is 1,000,000"
    ) as one:
        check_size(contract, 0, 10**6)
    assert "--max-params" in one.value.fix


def test_a_peer_takes_the_limit_by_an_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DilocoError, match=r"device.max_params: Input should be"):
        peer.peer(Path("quick"), max_params="many", directory=tmp_path)


def test_memory_that_is_not_there_is_an_error_for_people(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 10 bytes.\nmore")

    monkeypatch.setattr(main, "app", ends)
    with pytest.raises(SystemExit) as ended:
        main.run()
    assert ended.value.code == 14
    assert "Traceback" not in capsys.readouterr().err


# ---------------------------------------------------------------- between the ranks of an island


class Strange(IntEnum):
    ONE = 1


def test_what_ranks_send_comes_back_as_it_was() -> None:
    commit: Commit = commit_of(3)
    for value in (
        None, True, -(2**70), 0.1, float("inf"), "é\ud800", b"\x00\xff", [], (), {1, 2}, {3: (b"a", [b""])},
        range(1, 9, 2), commit, Closed(commit, [b"one", b""]), m.Reply.STALE, (7, "seal", ((1, 2), "digest")),
    ):  # fmt: skip
        found = unpacked(packed(value))
        assert found == value
        assert type(found) is type(value)


@pytest.mark.parametrize("value", [object(), Strange.ONE, os.stat("/"), Contract])
def test_what_is_no_value_of_the_protocol_is_not_sent(value: object) -> None:
    if isinstance(value, tuple):  # a tuple by another name comes as one
        assert type(unpacked(packed(value))) is tuple
        return
    with pytest.raises(TypeError):
        packed(value)


@pytest.mark.parametrize(
    "text",
    [
        '["class","Path","/"]',
        '["class","Member"]',
        '["enum","Reply","no"]',
        '["bytes",0]',
        '["os.system","true"]',
        '["map",1]',
    ],
)
def test_bytes_of_others_are_refused(text: str) -> None:
    body = f"[{text},[]]".encode()
    for data in (len(body).to_bytes(8, "big") + body, body, b"", b"\x80\x04."):
        with pytest.raises(ValueError, match="not from a rank"):
            unpacked(data)


# ---------------------------------------------------------------- the terminal


def test_answers_of_others_do_nothing_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show("\x1b]0;owned\x07\u202e\r\nnext")
    assert capsys.readouterr().out == "\\x1b]0;owned\\x07\\u202e\\r\nnext\n"


def test_a_status_that_makes_no_sense_is_an_error_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.run.operate.ask_status", lambda _: {"run": "\x1b]0;owned\x07"})
    with pytest.raises(DilocoError, match="cannot read"):
        peer.status("127.0.0.1:1")
