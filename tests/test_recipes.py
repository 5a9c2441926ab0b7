"""Site files and launch recipes, as far as they can be checked without a cluster.

Shell parts are run with stand-ins for the programs of the cluster, and what they would start is then read by torchrun's
and by our own command line. YAML is compared with the fields that its reader knows.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml
from torch.distributed.run import get_args_parser

from diloco.cli.main import app
from diloco.config.load import load_contract, load_site
from tests.peers import DEADLINE_S

ROOT = Path(__file__).parent.parent
LAUNCH = ROOT / "peers" / "launch"
SITES = sorted((ROOT / "peers").glob("*.toml"))
JOIN = ["--join", "10.0.0.5:4000/" + 64 * "a"]
SECRET = {"DILOCO_SECRET": "secret"}

# Stand-ins: torchrun writes what it was asked as one line; srun does what it is asked on "two nodes".
SEPARATOR = "\037"
STAND_INS = {
    "torchrun": """#!/bin/sh\nprintf '%s\\037' "$@" >> "$RECORDS"\necho >> "$RECORDS"\n""",
    "scontrol": '#!/bin/sh\n[ "$1 $2" = "show hostnames" ] && printf "node-a\\nnode-b\\n"\n',
    "srun": '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nfor id in 0 1; do SLURM_NODEID=$id "$@"; done\n',
    "curl": "#!/bin/sh\necho 203.0.113.7\n",
}


class Started(NamedTuple):
    """A torchrun that a recipe starts: its own options, and those of `diloco peer`."""

    torchrun: Any
    peer: dict[str, Any]


def dry_run(tmp_path: Path, command: Sequence[str], environment: Mapping[str, str]) -> list[Started]:
    """Processes that a shell command would start."""
    tmp_path.mkdir(exist_ok=True)
    for name, text in STAND_INS.items():
        path = tmp_path / name
        path.write_text(text)
        path.chmod(0o755)
    records = tmp_path / "records"
    path_and_records = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RECORDS": str(records)}
    subprocess.run(command, cwd=ROOT, env={**path_and_records, **environment}, check=True, timeout=DEADLINE_S)
    return [read_torchrun(line.split(SEPARATOR)[:-1]) for line in records.read_text().splitlines()]


def read_torchrun(arguments: list[str]) -> Started:
    """By torch's own parser, then by ours. Both end the process over what they do not know."""
    parsed = get_args_parser().parse_args(arguments)
    assert parsed.module
    assert parsed.training_script == "diloco"
    return Started(parsed, read_diloco(parsed.training_script_args))


def read_diloco(arguments: Sequence[str]) -> dict[str, Any]:
    """Options of `diloco peer` and `diloco witness`, whose files and settings must be there."""
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    command = group.commands[arguments[0]]
    options = dict(command.make_context(arguments[0], list(arguments[1:])).params)
    load_site(ROOT / options["site"], options["overrides"] or [])
    if options.get("contract"):
        load_contract(ROOT / options["contract"])
    return options


# ---------------------------------------------------------------- sites


@pytest.mark.parametrize("path", SITES, ids=lambda path: path.stem)
def test_a_peer_is_left_the_time_to_leave(path: Path) -> None:
    """Torchrun, and compose.yaml, wait 30 s for a process that was asked to end."""
    assert load_site(path).value.timeouts.leave_s < 30


def test_there_is_a_site_for_each_kind_of_island() -> None:
    assert {"home", "gpu", "node-8gpu", "cluster-ib", "cpu", "local"} <= {path.stem for path in SITES}
    kinds = {path.stem: load_site(path).value.device.kind for path in SITES}
    assert all(kinds[name] == "cuda" for name in ("home", "gpu", "node-8gpu", "cluster-ib"))
    assert kinds["cpu"] == "cpu"


# ---------------------------------------------------------------- shell


@pytest.mark.parametrize("path", sorted(LAUNCH.iterdir()), ids=lambda path: path.name)
def test_each_recipe_says_what_was_checked(path: Path) -> None:
    head = path.read_text().split("\n\n")[0]
    assert "Checked: " in head
    assert "ot run" in head


def test_torchrun_on_one_node(tmp_path: Path) -> None:
    command = ["peers/launch/torchrun.sh", *JOIN, "--site", "peers/node-8gpu.toml"]
    (started,) = dry_run(tmp_path, command, SECRET)
    assert started.torchrun.rdzv_backend == "c10d"
    assert started.torchrun.rdzv_conf == "store_type=file,keep_alive_interval=600"
    assert started.torchrun.nproc_per_node == "gpu"
    assert started.peer["join"] == JOIN[1]


