"""Hardware figures: arithmetic on known numbers, phases that add up to the steps, this process's memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diloco.config.contract import Contract
from diloco.config.load import load_contract
from diloco.config.site import DeviceSection
from diloco.inner import meter
from diloco.inner.loop import InnerLoop
from diloco.inner.meter import Phases, Throughput, memory_of, peak_flops
from diloco.models import build_model, count_parameters
from diloco.plan.hardware import DRIVER_NAMES, GPUS, gpu_called
from diloco.plan.model import flops_per_token

CPU = torch.device("cpu")


def contract(**model: object) -> Contract:
    sizes = {"layers": 2, "dim": 32, "heads": 4, "ffn_dim": 64, **model}
    return Contract.model_validate(
        {
            "run": {"name": "meter", "total_tokens": 10**6},
            "data": {"sequence_length": 16},
            "model": sizes,
            "inner": {"batch_size": 2, "accumulation": 2},
        }
    )


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(meter, "monotonic_s", clock)
    return clock


def test_flops_of_a_token_are_six_per_active_parameter_and_attention() -> None:
    dense = contract()
    parameters = count_parameters(build_model(dense.model, 256, 0))
    assert flops_per_token(dense, 256) == 6 * parameters + 12 * 2 * 32 * 16
    sparse = contract(experts=8, experts_per_token=2, expert_dim=16)
    whole = count_parameters(build_model(sparse.model, 256, 0))
    idle = 2 * 6 * 3 * 32 * 16  # layers x experts that a token does not go through x their three matrices
    assert flops_per_token(sparse, 256) == 6 * (whole - idle) + 12 * 2 * 32 * 16
    assert flops_per_token(contract(kind="hf", hf_config="there"), 256) is None


def test_mfu_is_told_of_inner_steps_and_of_all_time(clock: Clock) -> None:
    usage = Throughput(1e9, 1e12, ranks=2, phases=Phases(CPU))
    for _ in range(2):
        usage.step(tokens=500, seconds=1.0)
    clock.now = 4.0
    fields = usage.fields()
    assert (fields["inner_tokens"], fields["inner_s"], fields["wall_s"], fields["flops"]) == (1000, 2.0, 4.0, 1e12)
    assert (fields["flops_per_s"], fields["flops_per_s_wall"]) == (0.5e12, 0.25e12)
    assert (fields["mfu"], fields["mfu_wall"]) == (0.25, 0.125)
    clock.now = 5.0
    fields = usage.fields()  # since then nothing was trained
    assert (fields["inner_tokens"], fields["wall_s"], fields["mfu"], fields["mfu_wall"]) == (0, 1.0, None, 0.0)


def test_without_a_peak_there_is_no_mfu_and_without_sizes_no_flops(clock: Clock) -> None:
    for flops, expected in ((1e9, 1e9), (None, None)):
        usage = Throughput(flops, None, ranks=1, phases=Phases(CPU))
        usage.step(tokens=1, seconds=1.0)
        clock.now += 2.0
        fields = usage.fields()
        assert (fields["flops_per_s"], fields["mfu"], fields["mfu_wall"]) == (expected, None, None)


def test_the_site_s_peak_beats_that_of_a_known_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    assert peak_flops(DeviceSection(), gpu, "bf16") == 989e12
    assert peak_flops(DeviceSection(), gpu, "fp32") is None  # the table has bf16's
    assert peak_flops(DeviceSection(peak_tflops=756.0), gpu, "fp32") == 756e12
    assert peak_flops(DeviceSection(), CPU, "bf16") is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 PCIe")
    assert peak_flops(DeviceSection(), gpu, "bf16") is None


def test_every_gpu_of_the_table_is_one_that_a_plan_knows() -> None:
    assert set(DRIVER_NAMES.values()) == set(GPUS)
    assert gpu_called("NVIDIA L40S") is GPUS["l40s"]


def test_phases_of_real_steps_make_up_the_steps() -> None:
    agreed = load_contract("configs/quick.toml").value
    inner = InnerLoop(build_model(agreed.model, 256, 0), agreed.inner, 10**6, CPU)
    block = torch.zeros((agreed.inner.sequences_per_step, agreed.data.sequence_length + 1), dtype=torch.int64)
    inner.step(block, 0)
    inner.phases.take()
    whole: dict[str, float] = {}
    with meter.timed(whole, "steps"):
        for _ in range(5):
            inner.step(block, 0)
    seconds = inner.phases.take()
    assert set(seconds) == {"forward", "backward", "optimizer"}
    assert all(second > 0 for second in seconds.values())
    assert 0.8 * whole["steps"] < sum(seconds.values()) <= whole["steps"]
    assert inner.phases.take() == {}


@pytest.mark.slow(queued=False)
def test_the_host_s_memory_is_this_process_s_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    before, *device = memory_of(CPU)
    assert device == [0, 0]
    assert 10**7 < before < 10**12
    held = torch.ones(max(before // 4 * 2, 10**7))  # twice the peak in fp32
    assert memory_of(CPU)[0] >= before + held.nbytes // 4
    monkeypatch.setattr(Path, "is_file", lambda _: False)  # where there is no /proc
    assert memory_of(CPU)[0] >= held.nbytes
