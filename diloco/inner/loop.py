"""The inner loop: what one peer does between two rounds, as any PyTorch training script would.

A step takes a block of sequences through forward, backward, clipping and the inner optimizer. The learning rate
follows the tokens of the whole run and not a count of steps, so it means the same whoever takes part.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from diloco.base.errors import StateError
from diloco.config.contract import InnerSection
from diloco.inner.meter import Phases
from diloco.inner.muon import LR_RATIO, MuonAdamW, muon_parameters
from diloco.island.parallel import ModelRanks, give_back
from diloco.island.pipeline import Pipelined
from diloco.island.slices import Pieces, Shape, Slice, full, held
from diloco.models.moe import routers
from diloco.models.transformer import token_loss
from diloco.outer.fragments import named_parameters

Forward = Callable[[Tensor], Tensor]
Reduce = Callable[[list[nn.Parameter]], None]


def learning_rate(section: InnerSection, total_tokens: int, tokens: int) -> float:
    """Inner learning rate of the step that ends when the run has trained `tokens` of `total_tokens`.

    Linear warm-up over the first `warmup` share of the run; then cosine to `final_lr` x `lr`; or constant; or, for
    `wsd`, constant until a linear fall to `final_lr` x `lr` over the last `decay` share (arXiv 2404.06395, section 4).
    """
    position = min(tokens / total_tokens, 1.0)
    rise = _ramp(position, 0.0, section.warmup)
    if section.schedule == "cosine":
        fall = (1 - math.cos(math.pi * _ramp(position, section.warmup, 1.0))) / 2
    elif section.schedule == "wsd":
        fall = _ramp(position, 1 - section.decay, 1.0)
    else:
        fall = 0.0
    return section.lr * rise * (1 - (1 - section.final_lr) * fall)


def _ramp(position: float, start: float, stop: float) -> float:
    """Ramp of the inner learning rate: 0 up to `start`, 1 from `stop` on, linear between."""
    return min(max((position - start) / (stop - start), 0.0), 1.0) if start < stop else float(position >= stop)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups of the inner optimizer: matrices and embeddings decay, norms and biases do not; shared ones appear once.

    A router's bias is not the optimizer's: its gradient is a load error (`diloco.models.moe`).
    """
    balancing = {id(router.bias) for router in routers(model)}
    parameters = [p for p in model.parameters() if p.requires_grad and id(p) not in balancing]
    decayed = [parameter for parameter in parameters if parameter.ndim >= 2]
    others = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [{"params": part, "weight_decay": weight_decay} for part in by_mesh(decayed)]
    return groups + [{"params": part, "weight_decay": 0.0} for part in by_mesh(others)]


T = TypeVar("T", bound=Tensor)


def by_mesh(tensors: Iterable[T]) -> list[list[T]]:
    """Parameters or gradients of inner steps, grouped by device mesh or none: torch's functions of lists mix no two.

    Divided experts are on another one than all else.
    """
    parts: dict[object, list[T]] = {}
    for tensor in tensors:
        parts.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(parts.values())


def next_token_loss(model: Forward, block: Tensor) -> Tensor:
    """Loss of an inner step: mean cross-entropy (nats, fp32 scalar) of the next tokens in `block`, int64 (n, L + 1)."""
    return token_loss(model(block[:, :-1]), block[:, 1:])


