"""The command line: the only file that prints. Heavy imports happen inside the commands, so that --help is quick."""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from diloco.base.errors import DilocoError, ResourceError, UsageError
from diloco.cli import bench as cli_bench
from diloco.cli import plan as cli_plan
from diloco.observe.telemetry import printable

if TYPE_CHECKING:
    from diloco.observe.telemetry import Event
    from diloco.simulate.virtual.search import Choice

REAL_ONLY = ("peers", "asynchronous", "compare", "out", "site", "overrides")
VIRTUAL_ONLY = ("seed", "seeds", "plan", "policy", "without_majority", "planted")
"""What `simulate` reads without, and with `--virtual`."""

PLANTED_SEEDS = 1000
"""Seeds that a planted bug may stay hidden in."""
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
MOST_LINES = 10_000
"""Of a peer, kept for whoever does not read them."""
LAST_LINES_S = 5.0
"""How long the end of a peer waits for them to be read."""

app = typer.Typer(
    help="Train one model over several datacenters, over ordinary networks, with peers that come and go.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Look at contracts and sites.", no_args_is_help=True)
data_app = typer.Typer(help="Prepare training data.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(data_app, name="data")
app.add_typer(cli_bench.bench_app, name="bench")
app.command(epilog=cli_plan.EPILOG)(cli_plan.plan)

ContractPath = Annotated[Path, typer.Argument(help="The run contract (configs/*.toml): what is trained.")]
JOIN_HELP = "Join the run of the member at HOST:PORT[/DIGEST]; of several, with commas, the first that answers."
SitePath = Annotated[
    Path | None, typer.Option("--site", help="Local settings (peers/*.toml): device, network, folders.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="section.key=value: beats the contract or site file. Repeatable.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="Listen beyond loopback without DILOCO_SECRET: whoever reaches the port may join."),
]


# ---------------------------------------------------------------- running


@app.command(
    epilog="Found a run:  diloco peer configs/demo.toml   |   join it:  diloco peer --join 127.0.0.1:4000/5f2c9a7e11aa"
)
def peer(
    contract: Annotated[Path | None, typer.Argument(help="Found a run with this contract.")] = None,
    join: Annotated[str | None, typer.Option(help=JOIN_HELP)] = None,
    site: SitePath = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on from a checkpoint: its folder, or the peer's (runs/RUN/PEER).")
    ] = None,
    overrides: Overrides = None,
    insecure: Insecure = False,
    name: Annotated[
        str | None, typer.Option(help="This peer's name; the host's and a random suffix by default.")
    ] = None,
    directory: Annotated[Path | None, typer.Option("--dir", help="Where events and checkpoints go.")] = None,
    profile: Annotated[
        int | None,
        typer.Option(min=1, metavar="STEPS", help="Trace so many inner steps, after the first 10, on each rank."),
    ] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="Print events as JSON lines.")] = False,
) -> None:
    """Take part in a run: found it with a CONTRACT, join it with --join, or go on with --resume.

    The founder prints the line that others run to join. The first Ctrl-C (or SIGTERM) leaves in good order: the work
    done is counted if a version closes soon, or handed back. The second ends at once.
    """
    from diloco.config.load import split_overrides
    from diloco.run.options import PeerOptions, checked

    profiled = [f"device.profile_steps={profile}"] if profile else []
    site_overrides, contract_overrides = split_overrides([*profiled, *(overrides or [])])
    options = PeerOptions(contract, join, site, resume, contract_overrides, site_overrides, insecure, name, directory)
    checked(options)  # before torch is imported, which takes seconds

    from diloco.run.launch import run_peer, start_ranks

    code = start_ranks(options, sys.argv[1:])
    if code is not None:
        raise typer.Exit(code)
    with _saying() as say:
        ending = run_peer(options, _signals(), _listener(say, json_lines))
        if ending is not None and not json_lines:
            loss = f", held-out loss {ending.val_loss:.4f}" if ending.val_loss is not None else ""
            lost = f", {ending.discarded_tokens:,} tokens discarded" if ending.discarded_tokens else ""
            say(f"{ending.reason} at version {ending.version}, {ending.tokens:,} tokens{loss}{lost}")
            if ending.spread is not None:
                say(f"averaged in pairs; those that met last were at most {100 * ending.spread:.2g} % apart")
            say(f"state {ending.state_digest[:16]}  chain {ending.chain_digest[:16] or 'none'}")


