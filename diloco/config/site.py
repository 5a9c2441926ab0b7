"""The site: what is local to one peer, and never hashed."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from diloco.config.section import (
    PEER_NAME,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    PositiveSeconds,
    Seconds,
    Section,
    Tokens,
)


class PeerSection(Section):
    """The peer itself: its name."""

    name: Annotated[str, Field(pattern=PEER_NAME)] | None = None
    """This peer's name in the run; the host name and a random suffix when not given."""


class DeviceSection(Section):
    """Devices of this peer, and settings for speed on them."""

    kind: Literal["auto", "cpu", "cuda"] = "auto"
    ranks: PositiveInt = 1
    """Processes that `diloco peer` starts on this machine, for instance one per GPU; `[mesh]` says how they share the
    work. Under torchrun or srun it takes the ranks it is given."""
    threads: PositiveInt | None = None
    """CPU threads for torch; torch's own default when not given."""
    max_params: Tokens | None = None
    """Largest model that this peer trains, in parameters (`"7B"` is 7 billion): a joiner takes the contract as it is.
    When not given, one that this machine's memory holds once in fp32. A model of kind `hf` is counted before any of it
    is allocated; one of kind `external` is the program's own object."""
    compile: bool = False
    """`torch.compile` the model, or its blocks where ranks share it (needs a compiler)."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """Compute activations again in the backward pass in place of keeping them. `full`: all of a block's but its input;
    `selective`: all but the results of matrix products and attention."""
    peak_tflops: PositiveFloat | None = None
    """Peak of one rank's device in the contract's precision (dense, 10^12 operations per second), for MFU. Default
    for bf16 on a known GPU: the number that `diloco plan` uses. Otherwise there is no MFU without this key."""
    profile_steps: Annotated[int, Field(ge=0)] = 0
    """Inner steps that each rank traces with torch's profiler, once, into `profile/rank-N.json.gz` of the peer's
    folder (`diloco peer --profile`); 0: none."""
    profile_after: Annotated[int, Field(ge=0)] = 10
    """Inner steps before that: the first ones are not like the others."""
    outer_step: Literal["auto", "ahead", "in_place"] = "auto"
    """`ahead`: average and outer step are made while the mean arrives, in RAM of their own: one fragment in fp32 for
    the anchor and one for each of the outer optimizer's slots. `in_place`: once the version closed, in the outer state
    itself, which takes nothing more, but training waits for it. `auto`: ahead for a single process, in place on an
    island of several ranks, which divide the time, too; with `sync.overlap`, and RAM to spare, ahead hides it there as
    well. (Gossip has outer steps of its own.)"""
    compile_codecs: Literal["auto", "on", "off"] = "auto"
    """Codecs and the Nesterov outer step in C, compiled once into the user's cache folder, with the same bits;
    `auto`: if there is a compiler. Of several peers in one process the first decides for all."""
    step_s: Seconds = 0.0
    """Shortest time of one inner step; 0: as fast as it goes. For drills: as slow as a large model, but at no cost."""
    speed: Annotated[float, Field(gt=0, le=1)] = 1.0
    """For drills: sleep after each inner step, so that all of them take 1 / `speed` times as long."""


MeshSize = Annotated[int, Field(ge=-1)]
"""Ranks along one dimension of the mesh; -1: all that the other dimensions leave."""


PipelineSchedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble", "zbv"]


class MeshSection(Section):
    """The island's mesh: `dp_replicate` x `pp` x `dp_shard` x `cp` x `ep` x `tp` is its number of ranks. `cp` and `ep`
    divide what their ranks have in common as `dp_shard` does.

    What peers exchange does not depend on it, so islands of different meshes train one model together.
    """

    dp_replicate: MeshSize = 1
    """Copies of the model, each of which trains on rows of its own."""
    pp: MeshSize = 1
    """Pipeline parallel: ranks that have some layers each. They are far from each other, so in different nodes where
    there are several: little goes between them. A step has `inner.accumulation` x `micro_batches` micro-batches; with m
    of them, ranks wait for (pp - 1) / (m + pp - 1) of a step under `gpipe` and `1f1b`, so m should be 4 pp or more."""
    micro_batches: PositiveInt = 1
    """Pieces that a rank's share of each micro-batch of the contract is cut into; more keep a pipeline busy."""
    schedule: PipelineSchedule = "1f1b"
    """For `pp` > 1, in which order micro-batches go through. `gpipe`: all forwards, then all back (arXiv 1811.06965);
    `1f1b`: back as soon as possible, so that a rank keeps the activations of `pp` micro-batches at most (2104.04473);
    `interleaved-1f1b`: the same with several stages on each rank, so that waiting is shorter; `zero-bubble`: who would
    wait computes gradients of weights (ZB-1P, 2401.10241); `zbv`: the same with stages that go there and back."""
    chunks: Annotated[int, Field(ge=2)] = 2
    """Stages of each rank under `interleaved-1f1b` and `zero-bubble`; `zbv` has 2."""
    dp_shard: MeshSize = -1
    """Ranks that share one copy, as `shard` says, and train on rows of their own."""
    cp: MeshSize = 1
    """Context parallel: ranks that share each sequence, a piece each."""
    cp_method: Literal["heads", "ring"] = "heads"
    """Attention over sequences that are cut among `cp` ranks. `heads`: in attention each rank has some heads of the
    whole sequences, so `cp` must divide them (Ulysses); `ring`: keys and values go round (for any number of heads;
    on GPUs with bf16)."""
    ep: MeshSize = 1
    """Expert parallel: ranks that share the experts of each block, and train on rows of their own."""
    tp: MeshSize = 1
    """Tensor parallel: ranks that share each matrix and train on the same rows. Consecutive, so inside one node."""
    shard: Literal["none", "optimizer", "gradients", "parameters"] = "none"
    """The tensors that are divided over `dp_shard`. `none`: nothing (DDP: then those ranks are copies, too);
    `optimizer`: the optimizer's state and the master weights (ZeRO-1); `gradients`: gradients as well (ZeRO-2);
    `parameters`: parameters as well, gathered block by block when they are needed (ZeRO-3, FSDP). The further down,
    the less memory and the more traffic."""
    sequence_parallel: bool = True
    """For `tp` > 1: norms and residuals are divided along the sequence, too."""
    async_tp: bool = False
    """For `tp` > 1 with `device.compile`: what these ranks send overlaps with matrix products (GPUs with NVLink)."""
    offload: bool = False
    """With `shard`: each rank's share of weights, gradients and optimizer state is in host memory (GPUs only)."""

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        names = ("dp_replicate", "pp", "dp_shard", "cp", "ep", "tp")
        sizes: dict[str, int] = {name: getattr(self, name) for name in names}
        for name, size in sizes.items():
            if size == 0:
                raise ValueError(f"{name} is 0: give the number of ranks, or -1 for all that are left")
        left = [name for name, size in sizes.items() if size == -1]
        if len(left) > 1:
            raise ValueError(f"{' and '.join(left)} are both -1: at most one can be what the others leave")
        if self.offload and self.shard == "none":
            raise ValueError("offload moves shares to the host, and shard 'none' makes none: set shard to 'parameters'")
        if self.shard == "none" and self.dp_shard > 1:
            raise ValueError(
                f"dp_shard is {self.dp_shard}, but shard 'none' divides nothing: set shard to 'parameters', or "
                f"dp_replicate in place of dp_shard"
            )
        return self


