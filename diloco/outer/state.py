"""The outer state: anchor and slots of each fragment, its parts, hashes and digest; and the interface of optimizers."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from diloco.base.errors import StateError
from diloco.base.hashing import content_hash
from diloco.base.memory import empty_as
from diloco.compress.codec import magnitude
from diloco.outer.fragments import Fragment, Layout

ELEMENT_BYTES = torch.float32.itemsize
COPIED_AT_ONCE_BYTES = 2**20
TILE_ELEMENTS = 2**17
"""512 KiB of fp32: temporaries of this size stay in a core's cache and in the allocator. Whole ones are as large as the
fragment, and the kernel hands out, and clears, each of their pages: half of the time of an outer step."""


@dataclass(frozen=True, eq=False)
class FragmentState:
    """Outer state of one fragment: flat fp32 host tensors of the fragment's length."""

    anchor: Tensor
    slots: Mapping[str, Tensor]
    """The outer optimizer's own buffers by name."""
    steps: int
    """Outer steps taken."""
    fragment: Fragment | None = None
    """The fragment, whose parts are hashed and sent to a joiner one by one; None: all is one part."""

    def buffers(self) -> dict[str, Tensor]:
        """Buffers of a fragment's outer state: the anchor, then the outer optimizer's slots by name."""
        return {"anchor": self.anchor, **{name: self.slots[name] for name in sorted(self.slots)}}

    @property
    def cuts(self) -> Mapping[int, tuple[int, int]]:
        """Bounds, in elements, of the parts of this outer state that are held here."""
        return self.fragment.cuts if self.fragment is not None else {0: (0, self.anchor.numel())}

    @cached_property
    def hashes(self) -> dict[str, list[str]]:
        """Hash of each part of each buffer of a fragment's outer state. A version rehashes only the fragment it moved.

        Where several ranks hold the parts, `keep_hashes` must have set them.
        """
        assert self.fragment is None or self.fragment.lanes == 1
        return {name: list(hashes.values()) for name, hashes in self.own_hashes.items()}

    @cached_property
    def own_hashes(self) -> dict[str, dict[int, str]]:
        """Hashes of the parts of this outer state that are held here, by buffer and by number."""
        return {
            name: {part: part_hash(buffer, *bounds) for part, bounds in self.cuts.items()}
            for name, buffer in self.buffers().items()
        }

    @cached_property
    def largest(self) -> float:
        """Largest absolute value of the anchor in this outer state, by `magnitude`."""
        return magnitude(self.anchor)

    def keep(self, own_hashes: dict[str, dict[int, str]], largest: float) -> None:
        """Set `own_hashes` and `largest` of an outer state, found while its buffers were still in a CPU's cache."""
        vars(self).update(own_hashes=own_hashes, largest=largest)

    def keep_hashes(self, hashes: dict[str, list[str]]) -> None:
        """Set `hashes` of a fragment's outer state to those from the ranks that hold its parts."""
        vars(self)["hashes"] = hashes

    def unfilled(self) -> FragmentState:
        """An outer state with buffers of the same sizes, which hold nothing yet."""
        slots = {name: empty_as(slot) for name, slot in self.slots.items()}
        return FragmentState(empty_as(self.anchor), slots, self.steps, self.fragment)

    def part(self, start: int, stop: int) -> FragmentState:
        """A view of this outer state's elements from `start` to `stop`."""
        slots = {name: slot[start:stop] for name, slot in self.slots.items()}
        return FragmentState(self.anchor[start:stop], slots, self.steps)


@dataclass(frozen=True, slots=True)
class StateChunk:
    """One part of a buffer of the outer state: an entry of its manifest."""

    buffer: str
    part: int
    digest: str
    """`content_hash`, hexadecimal."""


@dataclass(frozen=True, eq=False)
class OuterState:
    """Anchor and outer optimizer state of the whole model at one version: all that a joiner must copy."""

    version: int
    fragments: tuple[FragmentState, ...]

    def replace(self, index: int, state: FragmentState, version: int) -> OuterState:
        """The outer state with one fragment replaced; the others are shared."""
        return OuterState(version, (*self.fragments[:index], state, *self.fragments[index + 1 :]))

    def buffers(self) -> list[tuple[str, Tensor]]:
        """Buffers of the outer state by name ("0/anchor", "0/momentum", "1/anchor", ...) in canonical order."""
        return [
            (f"{index}/{name}", buffer)
            for index, fragment in enumerate(self.fragments)
            for name, buffer in fragment.buffers().items()
        ]

    def manifest(self) -> tuple[StateChunk, ...]:
        """Manifest of the outer state: every part of every buffer, in order, with its hash."""
        hashes = [hashes for fragment in self.fragments for hashes in fragment.hashes.values()]
        return tuple(
            StateChunk(name, part, digest)
            for (name, _), of_buffer in zip(self.buffers(), hashes, strict=True)
            for part, digest in enumerate(of_buffer)
        )

    @cached_property
    def digest(self) -> str:
        """`manifest_digest` of this outer state (`Commit.state_digest`)."""
        return manifest_digest(self.manifest(), [fragment.steps for fragment in self.fragments])

    def chunk(self, entry: StateChunk) -> bytes:
        """Bytes of one part of a buffer of the outer state. Raises ValueError when it is not held here."""
        index, _, name = entry.buffer.partition("/")
        fragment = self.fragments[int(index)] if index.isdecimal() and int(index) < len(self.fragments) else None
        buffer = fragment.buffers().get(name) if fragment is not None else None
        if fragment is None or buffer is None or entry.part not in fragment.cuts:
            raise ValueError(f"no part {entry.part} of a buffer {entry.buffer!r}"[:200])
        start, stop = fragment.cuts[entry.part]
        return bytes(memory_of(buffer[start:stop]))

    @staticmethod
    def assemble(
        version: int,
        steps: Sequence[int],
        buffers: Mapping[str, bytes | bytearray],
        layout: Layout,
        optimizer: OuterOptimizer,
    ) -> OuterState:
        """The outer state whose `buffers()` have these bytes. A bytearray is taken over, not copied.

        `steps`: outer steps of each fragment. Raises StateError unless names and sizes are those of layout and
        optimizer. The content is checked by comparing `digest`.
        """
        expected = buffer_bytes(layout, optimizer)
        got = {name: len(data) for name, data in buffers.items()}
        if got != expected or len(steps) != len(layout.fragments) or min(steps) < 0:
            raise StateError("the outer state received does not fit the model", "is it from a run of this contract?")
        writable = {name: data if isinstance(data, bytearray) else bytearray(data) for name, data in buffers.items()}
        # A rank holds nothing of a fragment that has fewer parts than its island has ranks.
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        tensors = {
            name: torch.frombuffer(data, dtype=torch.float32) if data else nothing for name, data in writable.items()
        }
        fragments = []
        for fragment, count in zip(layout.fragments, steps, strict=True):
            slots = {name: tensors[f"{fragment.index}/{name}"] for name in optimizer.slot_names}
            fragments.append(FragmentState(tensors[f"{fragment.index}/anchor"], slots, count, fragment))
        return OuterState(version, tuple(fragments))