@app.command(epilog="Example:  diloco witness --join 10.0.0.5:4000/5f2c9a7e11aa --name arbiter")
def witness(
    join: Annotated[str, typer.Option(help=JOIN_HELP)],
    site: SitePath = None,
    overrides: Overrides = None,
    insecure: Insecure = False,
    name: Annotated[str | None, typer.Option(help="This witness's name in the run.")] = None,
    directory: Annotated[Path | None, typer.Option("--dir", help="Where events go.")] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="Print events as JSON lines.")] = False,
) -> None:
    """Vote in a run without training: with a witness, one of two peers goes on when the other is gone.

    Takes a few kilobytes per round, no accelerator and no copy of the model. Put it where both peers can reach it.
    """
    from diloco.run.options import PeerOptions, checked

    options = PeerOptions(None, join, site, None, (), overrides or [], insecure, name, directory)
    checked(options)

    from diloco.run.witness import run_witness

    with _saying() as say:
        ending = run_witness(options, _signals(), _listener(say, json_lines))
        if not json_lines:
            say(f"{ending.reason} at version {ending.version}, {ending.tokens:,} tokens")


@app.command(
    epilog="Examples:  diloco simulate configs/quick.toml --peers 3 --compare ddp --out runs/try   |   "
    "diloco simulate configs/quick.toml --async --speeds 1,1,0.5,0.25 --compare sync   |   "
    "diloco simulate --virtual --seed 7   |   diloco simulate --virtual --seeds 0:100000 --json virtual.json   |   "
    "diloco simulate --virtual --policy async --speeds 0.1:1 --seeds 0:3000"
)
def simulate(
    context: typer.Context,
    contract: Annotated[
        Path | None,
        typer.Argument(help="The run contract (configs/*.toml): what is trained. With --virtual: FILE for --json."),
    ] = None,
    peers: Annotated[int | None, typer.Option(min=1, max=64, help="Real peer processes on loopback; 4.")] = None,
    speeds: Annotated[
        str,
        typer.Option(
            help="One peer for each of these, so many times as fast as it could be: 1,1,0.5,0.25. "
            "--virtual: drawn from LOW:HIGH (0.1:1 for async, else all the same)."
        ),
    ] = "",
    asynchronous: Annotated[
        bool, typer.Option("--async", help="Each at its own pace: the same as --set membership.policy=async.")
    ] = False,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            help="Also train: ddp (torch DistributedDataParallel), average (outer SGD at rate 1), alone, sync "
            "(everybody waits for the slowest). Repeatable."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for results; runs/<run> by default.")] = None,
    site: SitePath = None,
    overrides: Overrides = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON for programs. With --virtual --json FILE: write it there.")
    ] = False,
    virtual: Annotated[
        bool,
        typer.Option("--virtual", help="No processes: the protocol in virtual time, faults drawn from a seed."),
    ] = False,
    seed: Annotated[int | None, typer.Option(help="--virtual: run one seed and tell what happened.")] = None,
    seeds: Annotated[str | None, typer.Option(help="--virtual: run the seeds A:B (B excluded) on all cores.")] = None,
    plan: Annotated[Path | None, typer.Option(help="--virtual: run what this text says (tests/transcripts).")] = None,
    policy: Annotated[str, typer.Option(help="--virtual: only sync, only quorum or only async.")] = "",
    without_majority: Annotated[str, typer.Option(help="--virtual: only wait or only continue.")] = "",
    planted: Annotated[
        bool, typer.Option("--planted", help="--virtual: how many seeds it takes to notice each planted bug.")
    ] = False,
) -> None:
    """Train with N real peer processes on this machine, through the code path of a real run, and compare.

    With --virtual: run the protocol itself through thousands of seeds of faults in virtual time; exit code 1 when an
    invariant breaks. The failure is shrunk to a short plan and told as a transcript.
    """
    _refuse_unread(context, REAL_ONLY if virtual else VIRTUAL_ONLY, virtual)
    if virtual:
        from diloco.simulate.virtual.search import Choice

        choice = Choice(policy, without_majority, speeds=speeds)
        _simulate_virtual(seed, seeds, plan, choice, planted, as_json, contract)
        return
    if contract is None:
        raise UsageError("no contract to simulate", "name one (configs/quick.toml), or say --virtual")
    policies = ["membership.policy=async"] if asynchronous else []
    _simulate_real(contract, peers, speeds, compare or [], out, site, [*policies, *(overrides or [])], as_json)


