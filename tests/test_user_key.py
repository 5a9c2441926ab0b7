"""A run on loopback without a secret lets in the user who founded it: by a key in that user's state folder."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from torch import nn

import diloco
from diloco.base.errors import DilocoError, ResourceError, TicketError, UsageError
from diloco.config.contract import Contract
from diloco.config.site import Site
from diloco.identity import user_key as keys_of_users
from diloco.identity.keys import FILE_VARIABLE, VARIABLE, keys_of
from diloco.identity.user_key import key_path, secrets_to_try, user_key
from diloco.run.door import asked_members
from diloco.run.operate import ask_status, evict_peer
from diloco.run.options import remembered_private
from diloco.run.past import PastRun
from diloco.run.run import Run
from diloco.transport.endpoint import Endpoint
from tests.test_joining import Nowhere

OPEN = Site.model_validate({"network": {"insecure": True}})
KEY = 64 * "a"


@pytest.fixture(autouse=True)
def _no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv(FILE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("diloco.transport.endpoint.Directory", Nowhere)
    monkeypatch.setattr(Endpoint, "open_directory", lambda endpoint, run, warn: None)


def contract(name: str = "keyed") -> Contract:
    return Contract.model_validate({"run": {"name": name, "total_tokens": 10**6}, "model": {"kind": "external"}})


def founded(name: str = "keyed", site: Site | None = None) -> Run:
    return diloco.found(contract(name), nn.Linear(4, 4), site=site or Site())


@pytest.fixture
def founder() -> Iterator[Run]:
    with closing(founded()) as run:
        yield run


def private(run: Run) -> bool:
    endpoint = run._leading.life.peer.endpoint
    assert isinstance(endpoint, Endpoint)
    return endpoint.private


# ---------------------------------------------------------------- the file


def test_a_key_is_made_once_and_for_its_user_alone() -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: user_key(), range(40)))
    assert found == {key_path().read_text().strip()}
    assert stat.S_IMODE(key_path().stat().st_mode) == 0o600
    assert stat.S_IMODE(key_path().parent.stat().st_mode) == 0o700
    assert os.listdir(key_path().parent) == ["key"]


def test_a_state_folder_that_is_not_absolute_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert key_path() == Path("/home/somebody/.local/state/diloco/key")


def write(text: str, mode: int = 0o600) -> None:
    key_path().parent.mkdir(parents=True)
    key_path().write_text(text)
    key_path().chmod(mode)


@pytest.mark.parametrize(
    ("text", "mode", "cause"),
    [
        (KEY, 0o644, "others can read or change"),
        (KEY, 0o620, "others can read or change"),
        ("", 0o600, "holds no key"),  # else it would be that of a run without a secret
        ("a passphrase of mine", 0o600, "holds no key"),
    ],
)
def test_a_file_that_is_no_key_of_this_user_alone_is_refused(text: str, mode: int, cause: str) -> None:
    write(text, mode)
    with pytest.raises(UsageError, match=cause) as caught:
        secrets_to_try(joins=False)
    assert "remove it" in caught.value.fix
    assert KEY not in str(caught.value)
    assert secrets_to_try() == ("",)  # a joiner's: as if there were none
    assert secrets_to_try(insecure=True, joins=False) == ("",)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a file away")
def test_a_key_that_another_user_put_there_is_refused() -> None:
    write(KEY)
    os.chown(key_path(), 65534, 65534)
    with pytest.raises(UsageError, match="owned by user 65534"):
        user_key()


def test_a_founder_that_cannot_have_a_key_learns_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "state").touch()
    with pytest.raises(ResourceError, match="Not a directory") as caught:
        founded()
    assert VARIABLE in caught.value.fix
    assert "--insecure" in caught.value.fix

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(keys_of_users, "key_path", homeless)
    with pytest.raises(ResourceError, match="home directory"):
        founded()
    with closing(founded(site=OPEN)) as run:
        assert not private(run)
        assert ask_status(run.address.partition("/")[0])["run"] == "keyed"


def test_a_full_disk_leaves_no_half_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    key_path().parent.mkdir(parents=True)
    monkeypatch.setattr(keys_of_users.os, "fsync", full)
    with pytest.raises(ResourceError, match="No space left"):
        user_key()
    assert os.listdir(key_path().parent) == []


def test_which_secrets_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    write(KEY)
    assert secrets_to_try() == secrets_to_try(joins=False) == (KEY, "")
    assert secrets_to_try(insecure=True) == ("", KEY)
    monkeypatch.setenv(VARIABLE, "seven otters cross a river")
    assert secrets_to_try() == secrets_to_try(insecure=True) == ("seven otters cross a river",)


# ---------------------------------------------------------------- runs


def test_this_user_joins_and_another_does_not(founder: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = founder.address.partition("/")[0]
    assert private(founder)
    with closing(diloco.join(founder.address, nn.Linear(4, 4))) as joiner:
        assert private(joiner)
        assert joiner.digest == founder.digest
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    for enter in (
        lambda: diloco.join(founder.address, nn.Linear(4, 4)),
        lambda: ask_status(address),
        lambda: evict_peer(address, "nobody"),
    ):
        with pytest.raises(TicketError, match=f"tried {key_path()}, and none") as refused:
            enter()
        assert VARIABLE in refused.value.fix
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "state" / "diloco" / "key"))  # as a container may
    assert ask_status(address)["run"] == "keyed"


def test_a_run_that_is_open_to_all_is_joined_without_saying_so(tmp_path: Path) -> None:
    """It is listed on loopback, too, and whoever joins it listens as it does."""
    with closing(founded(site=OPEN)) as run, closing(diloco.join(run.address, nn.Linear(4, 4))) as joiner:
        assert not private(joiner)
        address = joiner.address.partition("/")[0]
        assert len(ask_status(address)["peers"]) == 2
        with pytest.raises(UsageError, match="no peer named nobody"):
            evict_peer(address, "nobody")


def test_who_would_let_in_anybody_joins_a_run_with_a_key_as_it_is(founder: Run) -> None:
    with closing(diloco.join(founder.address, nn.Linear(4, 4), site=OPEN)) as joiner:
        assert private(joiner)


def test_a_run_that_had_a_key_is_not_asked_without_one(caplog: pytest.LogCaptureFixture) -> None:
    assert secrets_to_try() == (key := user_key(), "")
    assert secrets_to_try(private=True) == secrets_to_try(joins=False, private=True) == (key,)
    assert secrets_to_try(insecure=True, private=True) == ("", key)
    key_path().chmod(0o644)
    with pytest.raises(UsageError, match="others can read or change"):
        secrets_to_try(private=True)
    assert secrets_to_try() == ("",)  # and says so
    assert "others can read or change" in caplog.text


def test_where_files_have_one_name_only_a_key_is_made_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    assert user_key() == user_key()
    assert stat.S_IMODE(key_path().stat().st_mode) == 0o600
    assert os.listdir(key_path().parent) == ["key"]


@pytest.mark.parametrize("keyed", [True, False])
def test_who_resumes_a_run_with_a_key_joins_none_without(keyed: bool, tmp_path: Path) -> None:
    """Another user listens where a member was, with the same contract."""
    site = Site() if keyed else OPEN
    with closing(diloco.found(contract(), nn.Linear(4, 4), site=site, directory=tmp_path / "peer")):
        pass
    private = remembered_private(tmp_path / "peer")
    with closing(founded(site=OPEN)) as other, closing(Endpoint(Site(), private=private)) as endpoint:
        address, _, digest = other.address.partition("/")
        past = PastRun(tmp_path / "peer", 0, 0.0, digest, 0, (address,))
        assert (asked_members(past, endpoint) is None) == keyed
        assert endpoint.private == keyed


def test_the_key_is_that_of_the_run_that_was_meant(founder: Run) -> None:
    """The first of several addresses is of another run by now."""
    with closing(founded("other", OPEN)) as other, closing(Endpoint(Site())) as endpoint:
        digest = founder.address.partition("/")[2]
        with pytest.raises(DilocoError):
            endpoint.fetch_contract(f"{other.address.partition('/')[0]}/{digest}")
        assert endpoint.private  # who founds a run after that has the key, and not what the other one accepted
        endpoint.fetch_contract(f"{other.address.partition('/')[0]}/{digest},{founder.address}")
        assert endpoint.private
        endpoint.fetch_contract(other.address)
        assert not endpoint.private
        assert endpoint.runtime.link.keys == keys_of("")
