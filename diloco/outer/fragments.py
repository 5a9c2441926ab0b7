"""The canonical layout of a model: its parameters cut into fragments by layer, and fragments into parts; its weights.

It depends on names and shapes only, so islands with different meshes, devices and dtypes agree on it. A
*fragment* is synchronised on its own; a *part* of one has one owner in the reduction. (Streaming DiLoCo, arXiv
2501.18512: layer i goes to fragment i mod P, "strided", which beats consecutive layers.) Parameters with a codec of
their own are a *group*, and a part has parameters of one group only: one part, one codec.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from functools import cached_property, partial
from itertools import accumulate

import torch
from torch import Tensor, nn

from diloco.base.errors import ConfigError
from diloco.base.memory import empty_as, floats
from diloco.compress.codec import magnitude
from diloco.config.contract import Contract

PARTS_PER_FRAGMENT = 64
"""Aimed at when no part size is given: enough for owners in proportion to bandwidth, each part a good message."""
MIN_PART_ELEMENTS = 2**12
MAX_PART_ELEMENTS = 2**20

_LAYER = re.compile(r"(?:.*?\.)?\d+(?=\.)")
"""A name up to its first number, which is an index of a module list: `blocks.3` of `blocks.3.attention.q.weight`."""
_WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.")
"""Parts that `torch.compile` and activation checkpointing put into names. Both are a peer's own business."""
_HOLD_FP32 = (torch.float32, torch.float64)
"""Dtypes of parameters to which fp32 is not rounded."""

