"""Files, folders, contracts and answers of others do no harm; secrets stay where they are."""

from __future__ import annotations

import ast
import json
import os
import stat
from enum import IntEnum
from pathlib import Path

import pytest
import torch

from diloco.base.errors import ConfigError, DilocoError, IncompatibleError, UsageError
from diloco.base.files import make_folders
from diloco.base.types import Closed, Commit
from diloco.cli import main, peer
from diloco.cli.options import show
from diloco.config.contract import Contract, ModelSection
from diloco.config.load import load_contract, load_site
from diloco.config.site import Site
from diloco.identity.keys import keys_of, secret_from_environment, without_secret
from diloco.inner.loop import next_token_loss
from diloco.inner.rank_model import RankModel
from diloco.island import Island
from diloco.island.plain import packed, unpacked
from diloco.models import build_model, count_parameters, logit_rows
from diloco.plan.model import activation_bytes, check_size
from diloco.protocol import messages as m
from diloco.run.operate import status_of
from scripts.attacks import files
from scripts.attacks.victims import Attack
from scripts.bench.smalls import commit_of

LONG = [one for one in files.ATTACKS if one.name.startswith(("hostile", "secrets", "launcher"))]
SHORT = [one for one in files.ATTACKS if one.short and one not in LONG]
ROOT = Path(__file__).resolve().parent.parent


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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_takes_at_least_the_memory_for_which_it_may_be_refused(precision: str) -> None:
    changes = ("inner.batch_size=2", "data.sequence_length=64", f"inner.precision={precision}")
    contract = load_contract("quick", changes).value
    model = build_model(contract.model, 256, 0)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    block = torch.zeros(2, 65, dtype=torch.int64)
    bf16 = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), bf16:
        next_token_loss(model, block)
    assert 0.05 < activation_bytes(contract, 256, 1) / sum(kept.values()) <= 1
    assert activation_bytes(contract, 256, 4) == activation_bytes(contract, 256, 1) / 4


def test_the_limit_of_parameters_counts_the_embedding_of_the_data() -> None:
    contract, island = load_contract("quick").value, Island(0, 1, torch.device("cpu"))
    count = RankModel(contract, Site(), island).parameters
    RankModel(contract, load_site(None, [f"device.max_params={count}"]).value, island)
    with pytest.raises(ConfigError, match=f"has {count:,} parameters, .*; the limit here is {count - 1:,}"):
        RankModel(contract, load_site(None, [f"device.max_params={count - 1}"]).value, island)


def test_a_step_is_refused_by_its_size_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contract = load_contract("quick").value
    needed = activation_bytes(contract, 256, 1)
    monkeypatch.setattr("diloco.inner.rank_model.device_bytes", lambda _: needed)
    RankModel(contract, Site(), Island(0, 1, torch.device("cpu")))
    monkeypatch.setattr("diloco.inner.rank_model.device_bytes", lambda _: needed - 1)
    with pytest.raises(ConfigError, match=r"an inner step of run quick .* takes at least [\d.]+ kB; there are"):
        RankModel(contract, Site(), Island(0, 1, torch.device("cpu")))


def test_a_hugging_face_model_is_counted_before_it_is_made(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(files.LLAMA))
    section = ModelSection(kind="hf", hf_config="model")
    count = count_parameters(build_model(section, 256, 0, tmp_path))
    build_model(section, 256, 0, tmp_path, count)
    with pytest.raises(ConfigError, match=f"has {count:,} parameters, .*; the limit here is {count - 1:,}") as caught:
        build_model(section, 256, 0, tmp_path, count - 1)
    assert "--max-params" in caught.value.fix
    assert logit_rows(section, 100, tmp_path) == 256


# ---------------------------------------------------------------- bytes that are code

RUNS = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml", "code", "codeop"}
"""Modules whose functions run, or make any object of, what they read."""
OBJECTS = {"broadcast_object_list", "gather_object", "all_gather_object", "scatter_object_list", "recv_object_list"}
CALLS = OBJECTS | {"send_object_list", "rpc_sync", "rpc_async", "hub", "exec_module"}
"""Functions that unpickle what another process sends, or run a file's code."""
LOADS = {"torch", "np", "numpy"}
"""Owners of a `load` that unpickles."""
OWN_PIPE = {"diloco/transport/dht.py", "diloco/transport/dht_node.py"}
"""Files that `recv` objects: between a peer and the directory's process that it starts, over a pipe without a name."""


def test_nothing_unpickles_or_runs_what_it_reads() -> None:
    found, pipes = [], set()
    for path in sorted((ROOT / "diloco").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            words = []
            if isinstance(node, ast.Import):
                words = [one.name for one in node.names if one.name.partition(".")[0] in RUNS]
            elif isinstance(node, ast.ImportFrom):
                words = [one.name for one in node.names if one.name in CALLS or (node.module or "") in RUNS]
                words += ["load"] if node.module in LOADS and "load" in [one.name for one in node.names] else []
            elif isinstance(node, ast.Attribute):
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                words = [node.attr] if node.attr in CALLS or (node.attr == "load" and owner in LOADS) else []
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                words = [node.func.id] if node.func.id in ("eval", "exec") else []
            found += [f"{name}: {word}" for word in words]
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "recv":
                pipes |= set() if node.args else {name}  # with arguments: of a socket, or of torch.distributed
    assert found == ["diloco/wire/convert.py: exec"]  # of source that it writes from our own classes
    assert pipes == OWN_PIPE


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


def test_sizes_that_are_more_than_came_are_refused() -> None:
    """Thousands of pieces of 30 kB in a message of 56 kB took 60 MB."""
    blob, sizes = bytes(30_000), [30_000, -30_000] * 2000
    for lengths in ([*sizes, 30_000], [30_000, 1], [29_999]):
        body = json.dumps([["bytes", 0], lengths]).encode()
        with pytest.raises(ValueError, match="do not fit"):
            unpacked(len(body).to_bytes(8, "big") + body + blob)


# ---------------------------------------------------------------- the terminal


def test_answers_of_others_do_nothing_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show("\x1b]0;owned\x07\u202e\r\nnext")
    assert capsys.readouterr().out == "\\x1b]0;owned\\x07\\u202e\\r\nnext\n"


def test_a_status_that_makes_no_sense_is_an_error_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.run.operate.ask_status", lambda _: {"run": "\x1b]0;owned\x07"})
    with pytest.raises(DilocoError, match="cannot read"):
        peer.status("127.0.0.1:1")


def test_evicting_by_a_status_that_makes_no_sense_is_an_error_for_people() -> None:
    peers = '[{"peer": "a", "address": "a:1", "incarnation": "1", "in_view": true, "alive": true}]'
    whole = '{"run": "r", "contract_digest": "c", "lineage": "l", "answering": "a", "peers": %s}'
    for answer in ("", "[]", "{}", "[" * 10**5, whole % peers, whole % "3", (whole % "[]").replace("r", "\\ud800")):
        with pytest.raises(IncompatibleError, match="cannot read"):
            status_of("127.0.0.1:1", answer)
    assert status_of("127.0.0.1:1", whole % peers.replace('"1"', "1"))["run"] == "r"