class InnerLoop:
    """Inner steps on one model: AdamW, Muon or plain SGD, accumulation, clipping, autocast."""

    def __init__(
        self,
        model: nn.Module,
        section: InnerSection,
        total_tokens: int,
        device: torch.device,
        *,
        compile: bool = False,
        ranks: ModelRanks | None = None,
    ) -> None:
        """`model` is on `device`, or moved there where it is not spread over `ranks`. State has its bare names.

        `total_tokens` are the run's (`run.total_tokens`). `compile` runs the model through `torch.compile`.
        """
        self.model = model if ranks else model.to(device)
        self._ranks = ranks or ModelRanks(self.model)
        self._pipeline = self._ranks if isinstance(self._ranks, Pipelined) else None
        self.section = section
        self.total_tokens = total_tokens
        self.device = device
        self.optimizer = make_optimizer(model, section)
        self.steps = 0
        self.nonfinite_steps = 0
        """Steps without an update because the gradient was infinite or NaN."""
        self.lr = 0.0
        """Learning rate of the last step."""
        forward = self._ranks.forward
        self._forward: Forward = torch.compile(forward) if compile else forward
        self._parameters: list[nn.Parameter] = [p for g in self.optimizer.param_groups for p in g["params"]]
        self._routers = routers(model)
        self.phases = Phases(device)
        """Seconds of `forward`, `backward`, `reduce` (where the caller does that) and `optimizer`."""

    def step(self, block: Tensor, tokens: int, reduce: Reduce | None = None) -> float:
        """One inner step on `block`, int64 (batch_size x accumulation, L + 1). Returns the mean loss in nats per token.

        `tokens`: how many the run has trained at the end of this step; sets the learning rate. `reduce` may average the
        gradients over an island's ranks in place, after the last backward pass and before clipping.
        """
        self.lr = learning_rate(self.section, self.total_tokens, tokens)
        loss = self._backward(block.to(self.device))
        if reduce is not None:
            with self.phases.device("reduce"):
                reduce(self._parameters)
        with self.phases.device("optimizer"):
            self._update()
        self.steps += 1
        value = loss.item()  # the device is done
        self.phases.read()
        return value

    def _backward(self, block: Tensor) -> Tensor:
        """Backward of an inner step: gradient of the mean loss over `block`, by micro-batch. Returns that loss."""
        micro_batches = torch.split(block, self.section.batch_size)
        if self._pipeline is not None:
            with self.phases.device("pipeline"):
                return self._pipeline.backward(micro_batches)
        total = torch.zeros((), device=self.device)
        for index, micro_batch in enumerate(micro_batches):
            with self._ranks.micro_batch(last=index == len(micro_batches) - 1):
                bf16 = torch.autocast(self.device.type, torch.bfloat16, enabled=self.section.precision == "bf16")
                with self.phases.device("forward"), bf16:
                    loss = objective = full(next_token_loss(self._forward, micro_batch))
                share = len(micro_batch) / len(block)
                for router in self._routers:
                    objective = objective + router.take_loss()
                with self.phases.device("backward"):
                    torch.autograd.backward(objective * share)
            total += loss.detach() * share
        return total

    def _update(self) -> None:
        """Clip the gradient by its norm over all ranks and let the inner optimizer move the parameters."""
        pipeline = self._pipeline
        counted = [p for p in self._parameters if pipeline is None or pipeline.counts(p)]
        gradients = [p.grad for p in counted if p.grad is not None]
        norms = [full(torch.nn.utils.get_total_norm(part)) for part in by_mesh(gradients)]
        norm = norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms)
        if pipeline is not None:
            norm = pipeline.norm(norm)
        if math.isfinite(norm.item()):
            if self.section.clip:
                for part in by_mesh(self._parameters):
                    torch.nn.utils.clip_grads_with_norm_(part, self.section.clip, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr * group.get(LR_RATIO, 1.0)
            self.optimizer.step()
            for router in self._routers:
                router.rebalance()
        else:
            # One bad batch would turn every parameter into NaN, and the next pseudo-gradient would poison the anchor
            # of all peers.
            self.nonfinite_steps += 1
        self.model.zero_grad(set_to_none=True)

    def expert_imbalance(self) -> list[float]:
        """`Router.imbalance` of each block's experts in the last inner step; empty for a dense model. In a pipeline:
        of the blocks that this rank has."""
        return [round(router.imbalance(), 3) for router in self._routers]

    def numbers(self) -> dict[str, int]:
        """Counts of the inner loop's steps, for a checkpoint."""
        return {"steps": self.steps, "nonfinite_steps": self.nonfinite_steps}

    def weights(self) -> list[Slice]:
        """Slices of the trained parameters that this rank holds: views, which inner steps move."""
        return [held(name, parameter) for name, parameter in named_parameters(self.model).items()]

    def state(self) -> list[Slice]:
        """Slices of the inner optimizer's state that this rank holds, as `<parameter>/<key>`: views, which inner steps
        move."""
        return [
            held(f"{name}/{key}", value)
            for name, parameter in named_parameters(self.model).items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        ]

    def load_state(self, numbers: Mapping[str, Any], state: Pieces, known: Collection[str] = ()) -> None:
        """Load the inner loop's `numbers`, and this rank's slices of its `state`, as these ranks or others saved them.

        `known`: parameters of all ranks; entries of those that only others hold are left out. Raises StateError when it
        belongs to another model or optimizer.
        """
        if not all(type(numbers.get(name)) is int for name in ("steps", "nonfinite_steps")):
            raise StateError("inner optimizer state without step counts", "resume from another checkpoint")
        named = named_parameters(self.model)
        elsewhere = set(known) - named.keys()
        shapes = {entry: state.shape(entry) for entry in state if entry.rpartition("/")[0] not in elsewhere}
        _check_state(shapes, named, self.optimizer)
        self.steps, self.nonfinite_steps = int(numbers["steps"]), int(numbers["nonfinite_steps"])
        self.optimizer.state.clear()
        for entry in state:
            name, _, key = entry.rpartition("/")
            if name in named:
                parameter = named[name].detach()
                value = torch.empty_like(parameter) if state.shape(entry) else torch.empty((), device=parameter.device)
                state.read(held(entry, value))
                self.optimizer.state[named[name]][key] = value


def make_optimizer(model: nn.Module, section: InnerSection) -> torch.optim.Optimizer:
    """The contract's inner optimizer over `parameter_groups`. SGD is plain: no momentum, so nothing to remember.

    Raises ConfigError when this torch does not have it.
    """
    groups = parameter_groups(model, section.weight_decay)
    match section.optimizer:
        case "sgd":
            return torch.optim.SGD(groups, lr=section.lr)
        case "muon":
            return MuonAdamW(groups, muon_parameters(model), section)
        case "adamw":
            # Fused is one pass over memory, on the CPU too: 0.75 ms for 1M parameters on one core, foreach takes 2.5.
            return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=True)