def _refuse_unread(context: typer.Context, unread: Sequence[str], virtual: bool) -> None:
    """Options of the other kind of simulation would do nothing. Raises UsageError for the first that was given."""
    options = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    sources = {name: context.get_parameter_source(name) for name in unread}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if not given:
        return
    option = options[given[0]]
    if virtual:
        raise UsageError(f"{option} does nothing with --virtual", "leave out one of them")
    fix = "say --virtual, or leave it out"
    raise UsageError(f"{option} needs --virtual", "use --set run.seed=3" if option == "--seed" else fix)


def _simulate_real(
    contract: Path, peers: int | None, speeds: str, compare: list[str], out: Path | None, site: Path | None,
    overrides: list[str], as_json: bool,
) -> None:  # fmt: skip
    from diloco.config.load import split_overrides
    from diloco.simulate.local import SimulateOptions, read_speeds, run_simulation

    by_peer = read_speeds(speeds, peers)
    count = peers or len(by_peer) or 4
    names = dict.fromkeys(part for text in compare for part in text.split(",") if part)
    site_overrides, contract_overrides = split_overrides(overrides)
    options = SimulateOptions(contract, count, tuple(names), out, site, contract_overrides, site_overrides, by_peer)
    live = sys.stdout.isatty() and not as_json
    result = run_simulation(options, _signals(), sys.stderr if as_json else sys.stdout, live)
    print(json.dumps(result.summary, indent=2) if as_json else result.text)
    raise typer.Exit(result.exit_code)


def _simulate_virtual(
    seed: int | None, seeds: str | None, plan: Path | None, choice: Choice, planted: bool, as_json: bool,
    file: Path | None,
) -> None:  # fmt: skip
    from diloco.simulate.virtual import search

    choice.check()
    if file is not None and (file.suffix == ".toml" or not as_json):  # a contract, which must not be written over
        raise UsageError(f"--virtual does not read {file}", "leave it out; --json FILE writes a file")
    if planted:
        table = list(search.catch_planted(PLANTED_SEEDS))
        lines = [f"{caught.bug:16} {caught.seeds or 'not noticed':>6}  {caught.violation}" for caught in table]
        _print_or_write(lines, [asdict(caught) for caught in table], as_json, file)
        raise typer.Exit(0 if all(caught.seeds for caught in table) else 1)
    if seeds is not None:
        first, last = search.seed_range(seeds)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was done until then is told
        report = search.search(first, last, choice, _print_tally)
        _print_or_write(search.report_lines(report), report, as_json, file)
        raise typer.Exit(130 if report["interrupted"] else 1 if report["violations"] else 0)
    outcome = search.tell(search.read_plan(plan) if plan else choice.draw(seed or 0))
    if outcome.violation:
        print(f"{outcome.violation}\nshrinking ...", file=sys.stderr)
        outcome = search.explain(outcome.plan)
    _print_or_write(search.outcome_lines(outcome), search.outcome_json(outcome), as_json, file)
    raise typer.Exit(1 if outcome.violation else 0)