NamedShapes = Sequence[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class ParameterEntry:
    """One parameter in a fragment's flat buffer."""

    name: str
    shape: tuple[int, ...]
    offset: int
    """Place of its first element in the buffer, in elements."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Spot:
    """A piece of a parameter in a fragment's flat buffer."""

    name: str
    start: int
    """Its first element in the parameter, flattened."""
    stop: int
    offset: int
    """The place of its first element in the buffer."""

    @property
    def elements(self) -> int:
        return self.stop - self.start

    @property
    def end(self) -> int:
        """Place behind the last element of this piece in the fragment's flat buffer."""
        return self.offset + self.elements


@dataclass(frozen=True)
class Fragment:
    """Fragment of a layout: parameters that are synchronised together, one behind the other in a flat buffer: by group,
    then as in the model."""

    index: int
    entries: tuple[ParameterEntry, ...]
    groups: tuple[tuple[int, int], ...]
    """(number, elements > 0) of each group that is here, by number; 0 is of the parameters that are in no group."""
    part_elements: int
    lane: int = 0
    lanes: int = 1
    """Where an island divides the fragment over its ranks, this one holds every `lanes`-th part, from `lane` on."""

    @cached_property
    def elements(self) -> int:
        """Elements of the fragment's parts that are held here: the length of its flat buffers."""
        return sum(stop - start for start, stop in self.cuts.values())

    @cached_property
    def total(self) -> int:
        """Elements of all parts of the fragment."""
        return sum(elements for _, elements in self.groups)

    @cached_property
    def parts(self) -> int:
        """Number of the fragment's parts in all; only the last one of a group may be shorter than `part_elements`."""
        return len(self._places)

    @cached_property
    def cuts(self) -> Mapping[int, tuple[int, int]]:
        """The fragment's parts that are held here, in order, and their bounds in its flat buffer."""
        cuts, begin = {}, 0
        for part in range(self.lane, self.parts, self.lanes):
            cuts[part] = begin, begin + self.size_of(part)
            begin = cuts[part][1]
        return cuts

    def part_bounds(self, part: int) -> tuple[int, int]:
        """Bounds, in the fragment's flat buffer, of a part held here: first element and the one behind the last."""
        return self.cuts[part]

    def place_of(self, part: int) -> tuple[int, int]:
        """Bounds of any part among all elements of the fragment."""
        return self._places[part][:2]

    def size_of(self, part: int) -> int:
        """Elements of any part of the fragment."""
        start, stop = self.place_of(part)
        return stop - start

    def group_of(self, part: int) -> int:
        """Number of the parameter group that a part of the fragment belongs to."""
        return self._places[part][2]

    def on_lane(self, lane: int, lanes: int) -> Fragment:
        """The fragment with those parts that rank `lane` of several holds: none from `lanes` on."""
        return replace(self, lane=lane if lane < lanes else self.parts, lanes=lanes)

    @cached_property
    def spots(self) -> tuple[Spot, ...]:
        """Pieces of parameters in the fragment's parts that are held here, in the order of its flat buffer."""
        return tuple(spot for spots in self.spots_of.values() for spot in spots)

    @cached_property
    def spots_of(self) -> Mapping[int, Sequence[Spot]]:
        """Pieces of parameters in each of the fragment's parts that are held here."""
        ends = [entry.offset + entry.elements for entry in self.entries]
        found: dict[int, list[Spot]] = {}
        for part, (begin, _) in self.cuts.items():
            start, stop = self.place_of(part)
            found[part] = []
            for entry in self.entries[bisect_right(ends, start) :]:
                if entry.offset >= stop:
                    break
                first, last = max(start, entry.offset), min(stop, entry.offset + entry.elements)
                if first < last:
                    spot = Spot(entry.name, first - entry.offset, last - entry.offset, begin + first - start)
                    found[part].append(spot)
        return found

    @cached_property
    def _places(self) -> tuple[tuple[int, int, int], ...]:
        """Bounds and group of each part, among all elements of the fragment."""
        places, begin = [], 0
        for group, elements in self.groups:
            end = begin + elements
            starts = range(begin, end, self.part_elements)
            places += [(start, min(start + self.part_elements, end), group) for start in starts]
            begin = end
        return tuple(places)


@dataclass(frozen=True)
class Layout:
    """Layout of a model: all its fragments. Every element of every parameter is in exactly one of them."""

    fragments: tuple[Fragment, ...]

    @staticmethod
    def of(
        named_shapes: NamedShapes,
        fragments: int = 1,
        order: str = "strided",
        part_elements: int | None = None,
        groups: Sequence[Sequence[str]] = (),
    ) -> Layout:
        """Cut parameters into fragments: given as (name, shape) in model order, with tied ones once.

        A layer is a name up to its first module-list index (`blocks.<i>.`) and stays in one piece. `order` is
        `strided` (layer i to fragment i mod P) or `sequential` (consecutive layers together). What is in no layer
        (embeddings, final norm, head) goes, the largest first, to the fragment that is smallest so far.

        `part_elements`: a power of two that makes about 64 parts of each fragment when not given. `groups`: names of
        parameters as globs; who fits several groups is in the first.
        Raises ConfigError when there are more fragments than layers, nothing to cut, or nothing in a group.
        """
        if not any(math.prod(shape) for _, shape in named_shapes):
            raise ConfigError("the model has no trainable parameters", "set requires_grad on what is to be trained")
        if order not in ("strided", "sequential"):
            raise ConfigError(f"unknown fragment order {order!r}", "use 'strided' or 'sequential'")
        if part_elements is not None and part_elements < 1:
            raise ConfigError(f"part_elements is {part_elements}", "give at least 1024, or leave it out")
        homes = _homes(named_shapes, fragments, order)
        numbers = _numbers([name for name, _ in named_shapes], groups)
        by_group = sorted(named_shapes, key=lambda pair: numbers[pair[0]])  # stable: the model's order inside a group
        made = []
        for index in range(fragments):
            piece = [(name, tuple(shape)) for name, shape in by_group if homes[name] == index]
            offsets = [0, *accumulate(math.prod(shape) for _, shape in piece)]
            sizes = Counter[int]()
            for name, shape in piece:
                sizes[numbers[name]] += math.prod(shape)
            least = -(-offsets[-1] // PARTS_PER_FRAGMENT)  # whole numbers: a float would overflow
            fitting = min(max(1 << (least - 1).bit_length(), MIN_PART_ELEMENTS), MAX_PART_ELEMENTS)
            entries = tuple(ParameterEntry(*pair, offset) for pair, offset in zip(piece, offsets, strict=False))
            present = tuple((number, size) for number, size in sizes.items() if size)
            made.append(Fragment(index, entries, present, part_elements or fitting))
        return Layout(tuple(made))

    @staticmethod
    def agreed(named_shapes: NamedShapes, contract: Contract) -> Layout:
        """Layout of these parameters in fragments and parts, as a contract has it. Raises ConfigError."""
        sync, groups = contract.sync, [group.match for group in contract.codec.groups]
        return Layout.of(named_shapes, sync.fragments, sync.fragment_order, sync.part_elements, groups)

    def on_lane(self, lane: int, lanes: int) -> Layout:
        """The layout with those parts of each fragment that rank `lane` of several holds."""
        return Layout(tuple(fragment.on_lane(lane, lanes) for fragment in self.fragments))

    @cached_property
    def digest(self) -> str:
        """SHA-256, hexadecimal, of a layout: names, shapes, fragments, part sizes. Equal when two peers' models fit.

        Which names are a group is the contract's, whose digest peers compare before this one.
        """
        tree = [[f.part_elements, [[entry.name, entry.shape] for entry in f.entries]] for f in self.fragments]
        return hashlib.sha256(json.dumps(tree).encode()).hexdigest()


class Weights:
    """Local weights: a model's parameters, which a round reads and writes fragment by fragment.

    Here they are the model's own. Where several ranks hold the model, `diloco.island.bridge` moves what is needed.

    They have any floating dtype, and the anchor is fp32: local weights without progress are the anchor as it is
    `rounded`, and progress is measured from there. What bf16 or fp16 cannot hold of a small outer step is not lost, for
    the anchor has it. But progress that is carried onto a new anchor is rounded with it, to the dtype of the sum.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = parameters
        """By name, in model order."""

    @staticmethod
    def of(model: nn.Module) -> Weights:
        """Local weights for a line: the trainable parameters of a model that this process has all of."""
        return Weights(named_parameters(model))

    @property
    def shapes(self) -> NamedShapes:
        """Names and whole shapes of all parameters in model order, from which a layout is cut."""
        return [(name, tuple(parameter.shape)) for name, parameter in self.parameters.items()]

    def read(self, fragment: Fragment, into: Tensor | None = None) -> Tensor:
        """Copy the local weights of a fragment, as far as held here, to a flat buffer (`read_fragment`)."""
        return read_fragment(self.parameters, fragment, into)

    def parts(self, fragment: Fragment) -> Iterator[tuple[int, Callable[[], Tensor]]]:
        """Local weights of a fragment part by part, as far as held here: each part's number, and a function that
        returns its values, flat fp32 on the host, to be read and not kept.

        Any thread may ask for them, each once, while nobody writes to the parameters.
        """

        def values(spots: Sequence[Spot]) -> Tensor:
            pieces = [self.parameters[spot.name].detach().reshape(-1)[spot.start : spot.stop] for spot in spots]
            held = [piece.to("cpu", torch.float32) for piece in pieces]
            return held[0] if len(held) == 1 else torch.cat(held)  # the first may be a view of a parameter

        for part, spots in fragment.spots_of.items():
            yield part, partial(values, spots)

    def within(self, fragment: Fragment, limit: float) -> bool:
        """Whether the local weights of a fragment, as far as held here, are finite and no larger than `limit`."""
        names = [entry.name for entry in fragment.entries if entry.name in self.parameters]
        return all(magnitude(self._held(self.parameters[name])) <= limit for name in names)

    def _held(self, parameter: Tensor) -> Tensor:
        """This process's share of a parameter of the local weights."""
        return parameter.detach()

    def write(self, fragment: Fragment, flat: Tensor) -> None:
        """Overwrite the local weights of a fragment with its flat buffer, as far as held here."""
        write_fragment(self.parameters, fragment, flat)

    def rounded(self, fragment: Fragment, flat: Tensor) -> Tensor:
        """A fragment's values rounded as `write` and `read` round them: `flat` itself for fp32 parameters, else a copy.

        `flat`: fp32 on the host. A rank without a parameter, at another stage of a pipeline, takes it for fp32.
        """
        held = [(spot, self.parameters[spot.name].dtype) for spot in fragment.spots if spot.name in self.parameters]
        narrow = [(slice(spot.offset, spot.end), dtype) for spot, dtype in held if dtype not in _HOLD_FP32]
        if not narrow:
            return flat
        copy = empty_as(flat).copy_(flat)
        for at, dtype in narrow:
            copy[at] = flat[at].to(dtype)
        return copy

    def change(self, fragment: Fragment, changed: Callable[[Tensor, slice], Tensor]) -> None:
        """Overwrite the local weights of a fragment piece by piece with what `changed` makes of each.

        It is given a piece, flat fp32 on the host, and where that is in a flat buffer of the fragment.
        """
        with torch.no_grad():
            for entry in fragment.entries:
                parameter, piece = self.parameters[entry.name], slice(entry.offset, entry.offset + entry.elements)
                local = parameter.detach().to("cpu", torch.float32)
                parameter.copy_(changed(local.flatten(), piece).view(entry.shape))


def named_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Parameters that a layout cuts into fragments: trainable, in model order, tied ones once, by bare names."""
    trainable = (named for named in model.named_parameters() if named[1].requires_grad)
    return {_WRAPPERS.sub("", name): parameter for name, parameter in trainable}


def read_fragment(parameters: Mapping[str, Tensor], fragment: Fragment, into: Tensor | None = None) -> Tensor:
    """A fragment's parameters (any device, any dtype) copied to one flat fp32 host tensor: a new one, or `into`."""
    flat = floats(fragment.elements) if into is None else into
    for parameter, piece in _pieces(parameters, fragment, flat):
        piece.copy_(parameter.detach())
    return flat


def write_fragment(parameters: Mapping[str, Tensor], fragment: Fragment, flat: Tensor) -> None:
    """Copy a flat host tensor into a fragment's parameters, in place, rounding to their dtype."""
    with torch.no_grad():
        for parameter, piece in _pieces(parameters, fragment, flat):
            parameter.copy_(piece)


def _pieces(parameters: Mapping[str, Tensor], fragment: Fragment, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter of a fragment beside its piece of `flat`, in the parameter's shape."""
    assert fragment.lanes == 1
    assert flat.shape == (fragment.elements,)
    for entry in fragment.entries:
        parameter = parameters[entry.name]
        assert parameter.shape == entry.shape, f"{entry.name}: {tuple(parameter.shape)} is not {entry.shape}"
        yield parameter, flat[entry.offset : entry.offset + entry.elements].view(entry.shape)


def _homes(named_shapes: NamedShapes, fragments: int, order: str) -> dict[str, int]:
    """Index of the fragment that each parameter goes to. Raises ConfigError for more fragments than layers."""
    layer_of = {name: match.group() for name, _ in named_shapes if (match := _LAYER.match(name))}
    layers = list(dict.fromkeys(layer_of.values()))
    if not 1 <= fragments <= max(len(layers), 1):
        cause = f"sync.fragments is {fragments}, but the model has {len(layers)} layers"
        raise ConfigError(cause, "a fragment holds at least one layer: use fewer fragments")
    if order == "strided":
        layer_homes = {layer: i % fragments for i, layer in enumerate(layers)}
    else:
        layer_homes = {layer: i * fragments // len(layers) for i, layer in enumerate(layers)}
    homes: dict[str, int] = {}
    filled = [0] * fragments
    for name, shape in sorted(named_shapes, key=lambda pair: (pair[0] not in layer_of, -math.prod(pair[1]))):
        home = layer_homes[layer_of[name]] if name in layer_of else filled.index(min(filled))
        filled[home] += math.prod(shape)
        homes[name] = home
    assert len(homes) == len(named_shapes), "two parameters have one name"
    return homes


def _numbers(names: Sequence[str], groups: Sequence[Sequence[str]]) -> dict[str, int]:
    """Number of each parameter's group in a layout: from 1; 0 for none. Raises ConfigError for an empty group."""
    numbers = dict.fromkeys(names, 0)
    for number, patterns in enumerate(groups, 1):
        free = [name for name in names if numbers[name] == 0]
        fitting = [name for name in free if any(fnmatchcase(name, pattern) for pattern in patterns)]
        if not fitting:
            left = " that groups before it leave" if number > 1 else ""
            cause = f"group {number} of codec.groups ({_some(patterns)}) is empty: no parameter{left} has such a name"
            alike = partial(SequenceMatcher, None, patterns[0])
            near = _some(sorted(free, key=lambda name: -alike(name).ratio())[:6]) or "none"
            raise ConfigError(cause, f"correct its `match`, or take it out; nearest names{left}: {near}")
        numbers |= dict.fromkeys(fitting, number)
    return numbers


def _some(names: Sequence[str]) -> str:
    """The first and last few names of a layout's parameters or group, for a message; they may be a stranger's."""
    few = names if len(names) <= 6 else (*names[:3], *names[-3:])
    return ", ".join(ascii(name[:30]) for name in few)
