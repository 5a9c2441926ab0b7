"""Contracts and sites: the files we ship load, a digest means what it says, and every mistake is explained."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from diloco.base.errors import ConfigError, DilocoError, IncompatibleError
from diloco.config.contract import Contract
from diloco.config.load import contract_from_json, load_contract, load_site
from diloco.config.presets import PRESETS
from diloco.config.site import Site
from diloco.config.template import contract_template, site_template

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
PEERS = sorted((ROOT / "peers").glob("*.toml"))

RUN = '[run]\nname = "test"\ntotal_tokens = 1000\n'


def contract(tmp_path: Path, text: str, *overrides: str) -> Contract:
    path = tmp_path / "contract.toml"
    path.write_text(text)
    return load_contract(path, overrides).value


# ---------------------------------------------------------------- the files we ship


@pytest.mark.parametrize(("config", "peer"), itertools.product(CONFIGS, PEERS), ids=lambda path: path.stem)
def test_every_pair_loads(config: Path, peer: Path) -> None:
    run = load_contract(config).value
    load_site(peer)
    assert run.run.name == config.stem
    versions = run.run.total_tokens / (run.tokens_per_step * run.steps_per_round * run.membership.start_peers)
    assert versions >= 10


@pytest.mark.parametrize("path", CONFIGS + PEERS, ids=lambda path: path.stem)
def test_every_file_says_what_it_is_for_and_how_to_use_it(path: Path) -> None:
    comment = path.read_text().split("\n\n[")[0]
    assert comment.startswith("# ")
    assert f"{path.parent.name}/{path.name}" in comment
    assert "#   diloco " in comment


@pytest.mark.parametrize("peer", PEERS, ids=lambda path: path.stem)
def test_a_site_lists_only_what_differs(peer: Path) -> None:
    defaults = {name: value for name, value, _ in load_site(None).rows()}
    written = {name: value for name, value, origin in load_site(peer).rows() if origin != "default"}
    assert written
    assert not {name for name, value in written.items() if value == defaults[name]}


def test_every_contract_has_its_own_digest() -> None:
    digests = {load_contract(path).value.digest for path in CONFIGS}
    assert len(digests) == len(CONFIGS)


def test_the_published_settings() -> None:
    """DiLoCo (arXiv 2311.08105): k = 8, H = 500, 88,000 steps, 1,000 of them warm-up, batches of 512 x 1024 tokens."""
    published = load_contract(ROOT / "configs" / "diloco-150m.toml").value
    steps = published.run.total_tokens / published.tokens_per_step / published.membership.start_peers
    assert (published.membership.start_peers, published.inner.steps, steps) == (8, 500, 88_000)
    assert (published.inner.sequences_per_step, published.data.sequence_length) == (512, 1024)
    assert round(published.inner.warmup * steps) == 1000
    assert (published.inner.lr, published.outer.optimizer) == (4e-4, "nesterov")
    assert (published.outer.lr, published.outer.momentum) == (0.7, 0.9)


# ---------------------------------------------------------------- the digest


def test_a_digest_hashes_effective_values(tmp_path: Path) -> None:
    plain = contract(tmp_path, RUN)
    assert contract(tmp_path, '[run]\ntotal_tokens = 1_000\nname = "test"\n') == plain
    spelled_out = RUN + "[outer]\nmomentum = 0.9\nlr = 0.7\n[inner]\nsteps = 50\nclip = 1\n[membership]\n"
    assert contract(tmp_path, spelled_out).digest == plain.digest
    assert contract(tmp_path, RUN, "inner.steps=50").digest == plain.digest
    assert contract(tmp_path, RUN, "inner.steps=51").digest != plain.digest


def test_a_preset_is_its_values(tmp_path: Path) -> None:
    sizes = "".join(f"{key} = {json.dumps(value)}\n" for key, value in PRESETS["1m"].items())
    preset = contract(tmp_path, RUN + '[model]\npreset = "1m"\n')
    assert contract(tmp_path, RUN + f'[model]\npreset = "1m"\n{sizes}') == preset
    assert preset.model.dim == PRESETS["1m"]["dim"]
    assert contract(tmp_path, RUN + '[model]\npreset = "1m"\nlayers = 9\n').model.layers == 9


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_contract_survives_the_journey(path: Path) -> None:
    sent = load_contract(path).value
    received = contract_from_json(sent.to_json().encode())
    assert received == sent
    assert received.digest == sent.digest
    shuffled = json.dumps(dict(reversed(json.loads(sent.to_json()).items())), indent=2)
    assert contract_from_json(shuffled).digest == sent.digest


def test_the_digest_is_sha256_of_canonical_json(tmp_path: Path) -> None:
    small = contract(tmp_path, RUN)
    canonical = json.dumps(json.loads(small.to_json()), sort_keys=True, separators=(",", ":"))
    assert small.to_json() == canonical
    assert small.digest == hashlib.sha256(canonical.encode()).hexdigest()


def test_every_value_knows_where_it_comes_from(tmp_path: Path) -> None:
    path = tmp_path / "contract.toml"
    path.write_text(RUN + '[model]\npreset = "1m"\nlayers = 9\n')
    rows = {name: (value, origin) for name, value, origin in load_contract(path, ["inner.lr=0.001"]).rows()}
    assert rows["model.layers"] == (9, str(path))
    assert rows["model.dim"] == (PRESETS["1m"]["dim"], "preset 1m")
    assert rows["inner.lr"] == (0.001, "the command line")
    assert rows["inner.steps"] == (50, "default")


# ---------------------------------------------------------------- mistakes


def explained(raised: pytest.ExceptionInfo[DilocoError]) -> tuple[str, str]:
    """Cause and fix: both there, each one printable line."""
    error = raised.value
    for line in (error.cause, error.fix):
        assert line
        assert line.isprintable()
        assert len(line) < 400
    return error.cause, error.fix


SITE_FILE, CONTRACT_FILE = "the site file (peers/*.toml)", "the contract (configs/*.toml)"

CONTRACT_MISTAKES = [
    ("[inner]\nstep = 3", "unknown key inner.step", "did you mean inner.steps?"),
    ("[inner]\nmomentum = 0.9", "unknown key inner.momentum", "did you mean outer.momentum?"),
    ("[sync]\nsteps = 3", "unknown key sync.steps", "did you mean inner.steps?"),
    ("[inner]\ncompile = true", "unknown key inner.compile", f"did you mean device.compile in {SITE_FILE}?"),
    ("[eval]\nxyz = 1", "unknown key eval.xyz", "keys of [eval]: every_versions, sequences"),
    ('[data]\nroot = "x"', "unknown key data.root", f"move it to {SITE_FILE}"),
    ('[device]\nkind = "cpu"', "unknown section [device]", f"[device] belongs in {SITE_FILE}"),
    ("[innr]\nlr = 1.0", "unknown section [innr]", "did you mean [inner]?"),
    ("[zzz]", "unknown section [zzz]", "known: run, membership, data"),
    ("[[inner]]\nlr = 1.0", "'inner' is not a section", "write [inner] on its own line"),
    ("[inner]\nlr = 'fast'", "inner.lr: Input should be a valid number, got 'fast'", "config show"),
    ("[inner]\nsteps = 2.5", "inner.steps: Input should be a valid integer, got 2.5", "config show"),
    ("[inner]\nsteps = true", "inner.steps: Input should be a valid integer, got True", "config show"),
    ("[inner]\nlr = inf", "inner.lr: Input should be a finite number, got inf", "config show"),
    ("[membership]\ngrace_s = inf", "membership.grace_s: Input should be", "correct membership.grace_s in"),
    ("[membership]\nmatch_deadline_s = 1e300", "should be less than or equal to 1000000000, got 1e+300", "in "),
    ("[inner]\nlr = 2024-01-01", "inner.lr: Input should be a valid number, got '2024-01-01'", "config show"),
    ("[inner]\nlr = 0.0", "inner.lr: Input should be greater than 0, got 0.0", "config show"),
    ("[inner]\nbetas = [1, 1, 1]", "inner.betas: Tuple should have at most 2 items", "config show"),
    ("[inner.lr]\nx = 1", "inner.lr: Input should be a valid number", "config show"),
    (
        "[codec]\nname = 'int7'",
        "codec.name: Input should be 'fp32', 'fp16', 'bf16', "
        "'int8', 'int4', 'e3m0', 'two_bit', 'sign', 'topk', 'dct' or 'lowrank', got 'int7'",
        "show",
    ),
    ("[model]\npreset = '1M'", "model.preset '1M' does not exist", "did you mean '1m'?"),
    ("[model]\npreset = 'huge'", "model.preset 'huge' does not exist", "known: "),
    ("[model]\npreset = ['1m']", "model.preset: Input should be a valid string, got ['1m']", "config show"),
    ("[model]\ndim = 10\nheads = 3", "dim (10) must be a multiple of heads (3)", "config show"),
    ("[inner]\nsteps = 10\n[sync]\nfragments = 3", "inner.steps (10) must be a multiple of sync.fragments (3)", "show"),
    ("[codec]\ndensity = 0.1", "codec.density is for topk and dct, not for int8", "config show"),
    ("[codec]\nname = 'topk'\nrank = 2", "codec.rank is for lowrank, not for topk", "config show"),
    ("[[codec.groups]]\nmatch = ['a']\nvalues = 'fp16'", "codec.values is for topk and dct, not for int8", "in "),
    ("[inner]\nsteps = 10\n[sync]\nfragments = 5", "sync.fragments (5) must be at most model.layers (4)", "show"),
    ("[inner]\nbetas = [0.9, 1.0]", "inner.betas.1: Input should be less than 1, got 1.0", "correct inner.betas in"),
    ("[outer]\nbetas = [1.0, 0.9]", "outer.betas.0: Input should be less than 1, got 1.0", "correct outer.betas in"),
    ("[inner", "not valid TOML", "mend that line"),
]


@pytest.mark.parametrize(("text", "cause", "fix"), CONTRACT_MISTAKES)
def test_a_mistake_in_a_contract_is_explained(tmp_path: Path, text: str, cause: str, fix: str) -> None:
    with pytest.raises(ConfigError) as raised:
        contract(tmp_path, RUN + text)
    said, advised = explained(raised)
    assert cause in said
    assert "contract.toml" in said
    assert fix in advised
    assert raised.value.exit_code == 10


def float_keys(schema: type[BaseModel]) -> list[str]:
    """Dotted keys of all floats of a schema, but in `codec.groups`."""
    sections = {name: section.annotation for name, section in schema.model_fields.items()}
    fields = [(name, key, field) for name, one in sections.items() for key, field in one.model_fields.items()]
    return [f"{name}.{key}" for name, key, field in fields if field.annotation in (float, float | None)]


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_no_key_takes_what_is_not_finite(value: str) -> None:
    """A contract travels as JSON, which has no such numbers."""
    keys = {Contract: float_keys(Contract), Site: float_keys(Site)}
    assert len(keys[Contract]) > 20
    assert len(keys[Site]) > 8
    for key in keys[Contract]:
        with pytest.raises(ConfigError, match=rf"the command line: {re.escape(key)}: Input should be") as raised:
            load_contract(None, ["run.name='x'", "run.total_tokens=1", f"{key}={value}"])
        assert f"correct {key} in the command line" in raised.value.fix
    for key in keys[Site]:
        with pytest.raises(ConfigError, match=rf"the command line: {re.escape(key)}: Input should be"):
            load_site(None, [f"{key}={value}"])


@pytest.mark.parametrize("value", ["[" * 10_000, "9" * 5000], ids=["deep", "long"])
def test_a_value_that_python_does_not_read_is_explained(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match="is not valid TOML") as raised:
        contract(tmp_path, f"{RUN}\n[inner]\nsteps = {value}")
    explained(raised)
    with pytest.raises(ConfigError, match=r"the command line: inner\.steps: Input should be a valid integer") as raised:
        contract(tmp_path, RUN, f"inner.steps={value}")
    explained(raised)


@pytest.mark.parametrize(
    ("text", "cause", "fix"),
    [
        ("seed = 1", "'seed' is not a section", "did you mean run.seed?"),
        ('[run]\nname = "test"', "run.total_tokens is missing", "config show"),
        ("", "run is missing", "config show"),
    ],
)
def test_an_incomplete_contract_is_explained(tmp_path: Path, text: str, cause: str, fix: str) -> None:
    with pytest.raises(ConfigError) as raised:
        contract(tmp_path, text)
    said, advised = explained(raised)
    assert cause in said
    assert fix in advised


@pytest.mark.parametrize(
    ("text", "cause", "fix"),
    [
        ("[inner]\nlr = 1.0", "unknown section [inner]", f"[inner] belongs in {CONTRACT_FILE}"),
        (RUN, "unknown section [run]", f"[run] belongs in {CONTRACT_FILE}"),
        ("[data]\npaths = []", "unknown key data.paths", f"move it to {CONTRACT_FILE}"),
        ("[device]\nlr = 1.0", "unknown key device.lr", f"in {CONTRACT_FILE}?"),
        ("[timeouts]\nheartbeat = 1.0", "unknown key timeouts.heartbeat", "did you mean timeouts.heartbeat_s?"),
        ("[network]\nlisten = 'here'", "network.listen: ", "correct network.listen in "),
        ("[network]\nlisten = '127.0.0.1:99999'", "network.listen: the port must be", "correct network.listen in "),
        ("[device]\nthreads = 0", "device.threads: Input should be greater than 0, got 0", "config show"),
    ],
)
def test_a_mistake_in_a_site_is_explained(tmp_path: Path, text: str, cause: str, fix: str) -> None:
    path = tmp_path / "site.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_site(path)
    said, advised = explained(raised)
    assert cause in said
    assert fix in advised


@pytest.mark.parametrize("version", ["2", "0", '"1"'])
def test_another_contract_version_is_named_before_its_unknown_keys(tmp_path: Path, version: str) -> None:
    with pytest.raises(IncompatibleError) as raised:
        contract(tmp_path, RUN + f"contract_version = {version}\nnew_key = 1\n")
    assert f"contract version {version}".replace('"', "'") in explained(raised)[0]
    assert raised.value.exit_code == 16


@pytest.mark.parametrize(
    ("override", "cause"),
    [
        ("inner.lr", "cannot read override 'inner.lr'"),
        ("lr=1", "cannot read override 'lr=1'"),
        ("=1", "cannot read override '=1'"),
        ("inner.lr=", "the command line: inner.lr: Input should be a valid number, got ''"),
        ("inner.lr=fast", "the command line: inner.lr: Input should be a valid number, got 'fast'"),
        ("inner.step=3", "the command line: unknown key inner.step"),
        ("innr.lr=3", "the command line: unknown section [innr]"),
        ("a.b.c=3", "the command line: unknown section [a]"),
        ("model.preset=1M", "the command line: model.preset '1M' does not exist"),
    ],
)
def test_a_mistake_in_an_override_names_the_override(tmp_path: Path, override: str, cause: str) -> None:
    with pytest.raises(ConfigError) as raised:
        contract(tmp_path, RUN, override)
    assert cause in explained(raised)[0]


def test_overrides_read_toml_values_and_bare_words(tmp_path: Path) -> None:
    overrides = [
        "inner.betas=[0.8, 0.9]",
        "codec.zstd=false",
        "run.name=other",
        'data.paths=["a", "b"]',
        "inner.lr=1e-3",
    ]
    changed = contract(tmp_path, RUN, *overrides)
    assert (changed.inner.betas, changed.codec.zstd, changed.run.name) == ((0.8, 0.9), False, "other")
    assert (changed.data.paths, changed.inner.lr) == (("a", "b"), 0.001)


def test_what_an_override_and_the_file_say_together_names_both(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"contract.toml with the command line: inner.steps \(50\) must be a mult"):
        contract(tmp_path, RUN, "sync.fragments=3")


def test_an_override_into_something_that_is_no_section(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'run' is not a section"):
        contract(tmp_path, "run = 5", "run.name=x")


@pytest.mark.parametrize("name", ["dmo.toml", "demmo", "demo.tml", "configs/demo.tom"])
def test_a_missing_contract_gets_the_nearest_name_and_all_that_are_shipped(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as raised:
        load_contract(name)
    cause, fix = explained(raised)
    assert cause == f"contract not found: {tmp_path / name}"
    assert fix.startswith("did you mean demo? shipped contracts: async, chaos, demo,")
    assert all(path.stem in fix for path in CONFIGS)


def test_a_missing_site_gets_the_nearest_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError) as raised:
        load_site("lann.toml")
    assert explained(raised)[1] == "did you mean peers/lan.toml?"
    with pytest.raises(ConfigError) as raised:
        load_site(tmp_path / "nowhere" / "zzzzzz.toml")
    assert explained(raised)[1] == "give the path of a site file (TOML)"


def test_a_shipped_contract_is_found_by_its_name_from_any_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()  # a folder, such as of data, is no contract
    for path in CONFIGS:
        assert load_contract(path.stem).value == load_contract(path).value
    (tmp_path / "quick").write_text(RUN)
    assert load_contract("quick").value == contract(tmp_path, RUN), "a file that is there comes first"


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        load_contract(tmp_path)
    assert explained(raised)[0] == f"cannot read contract {tmp_path}: Is a directory"
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError) as raised:
        load_contract(binary)
    assert "is not UTF-8 text" in explained(raised)[0]


# ---------------------------------------------------------------- numbers of tokens


@pytest.mark.parametrize(
    ("text", "count"),
    [("50M", 50_000_000), ("1.5B", 1_500_000_000), ("2G", 2 * 10**9), ("3k", 3000), ("3 K", 3000), ("0.004M", 4000)],
)
def test_tokens_take_a_unit_and_the_digest_is_that_of_the_number(tmp_path: Path, text: str, count: int) -> None:
    named = contract(tmp_path, f'[run]\nname = "test"\ntotal_tokens = "{text}"\n')
    assert named.run.total_tokens == count
    assert named.digest == contract(tmp_path, f'[run]\nname = "test"\ntotal_tokens = {count}\n').digest
    assert contract(tmp_path, RUN, f"run.total_tokens={text}").run.total_tokens == count


@pytest.mark.parametrize("text", ["50X", "M", "-1M", "0M", "0.0001k", "1e3M", "5MM", "", "9" * 5000 + "M", "50"])
def test_what_is_no_number_of_tokens_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.total_tokens"):
        contract(tmp_path, f'[run]\nname = "test"\ntotal_tokens = "{text}"\n')


# ---------------------------------------------------------------- diloco init


def test_what_init_writes_loads_unchanged_and_shows_every_key(tmp_path: Path) -> None:
    written = tmp_path / "c.toml"
    written.write_text(contract_template("c.toml", "s.toml"))
    local = tmp_path / "s.toml"
    local.write_text(site_template())
    for loaded, path in ((load_contract(written), written), (load_site(local), local)):
        lines = {line.removeprefix("# ").split(" =")[0].split(":")[0] for line in path.read_text().splitlines()}
        assert {key.partition(".")[2] for key, _, _ in loaded.rows()} <= lines
        assert max(map(len, path.read_text().splitlines())) <= 120
    assert load_site(local).value == Site()


def test_the_defaults_that_init_shows_are_the_defaults(tmp_path: Path) -> None:
    """With the # of every default taken away the file means the same."""
    for template, load in ((contract_template("c", "s"), load_contract), (site_template(), load_site)):
        path = tmp_path / "x.toml"
        path.write_text(template)
        before = load(path).value
        path.write_text(re.sub(r"^# ([a-z_]+ = )", r"\1", template, flags=re.MULTILINE))
        after = load(path)
        assert len(after.origin) > 20
        assert after.value.model_dump(exclude={"model"}) == before.model_dump(exclude={"model"})