def _state_keys(group: Mapping[str, Any]) -> set[str]:
    """Keys of the inner optimizer's state for a parameter that it has moved, from the settings of its group."""
    if "betas" in group:
        return {"step", "exp_avg", "exp_avg_sq"}
    return {"momentum_buffer"} if "ns_steps" in group else set()


def _check_state(shapes: Mapping[str, Shape], named: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Raise StateError unless each parameter has all of the inner optimizer's entries, or none, in its own shape."""
    fix = "resume with the contract that wrote the checkpoint"
    got: dict[str, set[str]] = {}
    for entry, found_shape in shapes.items():
        name, _, key = entry.rpartition("/")
        got.setdefault(name, set()).add(key)
        parameter = named.get(name)
        shape = None if parameter is None else () if key == "step" else tuple(parameter.shape)
        if found_shape != shape:
            raise StateError(f"inner optimizer state {entry}: shape {found_shape}, this model expects {shape}", fix)
    keys = {p: _state_keys(group) for group in optimizer.param_groups for p in group["params"]}
    for name, found in got.items():
        expected = keys[named[name]]
        if found != expected:
            cause = f"inner optimizer state of {name}: has {sorted(found)}, this optimizer needs {sorted(expected)}"
            raise StateError(cause, fix)


def evaluate(
    model: nn.Module, blocks: Tensor, batch_size: int, device: torch.device, ranks: ModelRanks | None = None
) -> float:
    """Evaluation: mean loss in nats per token over `blocks`, int64 (n, L + 1), `batch_size` sequences at a time, in
    fp32 but where ranks have parameters as bf16 only.

    Summed exactly, so the batch size changes no more than rounding. Each module's training mode is restored. The
    `ranks` that a model is spread over evaluate the same blocks together.
    """
    ranks = ranks or ModelRanks(model)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=ranks.bf16)
        with torch.no_grad(), ranks.micro_batch(last=True), autocast:
            losses = []
            for rows in torch.split(blocks, batch_size):
                rows = rows.to(device)
                loss = ranks.loss(rows) if isinstance(ranks, Pipelined) else full(next_token_loss(ranks.forward, rows))
                losses.append(loss.item() * len(rows))
    finally:
        give_back(model)  # no backward pass did it
        for module, training in modes:
            module.training = training
    return math.fsum(losses) / len(blocks)


def seed_everything(seed: int) -> None:
    """Seed the random states that inner steps draw from: Python, NumPy and torch (CPU and GPUs)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_states() -> dict[str, Tensor | int | float]:
    """Random states that inner steps draw from (Python, NumPy, torch on CPU and this GPU), as tensors and numbers."""
    _, words, gauss = random.getstate()
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)
    states: dict[str, Tensor | int | float] = {
        "python": torch.tensor(words),
        "numpy": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
        "numpy_position": numpy_state["state"]["pos"],
        "numpy_has_gauss": numpy_state["has_gauss"],
        "numpy_gauss": numpy_state["gauss"],
        "torch": torch.get_rng_state(),
    }
    if gauss is not None:
        states["python_gauss"] = gauss
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Restore the random states of inner steps; a GPU's only where there is a GPU. Raises KeyError if one is absent."""
    random.setstate((3, tuple(states["python"].tolist()), states.get("python_gauss")))
    keys = states["numpy"].numpy().astype(np.uint32)
    gauss = (states["numpy_position"], states["numpy_has_gauss"], states["numpy_gauss"])
    np.random.set_state(("MT19937", keys, *gauss))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
