"""One peer's life as the world sees it: found or join, get the state, close versions, leave.

    gate = Gate(site)                       # thread, link, directory process
    contract = gate.knock(address)          # a joiner only: who is there, and what do they train
    peer = Peer(name, contract, site, model, gate, events)
    peer.enter(patience)                    # state is here, and the view includes us
    peer.round(inner_steps, ...)            # as often as wanted: see diloco/round.py
    peer.leave()

`diloco.trainer` puts our inner loop around it, `diloco.library` somebody else's.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from diloco.checkpoint import Checkpoint, JsonValue, outer_state
from diloco.checkpoint import save as save_checkpoint
from diloco.clock import monotonic_s
from diloco.compress import PayloadError, open_codec
from diloco.config import Contract, Site, contract_from_json
from diloco.errors import EvictedError, IncompatibleError, StateError, TicketError, UsageError
from diloco.exchange.address import is_loopback, split_address
from diloco.exchange.dht import Directory
from diloco.exchange.engine import Exchange, Terms
from diloco.exchange.link import StateOffer, Welcome
from diloco.exchange.machine import Rules, Timing
from diloco.exchange.messages import Reply
from diloco.exchange.presence import Presence
from diloco.exchange.runtime import Runtime, reachable
from diloco.exchange.sockets import SocketCounter
from diloco.fragments import Layout, named_parameters, read_fragment
from diloco.outer import OuterState, open_outer
from diloco.round import Diverged, Line, Trained, adopt_state, drop_progress, run_round, step_outer
from diloco.telemetry import Events
from diloco.types import Closed, Commit, Counted, Member, Phase, Progress, Skip

logger = logging.getLogger(__name__)


class Gate:
    """The way out of this process. Made first: the directory's process imports hivemind while we build the model."""

    def __init__(self, site: Site) -> None:
        listen = site.network.listen
        if not is_loopback(listen) and not site.network.insecure:
            cause = f"listening on {listen} is open to anybody: traffic is neither encrypted nor authenticated yet"
            raise UsageError(cause, "use a network you trust and say --insecure, or listen on 127.0.0.1")
        self.site = site
        self.directory = Directory()
        self.runtime = Runtime(site.timeouts.rpc_s)
        self.welcome: Welcome | None = None

    def knock(self, ticket: str) -> Contract:
        """Ask the member at `HOST:PORT[/DIGEST]` for the contract.

        Raises UnreachableError, IncompatibleError, and TicketError when the contract is not the one in the ticket.
        """
        address, _, expected = ticket.partition("/")
        split_address(address)
        self.welcome = self.runtime.hello(address)
        contract = contract_from_json(self.welcome.contract)
        if not contract.digest.startswith(expected):
            cause = f"{address} trains contract {contract.digest[:12]}, the address given names {expected}"
            raise TicketError(cause, "ask for the current join line: `diloco status` prints it")
        return contract

    def close(self) -> None:
        """End link, server and directory."""
        self.runtime.close()
        self.directory.close()


