"""Attacks by whoever gives a file, a folder or a contract, and by other users of the machine. Most need no run.

An attack that is refused is held only if the refusal says the words that the attack expects: another error may be luck.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir, closing, contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any
from unittest import TestCase

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from diloco.base.errors import DilocoError
from diloco.config.contract import Contract, ModelSection
from diloco.config.load import contract_from_json, load_contract
from diloco.data import open_dataset
from diloco.exchange.votes import VOTES
from diloco.identity.keys import keys_of
from diloco.island.connections import RankListener
from diloco.island.slices import Slice
from diloco.models import build_model
from diloco.run.door import WRITTEN
from diloco.run.options import remembered_root
from diloco.storage import checkpoint
from diloco.storage.checkpoint import CHECKPOINTS
from scripts.attacks.victims import PACE, Attack, NotHeld, Victims
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
        return _refused(here, "is no name of a peer", "peer", "--resume", str(saved))
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
    for name in ("../outside", str(outside), "link", "linked"):
        with refused("goes through \\.\\.|leads out of the data folder", f"hf_config {name}"):
            build_model(ModelSection(kind="hf", hf_config=name), 256, 0, root)
    for name in ("../outside", str(outside), "link", "link/*.txt", "*/text.txt", "[.][.]/outside"):
        data = _quick().data.model_copy(update={"source": "text", "paths": (name,)})
        with refused("goes through \\.\\.|leads out of the data folder|nothing matches", f"data.paths {name}"):
            open_dataset(data, root)
    return "leads out of the data folder"


def folder_reads(folder: Path) -> str:
    """A peer's folder given to a person says where the data is: anywhere on the machine."""
    where = {"data": {"root": str(folder)}}
    _not_remembered(_given(folder, "copied")[0], where, "was copied or restored")
    # Others of this machine need not copy: whoever makes the folder where it is resumed knows its inode.
    given, number = _given(folder, "open")
    given.chmod(0o777)
    _not_remembered(given, {**where, "folder": number}, "may be written by others")
    if os.getuid() == 0:  # nobody else can give a file away
        for name in ("site.json", "."):
            given, number = _given(folder, f"given away {name}")
            (given / "site.json").touch()
            os.chown(given / name, 65534, -1)
            _not_remembered(given, {**where, "folder": number}, "may be written by others")
    return "may be written by others"


def _given(folder: Path, name: str) -> tuple[Path, int]:
    """A new folder, of this user alone, and its inode."""
    given = folder / name
    given.mkdir(mode=0o700)
    return given, given.stat().st_ino


def _not_remembered(given: Path, card: dict[str, Any], words: str) -> None:
    """Raises NotHeld where a folder with that card names the data's folder, or is passed over without these words."""
    (given / "site.json").write_text(json.dumps(card))
    with logged("diloco.run.options", words):
        if (root := remembered_root(given)) is not None:
            raise NotHeld(f"the data's folder is what the giver says: {root}")


SIZES: Sequence[dict[str, Any]] = (
    {"model.dim": 10**9, "model.heads": 1}, {"model.layers": 10**8}, {"model.vocab_size": 10**12},
    {"model.dim": 2 * 10**12, "model.heads": 10**12}, {"model.ffn_dim": 10**15}, {"model.experts": 10**9},
    {"model.expert_dim": 8 * 10**12, "model.experts": 4}, {"model.shared_experts": 10**9, "model.experts": 4},
    {"inner.batch_size": 10**12}, {"inner.accumulation": 10**12},
    {"inner.steps": 10**12}, {"inner.most_steps": 10**18}, {"data.sequence_length": 10**12},
    {"eval.sequences": 10**12}, {"run.total_tokens": 10**30}, {"membership.start_peers": 10**9},
    {"membership.backlog_versions": 10**9}, {"sync.fragments": 10**8, "model.kind": "external"},
    {"outer.buffer": 10**30}, {"codec.rank": 10**30}, {"data.paths": ["x" * 10**6]}, {"data.tokenizer": "x" * 10**6},
)  # fmt: skip
"""Keys of contracts that no machine can train; the first of each is refused."""
BOUND = r"(\.0)?: (Input should be less than or equal to|String should have at most)"


def contract_sizes(folder: Path) -> str:
    """A contract has sizes without bound."""
    for changes in SIZES:
        with refused(re.escape(next(iter(changes))) + BOUND, next(iter(changes))):
            contract_from_json(_changed(changes))
    with refused("an inner step of [0-9]+ sequences has [0-9]+ tokens, at most", "tokens of a step"):
        contract_from_json(_changed(dict.fromkeys(("inner.batch_size", "inner.accumulation"), 2**20)))
    # Each key within its bounds, and together more than any machine has.
    large = ("model.layers=4000", "model.dim=65536", "model.heads=512")
    return _refused(folder, "parameters, .* in fp32; the limit here is", "peer", QUICK, *_sets(*large))