# ---------------------------------------------------------------- contracts from strangers


def received_run(**keys: Any) -> str:
    return json.dumps({"run": {"name": "test", "total_tokens": 1000, **keys}})


HOSTILE = [
    ("", ConfigError),
    ("[]", ConfigError),
    ("null", ConfigError),
    (b"\xff\xfe", ConfigError),
    ("[" * 200_000, ConfigError),
    ('{"run": ' * 200_000, ConfigError),
    ('{"run": null}', ConfigError),
    ('{"run": {"name": "test", "total_tokens": ' + "9" * 5000 + "}}", ConfigError),
    ('{"run": {"name": "\\ud800", "total_tokens": 1}}', ConfigError),
    (received_run(total_tokens=float("nan")), ConfigError),
    (received_run(total_tokens=True), ConfigError),
    (received_run(total_tokens=1.5), ConfigError),
    (received_run(total_tokens=-1), ConfigError),
    (received_run(name="../../etc"), ConfigError),
    (received_run(name="a\n\x1b[31m" * 500), ConfigError),
    (received_run(**{"\n\x1b[31mowned": 1}), ConfigError),
    (received_run(**{"x" * 5000: 1}), ConfigError),
    (received_run(contract_version="9" * 5000), IncompatibleError),
    (received_run(contract_version={"\x1b[31m": []}), IncompatibleError),
    (received_run(contract_version=None), IncompatibleError),
]


@pytest.mark.parametrize(("text", "kind"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_contract_is_refused_in_two_short_lines(text: str | bytes, kind: type[DilocoError]) -> None:
    with pytest.raises(kind) as raised:
        contract_from_json(text)
    assert "the contract received" in explained(raised)[0]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=8), inside, max_size=3),
    max_leaves=8,
)
names = st.sampled_from([*Contract.model_fields, "x"])
keys = st.sampled_from(["name", "total_tokens", "contract_version", "lr", "steps", "betas", "dim", "preset", "x"])


@given(st.dictionaries(names, st.dictionaries(keys, anything, max_size=3) | anything, max_size=3))
def test_any_json_is_a_contract_or_an_error_of_ours(tree: dict[str, Any]) -> None:
    accepted = accept_or_explain(json.dumps({"run": {"name": "test", "total_tokens": 1}} | tree))
    assert accepted is None or contract_from_json(accepted.to_json()).digest == accepted.digest


def accept_or_explain(text: str) -> Contract | None:
    with contextlib.suppress(ConfigError, IncompatibleError):
        return contract_from_json(text)
    return None