class Peer:
    """The outer side of one peer. All methods are for the training thread."""

    def __init__(
        self,
        name: str,
        contract: Contract,
        site: Site,
        model: nn.Module,
        gate: Gate,
        events: Events,
        checkpoint: Checkpoint | None = None,
        data: str = "",
    ) -> None:
        """`data`: fingerprint of the training data, when leases say who trains on which block of it."""
        self.contract = contract
        self.site = site
        self.gate = gate
        self.events = events
        self.counter = SocketCounter()
        self.parameters = named_parameters(model)
        shapes = [(name, tuple(parameter.shape)) for name, parameter in self.parameters.items()]
        layout = Layout.agreed(shapes, contract.sync)
        optimizer = open_outer(contract.outer)
        anchor = [read_fragment(self.parameters, fragment) for fragment in layout.fragments]
        state = OuterState(0, tuple(map(optimizer.start, anchor)))
        codec = open_codec(contract.codec)
        by_tokens = contract.outer.weighting == "tokens"
        self.line = Line(name, self.parameters, layout, codec, optimizer, by_tokens, state)
        if checkpoint is not None:
            self._restore(checkpoint)
        welcome = gate.welcome
        lineage = welcome.lineage if welcome else secrets.token_hex(8)
        me = Member(name, secrets.randbits(48), "")
        self.exchange = Exchange(
            me, self._terms(data), gate.runtime.link, lineage, welcome is None, gate.runtime.loop, self._on_reason
        )
        self.address = ""
        self.discarded_tokens = 0
        self.progress = Progress()
        self._told_s = monotonic_s()
        self._presence: Presence | None = None

    # ------------------------------------------------------------ entering

    @property
    def name(self) -> str:
        return self.line.peer

    @property
    def ticket(self) -> str:
        """What others give to `diloco peer --join`."""
        return f"{self.address}/{self.contract.digest[:12]}"

    @property
    def done(self) -> bool:
        """Whether the run has all its tokens."""
        return self.line.commit is not None and self.line.commit.tokens >= self.contract.run.total_tokens

    def open(self) -> None:
        """Listen, find the others, get the state. Afterwards `enter` waits for the view to include us.

        Raises ResourceError (port in use), StateError (nobody gives the state), IncompatibleError (other model).
        """
        network = self.site.network
        welcome = self.gate.welcome
        if welcome is not None:
            self._check_alike(welcome)
        served = self.gate.runtime.serve(self.exchange, network.listen)
        host, _ = split_address(network.listen)
        self.address = network.advertise or reachable(served, welcome.members[0].address if welcome else None)
        bootstrap = welcome.directory if welcome else ()
        self.gate.directory.open(self.contract.run.name, bootstrap, host, network.dht_port)
        self.exchange.start(self.address, self.gate.directory.addresses)
        if welcome is not None:
            self._meet_members(welcome)
            self._get_state(welcome)
        self.exchange.hold(self.line.state, self.line.commit, copied=True)
        self._presence = Presence(self.gate.directory, self.exchange)
        self.events.emit("listening", address=self.address, ticket=self.ticket)

    def _check_alike(self, welcome: Welcome) -> None:
        """Before anything is copied: the same parameters, the same data."""
        terms = self.exchange.terms
        if welcome.layout != terms.layout.digest:
            cause = "this model has other parameters (names or shapes) than the run's"
            raise IncompatibleError(cause, "build the model as the founder does; mind tied and frozen parameters")
        if welcome.data != terms.data:
            cause = f"this peer's data ({terms.data[:12]}) is not the run's ({welcome.data[:12]})"
            fix = "use the same files; for data.source 'stdlib', the same Python version"
            raise IncompatibleError(cause, fix)

    def _meet_members(self, welcome: Welcome) -> None:
        found = self.gate.directory.lookup()
        known = {member.peer: member for member in (*found.values(), *welcome.members)}
        if self.name in known and self.line.commit is None:
            logger.warning("the run has, or had, a peer named %s", self.name)
        self.exchange.meet([member for name, member in known.items() if name != self.name])

    def _get_state(self, welcome: Welcome) -> None:
        """From a checkpoint, if the run still goes on from there; else copied from the members."""
        if self.line.commit is not None and self.line.commit.lineage == welcome.lineage:
            return
        self.copy_state([member.address for member in welcome.members])

    def copy_state(self, sources: Sequence[str]) -> None:
        """Copy anchor and outer state from these members. Raises StateError."""
        self.report(phase=Phase.JOINING)
        timeout_s = self.site.timeouts.join_s
        try:
            state, offer = self.exchange.copy_state(sources, self.line.state, timeout_s, self._on_copied)
        except TimeoutError as error:
            raise StateError(f"the state was not here within {timeout_s:g} s", "raise timeouts.join_s") from error
        self._adopt(state, offer)

    def _adopt(self, state: OuterState, offer: StateOffer) -> None:
        self.discarded_tokens += adopt_state(self.line, state, offer.commit)
        self.exchange.hold(state, offer.commit, copied=True)
        self.events.emit("state", version=state.version, state_digest=state.digest)

    def _on_copied(self, done_bytes: int, total_bytes: int) -> None:
        now = monotonic_s()
        if now - self._told_s >= 1.0 or done_bytes == total_bytes:
            self._told_s = now
            self.events.emit("copying", done_bytes=done_bytes, total_bytes=total_bytes)

    def enter(self, patience: Callable[[], bool], on_closed: OnClosed) -> bool:
        """Wait until the view includes us: for the run to start, or for the next version. False: out of patience."""
        refused_s = monotonic_s()
        while not (self._stands_in_view() or self.done):
            if not patience():
                return False
            self.catch_up(on_closed, timeout_s=0.2)
            if self.exchange.refused is not Reply.FENCED:
                refused_s = monotonic_s()
            elif monotonic_s() - refused_s > 3 * self.site.timeouts.suspect_s:
                raise EvictedError(f"the run has a live peer named {self.name}", "choose another peer.name")
        return True

    def _stands_in_view(self) -> bool:
        """Whether the version that we have applied, and not only heard of, includes us."""
        commit = self.line.commit
        return self.exchange.in_view and commit is not None and commit.member(self.name) is not None

    # ------------------------------------------------------------ rounds

    def round(
        self,
        inner_steps: Callable[[], None],
        on_closed: OnClosed,
        patience: Callable[[], bool],
        leaving: Callable[[], bool] = lambda: False,
    ) -> Sequence[Closed] | Skip:
        """One round of the straight line (`diloco.round.run_round`), with what keeps it going."""
        seconds: dict[str, float] = {}

        def steps() -> None:
            inner_steps()
            self.report(phase=Phase.SYNCING)
            self.catch_up(on_closed)

        def apply(closed: Closed, seconds: dict[str, float]) -> None:
            self._apply(closed, seconds, on_closed)

        try:
            outcome = run_round(self.line, steps, self.exchange, apply, patience, leaving, seconds)
        except Diverged as error:
            outcome = Skip(str(error))
            self._copy_again(str(error))
        except PayloadError as error:
            outcome = Skip(f"the progress is not finite and is discarded: {error}")
            self.discarded_tokens += drop_progress(self.line)
        if isinstance(outcome, Skip):
            self.events.emit("skip", version=self.line.state.version + 1, reason=outcome.reason)
        self.report(phase=Phase.TRAINING)
        return outcome

    def catch_up(self, on_closed: OnClosed, timeout_s: float = 0.0) -> None:
        """Apply versions that closed without us; copy the state when they are too many."""
        try:
            for closed in self.exchange.closed(timeout_s):
                self._apply(closed, {}, on_closed)
        except Diverged as error:
            self._copy_again(str(error))
        if self.exchange.behind:
            self._copy_again("too far behind to catch up by commits")

    def _copy_again(self, why: str) -> None:
        """Copy the state from the other members. When nobody gives it now, training goes on; the next round tries."""
        self.events.emit("reason", text=f"{why}: copying the state", routine=False)
        others = [member.address for member in self.exchange.alive() if member.peer != self.name]
        try:
            self.copy_state(others)
        except StateError as error:
            self.exchange.behind = True
            self.events.emit("warning", text=error.cause)

    def _apply(self, closed: Closed, seconds: dict[str, float], on_closed: OnClosed) -> None:
        before = self.line.commit
        if before is not None and closed.commit.version <= before.version and closed.commit.fragment >= 0:
            return  # already in a state that was copied meanwhile
        mine = step_outer(self.line, closed, seconds)
        self.exchange.hold(self.line.state, closed.commit)
        if mine is not None and self.progress.first_counted_version < 0:
            self.report(first_counted_version=closed.commit.version)
        self.report(version=closed.commit.version)
        self._emit_view(before, closed.commit)
        on_closed(closed.commit, before, mine, seconds)

    def _emit_view(self, before: Commit | None, after: Commit) -> None:
        old = {member.peer for member in before.view} if before else set()
        new = {member.peer for member in after.view}
        if old != new:
            handed_back = self.exchange.said_goodbye()
            left = [{"peer": peer, "reason": "left" if peer in handed_back else "lost"} for peer in sorted(old - new)]
            self.events.emit("view", version=after.version, joined=sorted(new - old), left=left)

    def report(self, **changes: str | int | float) -> None:
        """Change what the heartbeats say of us. A loss that is not finite is left out: others refuse such a message."""
        finite = {name: value for name, value in changes.items() if isinstance(value, str) or math.isfinite(value)}
        self.progress = replace(self.progress, **finite)  # type: ignore[arg-type]
        self.exchange.report(self.progress)

    def _on_reason(self, reason: str, routine: bool) -> None:
        self.events.emit("reason", text=reason, routine=routine)

    # ------------------------------------------------------------ leaving

    def leave(self, reason: str) -> None:
        """Say goodbye: our vote goes to another member, our unused data goes back, our progress is discarded."""
        self.report(phase=Phase.DONE if self.done else Phase.LEAVING)
        if self.done:
            self.exchange.settle(self.site.timeouts.suspect_s)
        self.exchange.leave(self.site.timeouts.rpc_s + 1.0)
        self.discarded_tokens += drop_progress(self.line)
        if self._presence is not None:
            self._presence.end()

    def close(self) -> None:
        """End the exchange, goodbye or not. The gate is the caller's."""
        self.exchange.stop()

    # ------------------------------------------------------------ checkpoints

    def save(
        self, directory: Path, groups: Mapping[str, Mapping[str, Tensor]], meta: Mapping[str, JsonValue], keep: int
    ) -> Path:
        """Write a checkpoint: the outer state, and what the inner side adds. Raises ResourceError."""
        line = self.line
        outer = {"outer": dict(line.state.buffers())}
        local = {"local": dict(self.parameters)} if line.trained.tokens else {}
        about: dict[str, JsonValue] = {
            "peer": line.peer,
            "contract": self.contract.to_json(),
            "commit": line.commit.to_bytes().decode() if line.commit else None,
            "steps": [fragment.steps for fragment in line.state.fragments],
            "tokens": line.trained.tokens,
            "blocks": line.trained.blocks,
            "parameters": [[name, list(parameter.shape)] for name, parameter in self.parameters.items()],
        }
        return save_checkpoint(directory, line.state.version, {**outer, **local, **groups}, {**about, **meta}, keep)

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Take outer state, commit and uncommitted progress from a checkpoint. Raises StateError."""
        line = self.line
        text = checkpoint.meta.get("commit")
        commit = Commit.from_bytes(text.encode()) if isinstance(text, str) else None
        adopt_state(line, outer_state(checkpoint, line.layout, line.optimizer), commit)
        for name, tensor in checkpoint.groups.get("local", {}).items():
            self.parameters[name].data.copy_(tensor)
        line.trained = Trained(checkpoint.value("tokens", int), checkpoint.value("blocks", int))

    def _terms(self, data: str) -> Terms:
        contract, timeouts, layout = self.contract, self.site.timeouts, self.line.layout
        rules = Rules(
            run=contract.run.name,
            contract=contract.digest,
            parts=tuple(fragment.parts for fragment in layout.fragments),
            start_peers=contract.membership.start_peers,
            lease_blocks=contract.lease_blocks,
            match_deadline_s=contract.membership.match_deadline_s,
            backlog_versions=contract.membership.backlog_versions,
        )
        return Terms(
            contract_json=contract.to_json().encode(),
            rules=rules,
            timing=Timing(timeouts.heartbeat_s, timeouts.suspect_s, timeouts.stall_s),
            layout=layout,
            codec=self.line.codec,
            optimizer=self.line.optimizer,
            total_tokens=contract.run.total_tokens,
            data=data,
        )


OnClosed = Callable[[Commit, Commit | None, Counted | None, dict[str, float]], None]
"""Told of every version: its commit, the one before, our entry in it, and the seconds of each step."""