class NetworkSection(Section):
    """Addresses and bandwidth of this peer."""

    listen: Annotated[str, Field(pattern=r"^.+:\d{1,5}$")] = "127.0.0.1:0"
    """Host and port to listen on; port 0 takes a free one. Who joins a run on another machine, and does not say it,
    listens on a free port of all this machine's addresses."""
    advertise: Annotated[str, Field(pattern=r"^.+:\d{1,5}$")] | None = None
    """Host and port that others reach this peer at, when it differs from `listen`."""

    @field_validator("listen", "advertise")
    @classmethod
    def _port(cls, value: str | None) -> str | None:
        if value is not None and int(value.rpartition(":")[2]) > 65535:
            raise ValueError("the port must be a number from 0 to 65535")
        return value

    insecure: bool = False
    """Found a run without a secret where `DILOCO_SECRET` is not set, also beyond loopback: whoever reaches the port may
    join. Without it, such a run listens on loopback only, and lets in the user who founded it."""
    dht_port: Annotated[int, Field(ge=0, lt=65536)] = 0
    """Port of the peer directory (hivemind DHT); 0 takes a free one."""
    serve_bps: NonNegativeFloat | None = None
    """Most bits per second that this peer sends to joiners that copy the state; 0: no limit. Without it, 80e6 for each
    processor core that the peer may use, which takes 5 % of them."""
    send_bps: NonNegativeFloat = 0.0
    """Most bits per second that this peer sends in rounds, contributions and means together; 0: no limit."""
    streams: Annotated[int, Field(ge=1, le=16)] = 1
    """Connections to each other peer that contributions and means go over at once: several fill a long, lossy link."""
    lanes: PositiveInt | None = None
    """Ranks of this island that divide the outer state, and exchange their parts over connections of their own; 1: rank
    0 alone. When not given, all of them, but 1 with `advertise`, which says that one port can be reached. Rank r
    listens on the port of `listen` + 100 + r, or on a free one."""