def tiles(elements: int) -> Iterator[slice]:
    """Slices that cut a flat buffer of the outer state into tiles of `TILE_ELEMENTS`."""
    return (slice(start, min(start + TILE_ELEMENTS, elements)) for start in range(0, elements, TILE_ELEMENTS))


def buffer_bytes(layout: Layout, optimizer: OuterOptimizer) -> dict[str, int]:
    """Name and size in bytes of every buffer of an outer state, in canonical order."""
    return {name: fragment.elements * ELEMENT_BYTES for name, fragment in _buffers(layout, optimizer)}


def places(layout: Layout, optimizer: OuterOptimizer) -> list[tuple[str, int]]:
    """Buffer and part of every `StateChunk` of an outer state, in order."""
    return [(name, part) for name, fragment in _buffers(layout, optimizer) for part in range(fragment.parts)]


def _buffers(layout: Layout, optimizer: OuterOptimizer) -> list[tuple[str, Fragment]]:
    """Name and fragment of every buffer of an outer state, in canonical order."""
    names = ("anchor", *sorted(optimizer.slot_names))
    return [(f"{fragment.index}/{name}", fragment) for fragment in layout.fragments for name in names]


def part_bytes(layout: Layout, buffer: str, part: int) -> int:
    """Size in bytes of one part of a buffer of the outer state."""
    return layout.fragments[int(buffer.partition("/")[0])].size_of(part) * ELEMENT_BYTES


def state_bytes(layout: Layout, optimizer: OuterOptimizer) -> int:
    """Size in bytes of an outer state, all buffers."""
    return sum(buffer_bytes(layout, optimizer).values())


def part_hash(buffer: Tensor, start: int, stop: int) -> str:
    """`content_hash`, hexadecimal, of elements `start` to `stop` of a buffer of the outer state."""
    return content_hash(memory_of(buffer[start:stop])).hex()


def manifest_digest(manifest: Sequence[StateChunk], steps: Sequence[int]) -> str:
    """SHA-256, hexadecimal, of an outer state's steps and manifest: a joiner checks a manifest before it downloads."""
    lines = ["steps " + " ".join(map(str, steps))]
    lines += [f"{chunk.buffer} {chunk.part} {chunk.digest}" for chunk in manifest]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def memory_of(buffer: Tensor) -> memoryview:
    """Bytes of a flat host tensor of the outer state, where they are."""
    return buffer.numpy().data.cast("B")


def copied_bytes(buffer: Tensor) -> bytearray:
    """Copy of the bytes of a flat host tensor of the outer state, made in pieces, between which other threads run: a
    copy of a GB in one piece holds Python's lock for a second."""
    memory = memory_of(buffer)
    copy = bytearray(len(memory))
    for start in range(0, len(memory), COPIED_AT_ONCE_BYTES):
        copy[start : start + COPIED_AT_ONCE_BYTES] = memory[start : start + COPIED_AT_ONCE_BYTES]
    return copy


class OuterOptimizer(ABC):
    """Outer optimizer: a pure function from a fragment's outer state and a mean pseudo-gradient to its next state."""

    @property
    @abstractmethod
    def slot_names(self) -> tuple[str, ...]:
        """Names of the buffers that this outer optimizer keeps beside the anchor."""

    def start(self, anchor: Tensor, fragment: Fragment | None = None) -> FragmentState:
        """The outer state before the first outer step: `anchor` (flat fp32, which is taken over) and zero slots."""
        return FragmentState(anchor, {name: torch.zeros_like(anchor) for name in self.slot_names}, 0, fragment)

    def step(
        self, state: FragmentState, mean: Tensor, into: FragmentState | None = None, share: float = 1.0
    ) -> FragmentState:
        """The outer state after descending `mean`, the flat fp32 mean of pseudo-gradients.

        Its buffers are those of `into`, which are overwritten and may be those of `state`, or new ones. `share`, above
        0 and at most 1: how much of a step this is (`diloco.outer.line.Weighing`). SGD and Nesterov only
        (`OuterSection.partial`) know of others than 1.
        """
        after = into or state.unfilled()
        self.fill(after, state, mean, share)
        return replace(after, steps=state.steps + 1)

    @abstractmethod
    def fill(self, after: FragmentState, state: FragmentState, mean: Tensor, share: float) -> None:
        """Fill the buffers of `after` with those of the outer state after the step. They may be those of `state`."""