def test_torchrun_wants_to_know_its_node() -> None:
    done = subprocess.run(["peers/launch/torchrun.sh"], cwd=ROOT, env={"NODES": "2", "PATH": os.environ["PATH"]},
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode != 0
    assert "NODE_RANK" in done.stderr


def is_island_of_two(started: Sequence[Started], first: str, advertise: str) -> None:
    """Both nodes meet at the first one, and say the same to `diloco peer`."""
    assert [one.torchrun.node_rank for one in started] == [0, 1]
    assert all(one.torchrun.nnodes == "2" and one.torchrun.master_addr == first for one in started)
    assert started[0].peer == started[1].peer
    assert f"network.advertise={advertise}" in started[0].peer["overrides"]


def test_slurm(tmp_path: Path) -> None:
    environment = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node-[a-b]", **SECRET}
    command = ["bash", "peers/launch/slurm.sbatch", *JOIN, "--site", "peers/cluster-ib.toml"]
    is_island_of_two(dry_run(tmp_path, command, environment), "node-a", "node-a:4000")
    lines = (LAUNCH / "slurm.sbatch").read_text().splitlines()
    options = [line.split()[1] for line in lines if line.startswith("#SBATCH")]
    known = {
        "job-name",
        "nodes",
        "ntasks-per-node",
        "gpus-per-node",
        "exclusive",
        "time",
        "signal",
        "requeue",
        "output",
    }
    assert {option.removeprefix("--").split("=")[0] for option in options} == known
    first_command = next(index for index, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(lines.index(line) < first_command for line in lines if line.startswith("#SBATCH"))  # later ones are void


# ---------------------------------------------------------------- YAML


def keys_within(tree: Mapping[str, Any], allowed: str) -> None:
    assert set(tree) <= set(allowed.split()), f"{sorted(set(tree) - set(allowed.split()))} unknown"


def test_kubernetes(tmp_path: Path) -> None:
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    keys_within(service["spec"], "clusterIP publishNotReadyAddresses selector ports")
    keys_within(job["spec"], "completionMode completions parallelism backoffLimit template")
    pod = job["spec"]["template"]["spec"]
    keys_within(pod, """subdomain hostNetwork dnsPolicy restartPolicy terminationGracePeriodSeconds containers
        volumes""")  # fmt: skip
    (container,) = pod["containers"]
    keys_within(container, "name image workingDir command args env resources securityContext volumeMounts")
    assert service["spec"]["selector"]["job-name"] == job["metadata"]["name"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    given = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(given["NODES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(given["RANKS_PER_NODE"])
    assert given["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    environment = {**given, **SECRET, "NODE_ADDRESS": "10.0.0.7"}
    command = [*container["command"], *container["args"]]
    started = [
        one
        for index in ("0", "1")
        for one in dry_run(tmp_path / index, command, environment | {"JOB_COMPLETION_INDEX": index})
    ]
    is_island_of_two(started, "diloco-0.diloco", "10.0.0.7:4000")


def test_skypilot(tmp_path: Path) -> None:
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    keys_within(task, "name num_nodes workdir resources envs secrets setup run")
    keys_within(task["resources"], "accelerators network_tier use_spot disk_size ports")
    assert task["secrets"] == {"DILOCO_SECRET": None}  # must be given
    environment = {
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]), "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "JOIN": JOIN[1], "ADVERTISE": task["envs"]["ADVERTISE"], **SECRET,
    }  # fmt: skip
    started = [
        one
        for rank in ("0", "1")
        for one in dry_run(tmp_path / rank, ["bash", "-c", task["run"]], environment | {"SKYPILOT_NODE_RANK": rank})
    ]
    is_island_of_two(started, "10.0.0.1", "203.0.113.7:4000")
    assert all(one.torchrun.nproc_per_node == "8" for one in started)
    subprocess.run(["bash", "-n", "-c", task["setup"]], check=True)


def test_compose() -> None:
    tree = yaml.safe_load((LAUNCH / "compose.yaml").read_text())
    keys_within({key: tree[key] for key in tree if not key.startswith("x-")}, "name services volumes")
    allowed = "image build environment restart stop_grace_period command ports volumes depends_on"
    for service in tree["services"].values():
        keys_within(service, allowed)
        keys_within(service["build"], "context dockerfile")
        assert service["command"][0] == "diloco"
        read_diloco(service["command"][1:])
        assert (LAUNCH / service["build"]["context"]).resolve() == ROOT
        assert (ROOT / service["build"]["dockerfile"]).is_file()
        assert set(service.get("depends_on", [])) <= set(tree["services"])
    mounted = {mount.split(":")[0] for service in tree["services"].values() for mount in service.get("volumes", [])}
    assert mounted == set(tree["volumes"])


def test_the_image_takes_what_is_there() -> None:
    lines = (LAUNCH / "Dockerfile").read_text().splitlines()
    words = [line.split() for line in lines if line and not line.startswith("#")]
    assert {word[0] for word in words} <= {"FROM", "ARG", "RUN", "WORKDIR", "COPY"}
    copied = [source for word in words if word[0] == "COPY" for source in word[1:-1]]
    assert all((ROOT / source).exists() for source in copied)
    assert {"diloco", "configs", "peers", "pyproject.toml"} <= set(copied)
