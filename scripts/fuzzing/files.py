"""Targets: all files that a peer reads and that others may have made: of its folder, checkpoints, data."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import nn

from diloco.accounts import journal
from diloco.accounts.audit import audit, audit_text
from diloco.accounts.ledger import LEDGER, Opening, Position, Totals, open_ledger
from diloco.accounts.left_off import booked
from diloco.base.errors import DilocoError
from diloco.base.files import Disk, on_disk
from diloco.base.sealed import sealed_line
from diloco.base.types import Contribution
from diloco.config.contract import Contract, DataSection
from diloco.config.load import contract_of
from diloco.data.shards import HEADER_BYTES, ShardHeader, open_shards
from diloco.data.text import open_text
from diloco.exchange import log
from diloco.exchange.votes import VOTES, DiskVotes, past_votes
from diloco.island.slices import Pieces, Slice
from diloco.models import build_model
from diloco.outer.fragments import Fragment, Weights
from diloco.peer.terms import open_line
from diloco.protocol.effects import Save
from diloco.protocol.vote import VoteRecord
from diloco.run.past import checkpoint_at, past_of
from diloco.storage import checkpoint
from diloco.storage.saving import book_restored, restore_line, save_line
from diloco.storage.stateful import UserState
from scripts.fuzzing.messages import example_commit
from scripts.fuzzing.spoiling import spoiled_bytes, spoiled_json, spoiled_lines
from scripts.fuzzing.target import Target

HERE = Path()
REFUSALS = (DilocoError,)
CONTRACT: Contract = contract_of({
    "run": {"name": "fuzz", "total_tokens": 10**6}, "model": {"layers": 1, "dim": 16, "heads": 2},
    "sync": {"fragments": 1, "part_elements": 4096},
})  # fmt: skip


def targets() -> Iterator[Target]:
    """A target for every file, and one more behind its checksums."""
    logging.disable()  # readers warn of what they pass over
    for name, read, corpus, spoil in (
        ("ledger", _read_ledger, _ledger, spoiled_bytes),
        ("ledger-sealed", lambda data: _read_ledger(_sealed(data)), lambda: _unsealed(_ledger()), spoiled_lines),
        ("recording", _read_recording, _recording, spoiled_bytes),
        ("recording-sealed", _read_sealed_recording, lambda: [_recording()[0].partition(b" ")[2]], _spoiled_first_line),
        ("votes", _read_votes, _votes, spoiled_bytes),
        ("votes-sealed", lambda data: _read_votes(_sealed(data)), lambda: _unsealed(_votes()), spoiled_lines),
        ("log", _read_log, _log, spoiled_bytes),
        ("manifest", _read_manifest, _manifest, spoiled_json),
        ("tensors", _read_tensors, _tensors, _spoiled_tensors),
        ("user-state", _read_user_state, _user_state, spoiled_json),
        ("shard", _read_shard, _shard, spoiled_bytes),
        ("npy", _read_npy, _npy, spoiled_bytes),
        ("jsonl", partial(_read_text, "a.jsonl"), lambda: [b'{"text": "words"}\n' * 9], spoiled_lines),
        ("text", partial(_read_text, "a.txt"), lambda: ["größer\n".encode() * 9], spoiled_bytes),
    ):
        yield Target(f"file-{name}", read, corpus, REFUSALS, spoil, share=10, room_bytes=2**25)


class _NoSync(Disk):
    """A disk whose syncs cost nothing."""

    def sync(self, descriptor: int, path: Path) -> None:
        pass


def _sealed(data: bytes) -> bytes:
    """Lines of JSON as lines with checksums; others stay as they are."""
    lines = []
    for line in data.split(b"\n"):
        try:
            lines.append(sealed_line(json.loads(line)))
        except (ValueError, RecursionError):
            lines.append(line + b"\n" if line else b"")
    return b"".join(lines)


def _unsealed(files: list[bytes]) -> list[bytes]:
    return [b"\n".join(line.partition(b" ")[2] for line in data.splitlines()) for data in files]


# ---------------------------------------------------------------- ledger, recordings, votes, log


def _ledger() -> list[bytes]:
    """Ledgers of one life, with a record of each kind."""
    with on_disk(_NoSync()):
        ledger = open_ledger(HERE / "written", print)
        opening = Opening("a", 1, 2, "fuzz", CONTRACT.digest, "lineage", True, False)
        totals, position = Totals(5, 2, 1, 2), Position(0, "", "state")
        ledger.opened(opening, json.loads(CONTRACT.to_json()), position, totals)
        ledger.committed(example_commit(), "state", True, totals)
        ledger.adopted(position, "lineage", {"lineage": 3}, 1, 1, totals)
        ledger.discarded(1, 0, "why", totals)
        ledger.write("gap", {"dropped": 1}, totals)
        ledger.closed("done", totals)
        ledger.close()
    return [(HERE / "written" / LEDGER).read_bytes()]


def _read_ledger(data: bytes) -> None:
    """Audit a folder, resume from it, and go on with its ledger: all that reads one."""
    (HERE / LEDGER).write_bytes(data)
    booked(HERE)
    past_of(HERE)
    with on_disk(_NoSync()):
        open_ledger(HERE, lambda _: None).close()
    audit_text(audit([HERE]))


def _recording() -> list[bytes]:
    payloads = [b"a" * 10, b"b" * 20]
    contribution = Contribution(0, 1, 0, 1, 5, 2, payloads)
    fragment = Fragment(0, (), ((0, 200),), 100)
    with on_disk(_NoSync()):
        journal.Recorder(HERE / "written", "a", 1, 0, print).keep(contribution, fragment, "ab" * 32)
    return [next((HERE / "written").iterdir()).read_bytes()]


def _read_recording(data: bytes) -> None:
    folder = HERE / journal.RECORDED
    folder.mkdir(exist_ok=True)
    (folder / "v00000000.f0.abababab.000000000001.bin").write_bytes(data)
    for recording in journal.recordings(HERE):
        list(recording.payloads())


def _read_sealed_recording(data: bytes) -> None:
    line, end, parts = data.partition(b"\n")
    _read_recording(_sealed(line) + parts if end else _sealed(line))


def _spoiled_first_line(data: bytes, random: Random) -> bytes:
    line, end, rest = data.partition(b"\n")
    return spoiled_json(line, random) + end + rest


def _votes() -> list[bytes]:
    votes, commit = DiskVotes(HERE / "written", print, log.DiskUse()), example_commit()
    record = VoteRecord(commit.digest, attempt=1, value=commit.digest)
    votes._write(Save(1, 2, record, commit, commit))
    return [(HERE / "written" / VOTES).read_bytes()]


def _read_votes(data: bytes) -> None:
    (HERE / VOTES).write_bytes(data)
    past = past_votes(HERE)
    if past is not None:
        past.since(example_commit())


MEAN = "v00000001.1-1.r0.mean"


def _log() -> list[bytes]:
    file = log.MeanFile(HERE / "written" / MEAN, log.DiskUse())
    for part in range(3):
        file.put(part, bytes([part]) * 100)
    file.end("digest")
    return [file.path.read_bytes()]


def _read_log(data: bytes) -> None:
    """Read a file of means; frames get right seals, as far as they go."""
    path = HERE / log.LOG / MEAN
    path.parent.mkdir(exist_ok=True)
    raw, at = bytearray(data), 0
    while at + log._FRAME.size <= len(raw):
        part, size, _ = log._FRAME.unpack_from(raw, at)
        payload = bytes(raw[at + log._FRAME.size : at + log._FRAME.size + size])
        log._FRAME.pack_into(raw, at, part, size, log._seal(path, payload))
        at += log._FRAME.size + size
    path.write_bytes(raw)
    log.logged_mean(HERE, 0, 1, "digest", 3, range(3))


# ---------------------------------------------------------------- checkpoints


def _line() -> Any:
    return open_line("a", CONTRACT, Weights.of(build_model(CONTRACT.model, 64, 0)))


def _saved() -> Path:
    """A peer's checkpoint of version 1, with a commit."""
    line = _line()
    line.commit = example_commit()
    groups, about = save_line(line, CONTRACT)
    with on_disk(_NoSync()):
        return checkpoint.save(
            HERE / checkpoint.CHECKPOINTS, 1, groups, {**about, "others": ["a:1"], "forks": [["l", 3]]}, 9
        )


