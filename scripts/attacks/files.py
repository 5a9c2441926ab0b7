"""Attacks by whoever gives a file, a folder or a contract, and by other users of the machine. Most need no run."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch

from diloco.base.errors import DilocoError
from diloco.config.contract import Contract, ModelSection
from diloco.config.load import contract_from_json, load_contract
from diloco.data import open_dataset
from diloco.identity.keys import keys_of
from diloco.island.connections import RankListener
from diloco.island.slices import Slice
from diloco.models import build_model
from diloco.run.options import remembered_root
from diloco.storage import checkpoint
from scripts.attacks.victims import Attack, NotHeld, Victims
from scripts.environment import our_code

SECRET = "the-secret-of-this-attack-7f3a9c"
COMMAND_S = 60.0
"""Longest that a command may take that refuses something."""
QUICK = "quick"


def checkpoint_path(folder: Path) -> str:
    """A checkpoint given to a person names a peer that is a path."""
    saved = _checkpoint(folder, "../../../escaped")
    here = folder / "here" / "inside"
    here.mkdir(parents=True)
    try:
        return _refused(here, "peer", "--resume", str(saved))
    except NotHeld as error:
        found = [str(path) for path in folder.rglob("escaped*")]
        raise NotHeld(f"written outside the run's folder: {found[0]}" if found else str(error)) from None


def contract_reads(folder: Path) -> str:
    """A contract names files outside the joiner's data folder."""
    root, outside = folder / "data", folder / "outside"
    for place in (root, outside):
        place.mkdir()
    config = {"model_type": "llama", "vocab_size": 256, "hidden_size": 8, "num_hidden_layers": 1,
              "num_attention_heads": 1, "intermediate_size": 8}  # fmt: skip
    (outside / "config.json").write_text(json.dumps(config))
    (outside / "text.txt").write_text("private " * 10_000)
    (root / "link").symlink_to(outside)
    (root / "linked").mkdir()
    (root / "linked" / "config.json").symlink_to(outside / "config.json")
    read, said = [], ""
    for name in ("../outside", str(outside), "link", "linked"):
        try:
            build_model(ModelSection(kind="hf", hf_config=name), 256, 0, root)
        except DilocoError as error:
            said = error.cause
        else:
            read.append(f"hf_config {name}")
    for name in ("../outside", str(outside), "link", "link/*.txt", "*/text.txt", "[.][.]/outside"):
        data = _quick().data.model_copy(update={"source": "text", "paths": (name,)})
        with suppress(DilocoError):
            open_dataset(data, root)
            read.append(f"data.paths {name}")
    if read:
        raise NotHeld(f"read outside data.root: {', '.join(read)}")
    return said.replace(str(folder), "")


def folder_reads(folder: Path) -> str:
    """A peer's folder given to a person says where the data is: anywhere on the machine."""
    given = folder / "given"
    given.mkdir()
    (given / "site.json").write_text(json.dumps({"data": {"root": str(folder)}}))
    if remembered_root(given) is not None:
        raise NotHeld(f"the data's folder is what the giver says: {remembered_root(given)}")
    return ""


SIZES: Sequence[dict[str, Any]] = (
    {"model.dim": 10**9, "model.heads": 1}, {"model.layers": 10**8}, {"model.vocab_size": 10**12},
    {"model.heads": 10**12, "model.dim": 2 * 10**12}, {"model.ffn_dim": 10**15}, {"model.experts": 10**9},
    {"model.experts": 4, "model.expert_dim": 8 * 10**12}, {"model.experts": 4, "model.shared_experts": 10**9},
    {"inner.batch_size": 10**12}, {"inner.accumulation": 10**12},
    {"inner.batch_size": 2**20, "inner.accumulation": 2**20},
    {"inner.steps": 10**12}, {"inner.most_steps": 10**18}, {"data.sequence_length": 10**12},
    {"eval.sequences": 10**12}, {"run.total_tokens": 10**30}, {"membership.start_peers": 10**9},
    {"membership.backlog_versions": 10**9}, {"sync.fragments": 10**8, "model.kind": "external", "inner.steps": 10**8},
    {"outer.buffer": 10**30}, {"codec.rank": 10**30}, {"data.paths": ["x" * 10**6]}, {"data.tokenizer": "x" * 10**6},
)  # fmt: skip
"""Keys of contracts that no machine can train."""