class StorageSection(Section):
    """Files of this peer: folder, checkpoints, recordings."""

    directory: str | None = None
    """Where checkpoints and events go; `runs/<run>/<peer>` when not given. All ranks of an island must see it."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 1
    """Versions between checkpoints; 0: only at the end. The first version after a start or a copied state has one, too.
    One that is due while the last is written is left out."""
    keep: PositiveInt = 2
    """Checkpoints kept."""
    log: bool = True
    """Keep the means of versions since the last checkpoint on the disk: a restart goes on from the last of them."""
    record: bool = False
    """Keep the payloads of own contributions, for `diloco replay`."""
    record_versions: Annotated[int, Field(ge=0)] = 0
    """Versions whose payloads are kept; 0: all."""

    @property
    def keeps_votes(self) -> bool:
        """Whether votes and means are on the disk: the log leads on from checkpoints."""
        return self.log and self.checkpoint_every > 0


class SiteDataSection(Section):
    """Place of the training data on this machine."""

    root: str = "."
    """Folder that the contract's `data.paths` are relative to."""


class TimeoutsSection(Section):
    """Local, monotonic. The defaults suit a LAN; `peers/wan.toml` has slower ones."""

    heartbeat_s: PositiveSeconds = 0.5
    """Seconds between heartbeats, which carry a peer's progress. The death of a peer is noticed by a missing one."""
    suspect_s: PositiveSeconds = 4.0
    """No word from a peer for this long: it is out of the round. Eight heartbeats: a busy machine delays some."""
    stall_s: PositiveSeconds = 4.0
    """No byte of a peer moves in a round for this long: the round goes on without it. A slow link is not still."""
    rpc_s: PositiveSeconds = 5.0
    """Deadline of one control message."""
    join_s: PositiveSeconds = 120.0
    """No byte of the state comes for this long: the join fails. The wait for the run to start does not count."""
    leave_s: PositiveSeconds = 25.0
    """After the first Ctrl-C, when this peer is gone at the latest: 60 % of it to be counted, the rest until others can
    do without its vote. torchrun kills after 30 s."""
    collective_s: PositiveSeconds = 600.0
    """Seconds that a rank waits for another one of its island. A rank that hangs is found out by then, and the
    island starts again. Longer than any inner step, evaluation or checkpoint."""


class Site(Section):
    """Settings that are local to one peer; never hashed, never sent."""

    peer: PeerSection = PeerSection()
    device: DeviceSection = DeviceSection()
    mesh: MeshSection = MeshSection()
    network: NetworkSection = NetworkSection()
    storage: StorageSection = StorageSection()
    data: SiteDataSection = SiteDataSection()
    timeouts: TimeoutsSection = TimeoutsSection()