def _manifest() -> list[bytes]:
    tree = json.loads((_saved() / checkpoint.MANIFEST).read_bytes())
    del tree["digest"]
    return [json.dumps(tree).encode()]


def _read_manifest(data: bytes) -> None:
    """Load the checkpoint with this manifest, and take from it all that a resume, an export and an audit take."""
    try:
        tree = json.loads(data)
        tree["digest"] = checkpoint._digest(tree)
        data = checkpoint._encode(tree)
    except (ValueError, TypeError, RecursionError):
        pass
    (HERE / checkpoint.CHECKPOINTS / "v00000001" / checkpoint.MANIFEST).write_bytes(data)
    _use_checkpoint()


def _use_checkpoint() -> None:
    past_of(HERE)
    found = checkpoint_at(HERE)
    line = _line()
    restore_line(line, lambda: found)
    book_restored(line, found)
    _ = found.peer, found.contract, found.commit
    checkpoint.saved_state(found)


def _tensors() -> list[bytes]:
    return [(_saved() / "outer.safetensors").read_bytes()[:50_000]]


def _read_tensors(data: bytes) -> None:
    """Load the checkpoint with this file of tensors, of right size and hash."""
    folder = HERE / checkpoint.CHECKPOINTS / "v00000001"
    (folder / "outer.safetensors").write_bytes(data)
    tree = json.loads((folder / checkpoint.MANIFEST).read_bytes())
    del tree["digest"]
    tree["files"]["outer.safetensors"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / checkpoint.MANIFEST).write_bytes(checkpoint._encode({**tree, "digest": checkpoint._digest(tree)}))
    _use_checkpoint()