def contract_sizes(folder: Path) -> str:
    """A contract has sizes without bound."""
    taken = []
    for changes in SIZES:
        tree = json.loads(_quick().to_json())
        for name, value in changes.items():
            section, key = name.split(".")
            tree[section][key] = value
        with suppress(DilocoError):
            contract_from_json(json.dumps(tree))
            taken.append(next(iter(changes)))
    if taken:
        raise NotHeld(f"taken: {', '.join(taken)}")
    # Each key within its bounds, and together more than any machine has.
    large = ("model.layers=4000", "model.dim=65536", "model.heads=512")
    return _refused(folder, "peer", QUICK, *(word for change in large for word in ("--set", change)))


class Bomb:
    """It makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def island_pickle(folder: Path) -> str:
    """Somebody in an island's network has overheard its key, and calls rank 0 with a pickle."""
    key, mark = b"overheard", folder / "ran"
    listener = RankListener("127.0.0.1", key)
    with ThreadPoolExecutor(1) as pool:
        came = pool.submit(listener.accept_ranks, 1, 2.0)
        with Client(("127.0.0.1", listener.port), authkey=key) as caller:
            caller.send_bytes(pickle.dumps(Bomb(mark)))
            with suppress(EOFError, OSError):
                caller.recv_bytes()
        said = str(came.exception()).partition("\n")[0]
    if mark.exists():
        raise NotHeld("rank 0 ran what was in the pickle")
    return said


HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202e<script>alert(1)</script>\r"


def hostile_texts(folder: Path) -> str:
    """Files and answers of others hold control characters and markup wherever text may be."""
    victims_events = folder / "p0"
    victims_events.mkdir()
    stamp = {"t": 1.0, "time": 1.0, "peer": HOSTILE}
    lines: list[dict[str, object]] = [
        {"kind": "started", "run": HOSTILE, "total_tokens": 10, "parameters": 5, "device": HOSTILE, "codec": HOSTILE},
        {"kind": "view", "version": 1, "members": [HOSTILE], "joined": [HOSTILE],
         "left": [{"peer": HOSTILE, "reason": HOSTILE}]},
        {"kind": "version", "version": 1, "tokens": 5, "loss": 1.0, "own": True, "counted": [HOSTILE],
         "digest": HOSTILE, "state_digest": HOSTILE},
        {"kind": "skip", "version": 2, "reason": HOSTILE}, {"kind": "warning", "text": HOSTILE},
    ]  # fmt: skip
    (victims_events / "events.jsonl").write_text("".join(json.dumps({**stamp, **line}) + "\n" for line in lines))
    (victims_events / "ledger.jsonl").write_text(json.dumps({"state": HOSTILE}) + "\n" + HOSTILE + "\n")
    (victims_events / "contract.json").write_text(json.dumps({HOSTILE: {HOSTILE: HOSTILE}}))
    said = ""
    for command in (["report"], ["audit"], ["replay"], ["peer", "--resume"], ["status"], ["export"], ["eval"]):
        out = [str(folder / "out")] if command == ["export"] else []
        said += _command(folder, *command, str(victims_events), *out).stdout
    hostile = folder / f"{HOSTILE.replace('/', '|')}.toml"
    hostile.write_text(f"[run]\nname = {json.dumps(HOSTILE)}\n")
    said += _command(folder, "config", "show", str(hostile)).stdout
    said += _command(folder, "peer", "--join", HOSTILE.strip()).stdout
    if obeyed := [line for line in said.split("\n") if not line.isprintable()]:
        raise NotHeld(f"a terminal obeys: {obeyed[0]!r}")
    page = (victims_events / "report.html").read_text()
    if "<script>" in page or "\x1b" in page or "\u202e" in page:
        raise NotHeld("the report holds markup of others")
    return ""


