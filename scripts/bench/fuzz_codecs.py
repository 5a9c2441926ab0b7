"""Throw damaged payloads at every codec's decoder and see that it refuses them or decodes them to finite numbers.

    scripts/fuzz-codecs                                  a second for each codec
    scripts/fuzz-codecs --codec int4 --codec topk+zstd --seconds 600 --seed 3

Valid payloads are cut, lengthened, flipped, spliced, offered for another number of values, and get numbers that are
special. A finding is anything but PayloadError or finite values; a refused fold that changed the sum; 256 MiB more
memory than before; or, where there is a compiler, compiled kernels that do something else than torch. The exit code is
1 then, and the payload is printed.
"""

from __future__ import annotations

import argparse
import resource
import struct
import sys
import time
from dataclasses import dataclass
from random import Random

import torch

from diloco.compress import Codec, PayloadError, kernels, open_codec
from diloco.config.codec import CodecSection
from diloco.kernels.build import use_compiled
from scripts.bench.codec_kinds import KINDS

NUMBERS = (float("nan"), float("inf"), -float("inf"), -1.0, -0.0, 3.4e38, 1e-45, 2.0**121)
PATTERNS = (b"\x80\x7f", b"\xff\xff", b"\0\0", b"\xff" * 4, b"\xff" * 8)
SPECIAL = [*PATTERNS, *(struct.pack("<f", number) for number in NUMBERS)]
SIZES = (1, 2, 3, 7, 63, 64, 65, 255, 256, 257, 1000, 1024, 4097)
MAX_EXTRA_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Outcome:
    """A decoder's result for one payload: the reason of its refusal, or all bits of values, sum and mean."""

    refused: str
    values: bytes = b""
    total: bytes = b""
    mean: bytes = b""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", action="append", help="only these, by the names that are printed")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each codec")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kinds = [{**kind, "zstd": zstd} for kind in KINDS for zstd in (False, True)]
    codecs = {codec.name: codec for codec in (open_codec(CodecSection.model_validate(kind)) for kind in kinds)}
    if unknown := set(options.codec or ()) - set(codecs):
        parser.error(f"no codec {', '.join(unknown)}; there are {', '.join(codecs)}")
    print(use_compiled("auto"))
    findings = [fuzz(codecs[name], options.seconds, options.seed) for name in options.codec or codecs]
    return 1 if any(findings) else 0


def fuzz(codec: Codec, seconds: float, seed: int) -> bool:
    """Whether something was found. Prints one line."""
    random = Random(f"{seed} {codec.name}")
    seeds = {size: codec.encode(torch.randn(size, generator=torch.Generator().manual_seed(size))) for size in SIZES}
    tried, refused, end = 0, 0, time.monotonic() + seconds
    before_bytes = peak_bytes()
    while time.monotonic() < end:
        elements = random.choice(SIZES)
        payload = damaged(seeds[elements], random, seeds)
        if random.random() < 0.1:
            elements = random.choice(SIZES)
        try:
            outcome = checked(codec, payload, elements)
        except Exception as error:
            print(f"{codec.name}: {type(error).__name__}: {error}\n  {elements} values from {payload.hex()}")
            return True
        tried, refused = tried + 1, refused + bool(outcome.refused)
    if peak_bytes() - before_bytes > MAX_EXTRA_BYTES:
        print(f"{codec.name}: {(peak_bytes() - before_bytes) / 2**20:.0f} MiB more memory, seed {seed}")
        return True
    print(f"{codec.name:24} {tried:8} payloads, {refused} refused, the others finite")
    return False


def checked(codec: Codec, payload: bytes, elements: int) -> Outcome:
    """The outcome, the same with and without kernels. Raises AssertionError on anything else."""
    library = kernels.installed()
    outcome = decoded(codec, payload, elements)
    kernels.install(None)
    try:
        assert library is None or decoded(codec, payload, elements) == outcome, "compiled and eager differ"
    finally:
        kernels.install(library)
    return outcome


def decoded(codec: Codec, payload: bytes, elements: int) -> Outcome:
    before = torch.linspace(-1.0, 1.0, elements)
    total = before.clone()
    try:
        values = codec.decode(payload, elements)
    except PayloadError as error:
        assert_refuses_fold(codec, payload, total)
        assert torch.equal(total, before), "a refused fold changed the sum"
        return Outcome(str(error))
    assert values.isfinite().all(), "values that are not finite"
    codec.fold(payload, 3.0, total)
    mean = torch.empty(elements)
    codec.mean_into([(3, payload), (2**64 - 1, payload)], mean)
    assert mean.isfinite().all(), "a mean that is not finite"
    return Outcome("", *(one.numpy().tobytes() for one in (values, total.nan_to_num(), mean)))


def assert_refuses_fold(codec: Codec, payload: bytes, total: torch.Tensor) -> None:
    try:
        codec.fold(payload, 1.0, total)
    except PayloadError:
        return
    raise AssertionError("decoding refuses what fold takes")


def damaged(payload: bytes, random: Random, others: dict[int, bytes]) -> bytes:
    """The payload after one to four accidents."""
    raw = bytearray(payload)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(raw)) if raw else 0
        match random.randrange(7):
            case 0 if raw:
                raw[at] ^= 1 << random.randrange(8)
            case 1:
                special = random.choice(SPECIAL)
                start = at - at % len(special)
                raw[start : start + len(special)] = special
            case 2:
                raw[at : at + random.randint(1, 16)] = random.randbytes(random.randint(0, 16))
            case 3 if random.random() < 0.3:
                del raw[at:]
            case 4 if random.random() < 0.3:
                raw += random.randbytes(random.randint(1, 2**10))
            case 5 if random.random() < 0.3:
                raw[at:] = random.choice(list(others.values()))[at:]
            case _:
                raw[at : at + 8] = random.randbytes(len(raw[at : at + 8]))
    return bytes(raw)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
