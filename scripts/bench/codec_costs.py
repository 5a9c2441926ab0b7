"""Cost and error of every codec: speed of one core beside memcpy, bits per value, relative error.

    scripts/bench-codecs                        all codecs, with and without compiled kernels; a table
    scripts/bench-codecs --codec int8 --json FILE
    scripts/bench-codecs --recorded FILE.npy    errors on these fp32 values, in place of a training run of 30 seconds

Speeds are bytes of fp32 values for each second of CPU time of one thread, divided by those of memcpy in the same
seconds: other programs on the machine slow both. Values are 64 MiB in parts of 4 MiB, so that they come from memory as
in a round, and not from the cache. `fold` decodes, weighs, and adds to a sum, the same for all parts, as a part's owner
does with what its contributors sent. Errors are relative L2: on gaussian values, and on the pseudo-gradient of 10 inner
steps of configs/demo.toml's model after 30 others.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor

from diloco.compress import Codec, open_codec
from diloco.config.codec import CodecSection
from diloco.config.load import load_contract
from diloco.data import open_dataset
from diloco.inner.loop import InnerLoop
from diloco.kernels.build import use_compiled
from diloco.models import build_model
from diloco.outer.fragments import Layout, named_parameters, read_fragment
from diloco.outer.pseudograd import pseudo_gradient
from scripts.bench.codec_kinds import KINDS
from scripts.environment import ROOT

Calls = Sequence[Callable[[], object]]

PART = 2**20
WARM_STEPS = 30
ROUND_STEPS = 10
SECONDS = 0.4
"""For each speed, at least, and two passes."""
HEADER = f"{'codec':24} {'bits':>7} {'error':>8} {'trained':>8} {'encode':>7} {'fold':>7}   eager: encode, fold"


@dataclass(frozen=True)
class Row:
    """One codec. Speeds are shares of memcpy's, [compiled, eager]."""

    codec: str
    bits: float
    """A value, of gaussian ones."""
    error: float
    trained_bits: float
    trained_error: float
    encode: tuple[float, float]
    fold: tuple[float, float]
    memcpy_bytes_per_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", action="append", help="only these, by the names that are printed")
    parser.add_argument("--recorded", type=Path, help="flat fp32 values (.npy) for the error on what was trained")
    parser.add_argument("--mib", type=int, default=64, help="of fp32 values to encode and fold")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kinds = [{**kind, "zstd": zstd} for zstd in (False, True) for kind in KINDS]
    codecs = {codec.name: codec for codec in (open_codec(CodecSection.model_validate(kind)) for kind in kinds)}
    if unknown := set(options.codec or ()) - set(codecs):
        parser.error(f"no codec {', '.join(unknown)}; there are {', '.join(codecs)}")
    trained = torch.from_numpy(np.load(options.recorded)) if options.recorded else trained_values()
    values = torch.randn(options.mib * 2**18, generator=torch.Generator().manual_seed(0)) * 1e-3
    print(HEADER, flush=True)
    rows = []
    for name in options.codec or codecs:
        rows.append(measure(codecs[name], values, trained))
        print(line(rows[-1]), flush=True)
    print(f"memcpy: {median(row.memcpy_bytes_per_s for row in rows) / 1e9:.1f} GB/s of values")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def trained_values() -> Tensor:
    """The pseudo-gradient of a round of the demo, in the order of its layout, flat."""
    contract = load_contract(ROOT / "configs" / "demo.toml").value
    dataset = open_dataset(contract.data, ROOT)
    model = build_model(contract.model, dataset.vocab_size, contract.run.seed)
    loop = InnerLoop(model, contract.inner, contract.run.total_tokens, torch.device("cpu"))
    parameters = named_parameters(model)
    layout = Layout.agreed([(name, tuple(parameter.shape)) for name, parameter in parameters.items()], contract)
    order = np.random.default_rng(0).permutation(dataset.blocks_per_epoch or 2**16)
    batch = contract.inner.sequences_per_step
    before = {}
    for step in range(WARM_STEPS + ROUND_STEPS):
        if step == WARM_STEPS:
            before = {fragment.index: read_fragment(parameters, fragment) for fragment in layout.fragments}
        tokens = (step + 1) * contract.tokens_per_step * contract.membership.start_peers
        loop.step(dataset.read(order[step * batch : (step + 1) * batch].tolist()), tokens)
    return torch.cat([pseudo_gradient(before[f.index], read_fragment(parameters, f)) for f in layout.fragments])


def measure(codec: Codec, values: Tensor, trained: Tensor) -> Row:
    bits, error = size_and_error(codec, values[:PART])
    trained_bits, trained_error = size_and_error(codec, trained)
    speeds = []
    for mode in ("on", "off"):
        use_compiled("on" if mode == "on" else "off")
        speeds.append(speeds_of(codec, values))
    (encode, fold, memcpy), (eager_encode, eager_fold, _) = speeds
    return Row(codec.name, bits, error, trained_bits, trained_error, (encode, eager_encode), (fold, eager_fold), memcpy)


def size_and_error(codec: Codec, values: Tensor) -> tuple[float, float]:
    """Bits a value, and the relative L2 error."""
    payload = codec.encode(values)
    error = (codec.decode(payload, values.numel()) - values).norm() / values.norm()
    return len(payload) * 8 / values.numel(), error.item()


def speeds_of(codec: Codec, values: Tensor) -> tuple[float, float, float]:
    """Speeds of encoding and folding as shares of memcpy's, and memcpy's in bytes/s."""
    parts, copy, total = cut(values), cut(torch.zeros_like(values)), torch.zeros(PART)
    payload = codec.encode(parts[0])
    payloads = [bytes(bytearray(payload)) for _ in parts]  # each in memory of its own
    copying = [partial(mine.copy_, part) for mine, part in zip(copy, parts, strict=True)]
    encoding = [partial(codec.encode, part) for part in parts]
    folding = [partial(codec.fold, one, 3.0, total) for one in payloads]
    shares = [against(encoding, copying), against(folding, copying)]
    return shares[0][0], shares[1][0], median([shares[0][1], shares[1][1]])


def cut(values: Tensor) -> list[Tensor]:
    return [values[start : start + PART] for start in range(0, values.numel(), PART)]


def against(work: Calls, copying: Calls) -> tuple[float, float]:
    """Speed as a share of memcpy's, and memcpy's in bytes/s: medians of passes over the parts, turn by turn."""
    work[0]()
    taken: list[float] = []
    copied: list[float] = []
    start = time.monotonic()
    while len(taken) < 2 or time.monotonic() - start < SECONDS:
        copied.append(median(seconds(one) for one in copying))
        few = work if not taken or taken[-1] < 0.05 else work[:2]
        taken.append(median(seconds(one) for one in few))
    return median(copied) / median(taken), PART * 4 / median(copied)


def seconds(call: Callable[[], object]) -> float:
    """CPU seconds of this thread."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


def line(row: Row) -> str:
    return (
        f"{row.codec:24} {row.bits:7.3f} {row.error:8.4f} {row.trained_error:8.4f} "
        f"{row.encode[0]:6.2f}x {row.fold[0]:6.2f}x   {row.encode[1]:6.2f}x {row.fold[1]:6.2f}x"
    )


if __name__ == "__main__":
    main()