def first_step(folder: Path) -> str:
    """A contract whose model is small asks for a first step that needs more memory than there is."""
    large = ("inner.batch_size=131072", "data.sequence_length=2048", "inner.steps=1")
    return _refused(folder, "an inner step of run .* takes at least .*; there are", "peer", QUICK, *_sets(*large))


LLAMA = {"model_type": "llama", "vocab_size": 256, "hidden_size": 8, "num_hidden_layers": 1,
         "num_attention_heads": 1, "intermediate_size": 8}  # fmt: skip
GPTJ = {"model_type": "gptj", "vocab_size": 256, "n_embd": 64, "n_layer": 1, "n_head": 1, "rotary_dim": 64}


def hf_config(folder: Path) -> str:
    """A contract names a Hugging Face config, given with it, of a model without bound, or of one that is code."""
    _hf_refused(folder, LLAMA | {"hidden_size": 2**16, "num_hidden_layers": 80}, "parameters, .*; the limit here is")
    _hf_refused(
        folder, LLAMA | {"vocab_size": 10**6}, "parameters, .*; the limit here is 1,000,000, which is set", 10**6
    )
    _hf_refused(folder, GPTJ | {"n_positions": 2**33}, "in buffers alone, takes at least")
    layers = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 10**10}
    _hf_refused(folder, LLAMA | layers, "it has more than [0-9,]+ tensors")
    for key in ("attn_implementation", "_attn_implementation_internal", "experts_implementation"):
        _hf_refused(folder, LLAMA | {key: "kernels-community/flash-attn2"}, "is code to fetch")
    return "parameters; buffers; layers; code to fetch"


def hf_layers(folder: Path) -> str:
    """A contract names a Hugging Face config of very many layers, each of which takes nothing."""
    _hf_refused(folder, LLAMA | {"num_hidden_layers": 10**5}, "it has more than [0-9,]+ tensors")
    return "it has more tensors"


def _hf_refused(folder: Path, config: dict[str, Any], words: str, max_params: int | None = None) -> None:
    """Raises NotHeld where the model of a config is built, or refused in other words."""
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(config))
    with refused(words, json.dumps(config)):
        build_model(ModelSection(kind="hf", hf_config="model"), 256, 0, folder, max_params)


def _changed(changes: dict[str, Any]) -> str:
    """The JSON of a contract with other values."""
    tree = json.loads(_quick().to_json())
    for name, value in changes.items():
        section, key = name.split(".")
        tree[section][key] = value
    return json.dumps(tree)


def _sets(*changes: str) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


class Bomb:
    """It makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def island_pickle(folder: Path) -> str:
    """Somebody in an island's network has overheard its key, and calls rank 0 with a pickle."""
    key, mark = b"overheard", Path("ran")  # a longer name would be refused for its length
    listener = RankListener("127.0.0.1", key)
    with (
        chdir(folder),
        ThreadPoolExecutor(1) as pool,
        logged("diloco.island.connections", "not from a rank of this island"),
    ):
        came = pool.submit(listener.accept_ranks, 1, 2.0)
        with Client(("127.0.0.1", listener.port), authkey=key) as caller:
            caller.send_bytes(pickle.dumps(Bomb(mark)))
            with suppress(EOFError, OSError):
                caller.recv_bytes()
        said = str(came.exception()).partition("\n")[0]
    if (folder / mark).exists():
        raise NotHeld("rank 0 ran what was in the pickle")
    return said


LAUNCHER = """
from diloco.island.elastic import run_once
run_once(1, "timeit", ["-n1", "-r1", "import time; time.sleep(90)"], 1)
"""
HEARTBEATS_S = 12.0
"""Longer than between two looks of torch's launcher at the state of its ranks, 5 s."""


def launcher_pickle(folder: Path) -> str:
    """Somebody who reaches the port of the launcher of an island's ranks puts a pickle in the place of its state."""
    mark, reached = folder / "ran", 0
    bomb = base64.b64encode(pickle.dumps(Bomb(mark))).decode()
    process = subprocess.Popen([sys.executable, "-c", LAUNCHER], env={**os.environ, **our_code()})
    try:
        deadline_s = time.monotonic() + COMMAND_S
        while not (ports := _ports(process.pid)) and process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.1)
        end_s = time.monotonic() + HEARTBEATS_S
        while time.monotonic() < end_s and not mark.exists():
            for port in _ports(process.pid):
                with suppress(RuntimeError):
                    store = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=5))
                    reached += 1
                    for key in store.list_keys():
                        store.set(key, bomb)
            time.sleep(0.5)
        if process.poll() is not None or not reached:
            raise NotHeld(f"no launcher was reached on ports {ports}: exit code {process.poll()}")
    finally:
        process.terminate()
        process.wait()
    if mark.exists():
        raise NotHeld("the launcher ran what was in the pickle")
    return f"reached {reached} times, and nothing was unpickled"