def _print_tally(done: int, total: int, violations: int) -> None:
    text = f"{done:,} of {total:,} seeds, {violations} violations"
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text} " + ("\n" if done >= total else ""))
    elif done >= total or done % 1000 == 0:
        sys.stderr.write(f"{text}\n")


def _print_or_write(lines: Sequence[str], tree: object, as_json: bool, file: Path | None) -> None:
    """Text for people, JSON for programs, or both: JSON in the file. Raises UsageError, when the text is told."""
    print(json.dumps(tree, indent=2) if as_json and file is None else "\n".join(lines))
    if as_json and file is not None:
        cli_plan.write_json(file, tree)


# ---------------------------------------------------------------- looking


@app.command(epilog="Example:  diloco status 127.0.0.1:4000")
def status(
    address: Annotated[str, typer.Argument(help="HOST:PORT of any live member.")], as_json: AsJson = False
) -> None:
    """Ask a member how the run is: version, digest, who is there and how far."""
    from diloco.observe.screen import status_text
    from diloco.run.operate import ask_status

    tree = ask_status(address)
    print(json.dumps(tree, indent=2) if as_json else status_text(tree))


@app.command(epilog="Example:  diloco evict 127.0.0.1:4000 gpu-box-17")
def evict(
    address: Annotated[str, typer.Argument(help="HOST:PORT of any live member.")],
    peer_name: Annotated[str, typer.Argument(metavar="PEER", help="The peer that is dead for good.")],
) -> None:
    """Tell all live members that a peer is dead for good, so that its vote is not waited for.

    Needed only when so many peers died that a majority of the view is gone. Unsafe while that peer lives elsewhere:
    then two halves of the run could go on apart.
    """
    from diloco.protocol.messages import Reply
    from diloco.run.operate import evict_peer

    told, silent, refused = evict_peer(address, peer_name)
    print(f"{printable(peer_name)} is declared dead; told {', '.join(map(printable, told))}")
    for name, reply in refused.items():
        why = "knows a later life of it" if reply is Reply.STALE else f"refuses: {reply.name}"
        print(f"{printable(name)} {why}")
    if silent:
        names = ", ".join(map(printable, silent))
        print(f"{names} did not answer: once more if they are still there, or evict them as well")