def secrets_kept(folder: Path) -> str:
    """Another user of the machine looks for the secret in process lists, folders and logs, also after a crash."""
    with closing(Victims(folder, 2, secret=SECRET)) as victims:
        victims.start("judge", "--join", victims.ticket("p0"), words=("witness",))
        refused = _command(folder, "peer", "--join", victims.ticket("p0"), "--set", "timeouts.rpc_s=no")
        (folder / "refused.txt").write_text(refused.stdout)
        below = [pid for peer in victims.peers for pid in _descendants(peer.pid)]
        if not below:
            raise NotHeld("no directory was there to look at")
        _look_in_processes([*below, *(peer.pid for peer in victims.peers)], below)
        victims.peers[1].send(signal.SIGABRT)  # a crash: faulthandler or a core writes what it writes
        _command(folder, "report", str(folder))
        _look_in_files(folder)
        return f"{len(below)} processes of directories"


def _look_in_processes(pids: Sequence[int], without: Sequence[int]) -> None:
    """Raises NotHeld where the secret is in a command line, or in the environment of those `without` it."""
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            proc = Path(f"/proc/{pid}")
            name = (proc / "comm").read_text().strip()
            if SECRET.encode() in (proc / "cmdline").read_bytes():
                raise NotHeld(f"the secret is in the command line of {name}")
            if pid in without and SECRET.encode() in (proc / "environ").read_bytes():
                raise NotHeld(f"the secret is in the environment of {name}")


def _look_in_files(folder: Path) -> None:
    """Raises NotHeld where a file holds the secret or the key, or where others may read what a peer wrote."""
    wanted = [SECRET.encode(), *(line for line in keys_of(SECRET).private_key.splitlines()[1:-1])]
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # peers still run: older checkpoints go
            _look_in_file(path, path.relative_to(folder), wanted)


def _look_in_file(path: Path, name: Path, wanted: Sequence[bytes]) -> None:
    if path.is_file() and any(one in path.read_bytes() for one in wanted):
        raise NotHeld(f"the secret is in {name}")
    if name.parts[0] in ("p0", "p1", "judge") and not path.is_symlink() and path.stat().st_mode & 0o077:
        raise NotHeld(f"others may read {name}: {path.stat().st_mode & 0o777:03o}")


def _descendants(pid: int) -> list[int]:
    """Processes that a process started, and that those did."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [one for child in map(int, found) for one in (child, *_descendants(child))]


def _quick() -> Contract:
    return load_contract(QUICK).value


def _checkpoint(folder: Path, peer: str) -> Path:
    """A checkpoint whose hashes are right, as anybody can make one."""
    meta = {"peer": peer, "contract": _quick().to_json(), "commit": None}
    return checkpoint.save(folder / "given", 1, {"outer": [Slice.whole("0/anchor", torch.zeros(4))]}, meta, 1)


def _command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`diloco` with these arguments in a folder; output and errors together. Raises NotHeld where it does not end."""
    try:
        return subprocess.run(
            [sys.executable, "-m", "diloco", *arguments],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
            env={**os.environ, **our_code()}, check=False, timeout=COMMAND_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NotHeld(f"diloco {arguments[0]} does not end within {COMMAND_S:g} s") from None


def _refused(folder: Path, *arguments: str) -> str:
    """The error of a command, in one line. Raises NotHeld where there is none, or a traceback."""
    done = _command(folder, *arguments)
    found = re.search(r"^error: (.*)$", done.stdout, re.MULTILINE)
    if done.returncode == 0 or found is None or "Traceback" in done.stdout:
        raise NotHeld(f"exit code {done.returncode}: {done.stdout.strip()[-200:]!r}")
    return found[1].replace(str(folder), "")[:200]


ATTACKS = (
    Attack("checkpoint-path", "giver", checkpoint_path),
    Attack("folder-reads", "giver", folder_reads),
    Attack("contract-reads", "giver", contract_reads),
    Attack("contract-sizes", "giver", contract_sizes),
    Attack("hostile-texts", "giver", hostile_texts),
    Attack("island-pickle", "user", island_pickle),
    Attack("secrets-kept", "user", secrets_kept),
)