def _ports(pid: int) -> list[int]:
    """TCP ports on which a process listens."""
    links = [os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir() if one.is_symlink()]
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()
    ]
    return sorted(
        {
            int(line[1].rpartition(":")[2], 16)
            for line in lines[1:]
            if line[3] == "0A" and f"socket:[{line[9]}]" in links
        }
    )


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


def folder_links(folder: Path) -> str:
    """All entries of a folder given to a person are links, to where another run of that person writes."""
    mine, given = folder / "mine", folder / "linked"
    mine.mkdir()
    given.mkdir()
    _checkpoint(folder, "p0").parent.rename(mine / CHECKPOINTS)
    for name in (*WRITTEN, "report.html", "plot.png", "site.new", ".votes.tmp"):
        if "." in name or name == VOTES:
            (mine / name).write_text('{"kind": "started", "data": {"root": "."}}')  # as a line it has no end
        elif name != CHECKPOINTS:
            (mine / name / "inside").mkdir(parents=True)
        (given / name).symlink_to(mine / name)
    before = _contents(mine)
    commands: list[tuple[str, ...]] = [("export", str(given), "out")]
    commands += [(name, str(given)) for name in ("report", "audit", "replay", "status", "eval")]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda words: _command(folder, *words), commands))
    _unchanged(mine, before)
    if (given / "report.html").is_symlink():
        raise NotHeld("no report was written")
    said = _refused(folder, "is a symbolic link", "peer", "--resume", str(given))
    _unchanged(mine, before)
    return said


def _contents(folder: Path) -> dict[Path, bytes | None]:
    """All that is in a folder, with the bytes of its files."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def _unchanged(folder: Path, before: dict[Path, bytes | None]) -> None:
    """Raises NotHeld where a folder has other contents than before."""
    if changed := {path.relative_to(folder) for path, _ in before.items() ^ _contents(folder).items()}:
        raise NotHeld(f"written through links: {', '.join(map(str, sorted(changed)))}")


def secrets_kept(folder: Path) -> str:
    """Another user of the machine looks for the secret in process lists, folders and logs, also after a crash."""
    with closing(Victims(folder, 2, PACE, secret=SECRET)) as victims:
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


@contextmanager
def refused(words: str, what: str) -> Iterator[None]:
    """Raises NotHeld unless what is done inside is refused with these words, a regular expression, in the cause."""
    try:
        yield
    except DilocoError as error:
        if not re.search(words, error.cause):
            raise NotHeld(f"{what} is refused for another reason: {error.cause[:200]}") from None
    else:
        raise NotHeld(f"taken: {what}")


@contextmanager
def logged(name: str, words: str) -> Iterator[None]:
    """Raises NotHeld unless the logger of that name says these words inside."""
    try:
        with TestCase().assertLogs(name) as logs:
            yield
    except AssertionError:
        raise NotHeld(f"nobody says {words!r}") from None
    if words not in "".join(logs.output):
        raise NotHeld(f"{name} says other words than {words!r}: {logs.output}")


def _refused(folder: Path, words: str, *arguments: str) -> str:
    """The error of a command, in one line. Raises NotHeld where there is none with these words, or a traceback."""
    done = _command(folder, *arguments)
    found = re.search(r"^error: (.*)$", done.stdout, re.MULTILINE)
    if done.returncode == 0 or found is None or "Traceback" in done.stdout:
        raise NotHeld(f"exit code {done.returncode}: {done.stdout.strip()[-200:]!r}")
    if not re.search(words, found[1]):
        raise NotHeld(f"refused for another reason: {found[1][:200]}")
    return found[1].replace(str(folder), "")[:200]


ATTACKS = (
    Attack("checkpoint-path", "giver", checkpoint_path),
    Attack("folder-reads", "giver", folder_reads),
    Attack("folder-links", "giver", folder_links, short=False),
    Attack("contract-reads", "giver", contract_reads),
    Attack("contract-sizes", "giver", contract_sizes),
    Attack("first-step", "giver", first_step),
    Attack("hf-config", "giver", hf_config),
    Attack("hf-layers", "giver", hf_layers, short=False),
    Attack("hostile-texts", "giver", hostile_texts),
    Attack("island-pickle", "user", island_pickle),
    Attack("launcher-pickle", "outsider", launcher_pickle),
    Attack("secrets-kept", "user", secrets_kept),
)