@app.command(epilog="Examples:  diloco report runs/demo  ·  diloco report runs/async --table async.json")
def report(
    directory: Annotated[Path, typer.Argument(help="A simulate folder, or one peer's.")],
    tables: Annotated[
        list[Path] | None, typer.Option("--table", help="What a bench wrote with --json, to stand beside the run.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write report.html: one page that opens offline."""
    from diloco.observe.report import Table, write_plot, write_report

    if not (directory / "events.jsonl").is_file() and not any(directory.glob("*/events.jsonl")):
        raise UsageError(f"no events in {directory}", "give the --out folder of a simulation, or the --dir of a peer")
    page = write_report(directory, [Table.read(path) for path in tables or ()])
    plot = write_plot(directory)
    print(json.dumps({"report": str(page), "plot": str(plot)}) if as_json else f"{page}\n{plot}")


PeerFolders = Annotated[
    list[Path], typer.Argument(help="Folders of peers, or a folder that has them inside, such as a simulation's.")
]


@app.command(epilog="Example:  diloco audit runs/demo")
def audit(directories: PeerFolders, as_json: AsJson = False) -> None:
    """Lay the ledgers of several peers side by side: is everything counted once, on one chain, with one state?

    Exits with 1 when anything is not as it must be.
    """
    from diloco.accounts.audit import audit as audit_folders
    from diloco.accounts.audit import audit_text

    result = audit_folders(directories)
    print(json.dumps(result.tree(), indent=2) if as_json else audit_text(result))
    raise typer.Exit(0 if result.clean else 1)


@app.command(
    epilog="Example:  diloco simulate configs/quick.toml --set storage.record=true && diloco replay runs/quick"
)
def replay(
    directories: PeerFolders,
    data_root: Annotated[Path, typer.Option(help="Folder that the contract's paths are relative to.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Make every version once more from the contributions that the peers recorded, and compare the digests.

    Exits with 1 when one comes out otherwise.
    """
    from diloco.accounts.replay import replay as replay_folders
    from diloco.accounts.replay import replay_text

    result = replay_folders(directories, data_root, _print_versions)
    print(json.dumps(result.tree(), indent=2) if as_json else replay_text(result))
    raise typer.Exit(0 if result.exact else 1)


@app.command(epilog="Example:  diloco export runs/demo/p0 exported && ls exported")
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or the folder of a peer.")],
    output: Annotated[Path, typer.Argument(help="Folder to write.")],
    data_root: Annotated[Path, typer.Option(help="Folder that model.hf_config is relative to.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Write the anchor as a plain model: safetensors and config.json, usable with transformers."""
    from diloco.run.export import export as write_export

    path = write_export(_checkpoints_of(checkpoint), output, data_root)
    print(json.dumps({"exported": str(path)}) if as_json else f"exported to {path}")


@app.command("eval", epilog="Example:  diloco eval runs/demo/p0 --json")
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, the folder of a peer, or an exported model.")],
    data_root: Annotated[Path, typer.Option(help="Folder that the contract's data.paths are relative to.")] = Path(),
    sequences: Annotated[int | None, typer.Option(min=1, help="Held-out sequences; the contract's by default.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    as_json: AsJson = False,
) -> None:
    """Held-out loss of a checkpoint's anchor."""
    from diloco.run.export import evaluate_checkpoint

    result = evaluate_checkpoint(_checkpoints_of(checkpoint), data_root, sequences, threads)
    if as_json:
        print(json.dumps(result))
    else:
        at = f"version {result['version']}, {result['tokens']:,} tokens"
        print(f"{at}: held-out loss {result['val_loss']:.4f} nats/token")


@config_app.command("show", epilog="Example:  diloco config show configs/demo.toml --site peers/local.toml")
def config_show(
    contract: ContractPath, site: SitePath = None, overrides: Overrides = None, as_json: AsJson = False
) -> None:
    """Print every effective value and where it comes from."""
    from diloco.config.load import load_contract, load_site, split_overrides

    site_overrides, contract_overrides = split_overrides(overrides or [])
    loaded, local = load_contract(contract, contract_overrides), load_site(site, site_overrides)
    rows = [*loaded.rows(), *local.rows()]
    if as_json:
        values = {name: {"value": value, "from": origin} for name, value, origin in rows}
        print(json.dumps({"digest": loaded.value.digest, "values": values}, indent=2))
        return
    width = max(len(name) for name, _, _ in rows)
    shown = [(name, json.dumps(value), origin) for name, value, origin in rows]
    middle = min(max(len(value) for _, value, _ in shown), 40)
    for name, value, origin in shown:
        print(f"{name:{width}}  {value:{middle}}  {origin}")
    print(f"contract digest {loaded.value.digest}")


@config_app.command("presets")
def config_presets() -> None:
    """List the model presets."""
    from diloco.config.presets import PRESETS

    for name, sizes in PRESETS.items():
        print(f"{name:16} {', '.join(f'{key} {value}' for key, value in sizes.items())}")


@config_app.command("suggest", epilog="Example:  diloco config suggest --params 150M --peers 4")
def config_suggest(
    params: Annotated[str, typer.Option(help="Parameters of the model, embeddings included: 150M, 1.3B.")],
    peers: Annotated[int, typer.Option(min=1, help="Peers that train it together.")],
    steps: Annotated[int, typer.Option(min=1, help="H, inner steps between two syncs.")] = 30,
    sequence_length: Annotated[int, typer.Option(min=1, help="Tokens of one sequence.")] = 2048,
    as_json: AsJson = False,
) -> None:
    """Print learning rates and batch for a model size and a number of peers, by the published scaling laws."""
    from diloco.plan.suggest import parse_parameters, suggest, to_toml

    suggestion = suggest(parse_parameters(params), peers, steps, sequence_length)
    print(json.dumps(asdict(suggestion), indent=2) if as_json else to_toml(suggestion), end="\n" if as_json else "")


@data_app.command("pack", epilog="Example:  diloco data pack corpus/*.txt --output train.bin")
def data_pack(
    paths: Annotated[list[Path], typer.Argument(help="Text or JSONL files, or folders of them.")],
    output: Annotated[Path, typer.Option(help="The shard to write (.bin).")],
    tokenizer: Annotated[str, typer.Option(help="'bytes', or a local Hugging Face tokenizer folder.")] = "bytes",
    text_field: Annotated[str, typer.Option(help="Field of a JSONL record that holds the text.")] = "text",
    as_json: AsJson = False,
) -> None:
    """Turn text into a memory-mapped token shard (data.source = "shards")."""
    from diloco.data.pack import pack
    from diloco.data.tokenizers import open_tokenizer

    result = pack(paths, output, open_tokenizer(tokenizer, Path()), text_field, None if as_json else _print_progress)
    if as_json:
        print(
            json.dumps({"output": str(output), "tokens": result.tokens, "files": result.files, "bytes": result.bytes})
        )
    else:
        print(f"{output}: {result.tokens:,} tokens from {_files(result.files)}, {result.bytes:,} bytes")


# ---------------------------------------------------------------- helpers


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count:,} files"


def _checkpoints_of(path: Path) -> Path:
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def _signals() -> Callable[[], bool]:
    """Install handlers: the first SIGINT, SIGTERM or SIGHUP asks to stop, the second ends the process at once."""
    asked: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        if asked:
            os._exit(128 + number)
        asked.append(number)
        with suppress(OSError):  # a hangup comes where the terminal is gone
            os.write(2, b"leaving in good order; once more to end at once\n")

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handle)
    return lambda: bool(asked)


@contextmanager
def _saying() -> Iterator[Callable[[str], None]]:
    """A way to print lines that nothing waits for, and that cannot fail: a peer's life does not hang on a full disk, a
    closed pipe, or a terminal that is gone or held (Ctrl-S). What is not taken is not kept for ever."""
    waiting: queue.Queue[str | None] = queue.Queue(MOST_LINES)

    def write() -> None:
        try:
            for line in iter(waiting.get, None):
                data = f"{line}\n".encode(sys.stdout.encoding or "utf-8", "backslashreplace")
                while data:
                    data = data[os.write(1, data) :]
        except OSError as error:
            logging.warning("nothing more is printed: %s", error.strerror)

    def say(line: str) -> None:
        with suppress(queue.Full):
            waiting.put_nowait(line)

    thread = threading.Thread(target=write, name="lines", daemon=True)
    thread.start()
    try:
        yield say
    finally:
        with suppress(queue.Full):
            waiting.put_nowait(None)
            thread.join(LAST_LINES_S)


def _listener(say: Callable[[str], None], json_lines: bool) -> Callable[[Event], None]:
    return (lambda event: say(json.dumps(event))) if json_lines else _PeerLines(say)


def _print_progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{done:,} of {total:,} bytes")
        sys.stderr.write("\n" if done >= total else "")


def _print_versions(done: int, total: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{done:,} of {total:,} commits")
        sys.stderr.write("\n" if done == total else "")


class _PeerLines:
    """One line for each event that a person wants to see."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._total_tokens = 0

    def __call__(self, event: Event) -> None:
        line = self._line(_printable(event))
        if line:
            self._say(line)

    def _line(self, event: Event) -> str:
        kind = event["kind"]
        if kind == "start":
            self._total_tokens = event["total_tokens"]
            size = f"{event['parameters']:,} parameters, from version {event['resumed_version']}"
            return f"run {event['run']}, peer {event['peer']}: {size}"
        if kind == "listening":
            return f"listening on {event['address']}\njoin with:  diloco peer --join {event['ticket']}"
        lines: dict[str, Callable[[Any], str]] = {
            "version": self._version,
            "swap": self._swap,
            "witnessed": lambda e: f"v{e['version']}  {e['tokens']:,} tokens  counted {', '.join(e['counted'])}",
            "lineage": lambda e: f"lineage {e['lineage']} goes on; {e['void_tokens']:,} tokens of ours are void",
            "skip": lambda e: f"round for version {e['version']} skipped: {e['reason']}",
            "view": lambda e: f"v{e['version']}  view changed: {_changes(e)}",
            "eval": lambda e: f"v{e['version']}  held-out loss {e['val_loss']:.4f}",
            "copying": lambda e: f"copying the state: {e['done_bytes']:,} of {e['total_bytes']:,} bytes",
            "state": lambda e: f"state of version {e['version']} is here",
            "reason": lambda e: "" if e["routine"] else f"      {e['text']}",
            "warning": lambda e: f"warning: {e['text']}",
            "profile": _profile_line,
        }
        return lines[kind](event) if kind in lines else ""

    def _version(self, event: Any) -> str:
        loss = f"loss {event['loss']:.4f}  " if event["loss"] is not None else ""
        share = 100 * event["tokens"] / self._total_tokens if self._total_tokens else 0
        mine = "" if event["own"] else "  (not ours)"
        names = ", ".join(event["counted"])
        speed = f"{event['tokens_per_s']:,.0f} tok/s"
        counted = f"counted {names}{mine}"
        return f"v{event['version']}  {share:3.0f}%  {event['tokens']:,} tokens  {loss}{speed}  {counted}"

    def _swap(self, event: Any) -> str:
        from diloco.observe.telemetry import readable_share

        loss = f"loss {event['loss']:.4f}  " if event["loss"] is not None else ""
        share = 100 * event["tokens"] / self._total_tokens if self._total_tokens else 0
        how = "averaged with" if event["final"] else "swapped with"
        met = f"{how} {event['partner']}, spread {readable_share(event['spread'])}"
        return f"v{event['version']}  {share:3.0f}%  {event['tokens']:,} tokens  {loss}{met}"


def _printable(value: Any) -> Any:
    """Names and reasons come from other machines."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {key: _printable(entry) for key, entry in value.items()}
    return list(map(_printable, value)) if isinstance(value, list) else value


def _profile_line(event: Event) -> str:
    each = f", and beside it one for each of {event['ranks']} ranks" if event["ranks"] > 1 else ""
    return f"trace of the inner steps: {event['path']}{each}; open it in ui.perfetto.dev or chrome://tracing"


def _changes(event: Event) -> str:
    from diloco.observe.telemetry import departures

    joined = [f"{name} joined" for name in event["joined"]]
    return ", ".join([*joined, *(f"{name} {why}" for name, why in departures(event))])


def main() -> NoReturn:
    """Entry point: errors for people go to standard error in two lines, with the exit code of their class."""
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine("%(levelname)s %(name)s: %(message)s"))
    level = os.environ.get("DILOCO_LOG", "WARNING").upper()
    if level not in logging.getLevelNamesMapping():
        _fail(UsageError(f"DILOCO_LOG is {level!r}", f"use one of {', '.join(LOG_LEVELS)}, or unset it"))
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("grpc").setLevel(logging.CRITICAL)  # it logs what the network damaged; we report what follows
    try:
        app(standalone_mode=True)
    except DilocoError as error:
        _fail(error)
    except PermissionError as error:  # in a folder of runs any file may be somebody else's
        logging.getLogger(__name__).debug("not permitted", exc_info=True)
        _fail(ResourceError(f"{error.filename}: {error.strerror}", "ask its owner, or run as the user who wrote it"))
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


class _OneLine(logging.Formatter):
    """What is logged may name what another machine sent."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = printable(record.message)
        return super().formatMessage(record)


def _fail(error: DilocoError) -> NoReturn:
    sys.stderr.write(f"error: {printable(error.cause)}\n")
    if error.fix:
        sys.stderr.write(f"  fix: {printable(error.fix)}\n")
    if isinstance(error, UsageError):
        sys.stderr.write("  see: diloco --help\n")
    sys.exit(error.exit_code)