def _object(data: bytes) -> dict[str, Any]:
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _spoiled_tensors(data: bytes, random: Random) -> bytes:
    """Damage the header of a file of tensors, or what it says of slices."""
    if len(data) < 8 or (size := struct.unpack_from("<Q", data)[0]) > len(data) - 8:
        return spoiled_bytes(data, random)
    header, rest = data[8 : 8 + size], data[8 + size :]
    if random.random() < 0.5:
        header = spoiled_json(header, random)
    else:
        tree = _object(header)
        said = {"0/anchor": ["0/anchor", [100], [0]]}
        tree["__metadata__"] = {"slices": spoiled_json(json.dumps(said).encode(), random).decode(errors="replace")}
        header = json.dumps(tree).encode()
    return struct.pack("<Q", len(header)) + header + rest


class _Kept:
    """A user's object that takes any state."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": 3, "pair": (1, 2), "by": {1: "one"}, "tensor": torch.ones(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _user() -> tuple[UserState, list[Slice]]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = UserState({"optimizer": optimizer, "kept": _Kept()}, dict(model.named_parameters()), 0)
    return state, state.slices()


def _user_state() -> list[bytes]:
    return [bytes(one.local.numpy()) for one in _user()[1] if one.box.name == "0/json"]


def _read_user_state(data: bytes) -> None:
    state, slices = _user()
    kept = [one for one in slices if one.box.name != "0/json"]
    text = torch.frombuffer(bytearray(data or b" "), dtype=torch.uint8)
    state.load(Pieces.of([*kept, Slice.whole("0/json", text)]))


# ---------------------------------------------------------------- data


def _data(name: str, data: bytes) -> DataSection:
    folder = HERE / "data"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / name).write_bytes(data)
    return DataSection(source="shards", paths=(name,), sequence_length=4, holdout=0.5)


def _shard() -> list[bytes]:
    tokens = np.arange(64, dtype="<u2").tobytes()
    header = ShardHeader(2, 256, 64, hashlib.sha256(tokens).digest(), bytes(32))
    return [header.to_bytes() + tokens]


def _read_shard(data: bytes) -> None:
    """Open a shard with right checksums, and read all of it."""
    head, tokens = bytearray(data[:HEADER_BYTES]), data[HEADER_BYTES:]
    if len(head) == HEADER_BYTES:
        head[24:56] = hashlib.sha256(tokens).digest()
        head[88:92] = zlib.crc32(bytes(head[:88])).to_bytes(4, "little")
    _read_blocks(_data("a.bin", bytes(head) + tokens))


def _npy() -> list[bytes]:
    file = io.BytesIO()
    np.save(file, np.arange(64, dtype=np.uint16))
    return [file.getvalue()]


def _read_npy(data: bytes) -> None:
    _read_blocks(_data("a.npy", data))


def _read_blocks(section: DataSection, opened: Callable[[DataSection, Path], Any] = open_shards) -> None:
    dataset = opened(section, HERE / "data")
    dataset.read(range(min(dataset.blocks_per_epoch, 3)))
    dataset.heldout(3)


def _read_text(name: str, data: bytes) -> None:
    _read_blocks(_data(name, data), open_text)
