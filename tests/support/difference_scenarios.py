"""What the ranks do in the tests of ranks that do something different: another order, another call, another norm.

Each scenario takes a group, the odd rank, what it does differently, and the library whose scaler is meant: "numpy" or
"torch". It returns what the rank was told, and nothing that depends on how far the others came.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any
from unittest import mock

from group_scenarios import fresh
from scenarios import TIMEOUT, Trainer, failure_of, gradients, loss, rank_and_size
from worlds import Failure

import gradscale


def swapped_steps(group: Any, is_odd: bool, library: str, unscales: bool = False) -> Failure | None:
    """Step two optimizers, in the second iteration in another order on the odd rank."""
    trainer = Trainer(group, library)
    trainer.iterate(unscales=unscales)
    return failure_of(lambda: trainer.iterate((1, 0) if is_odd else (0, 1), unscales))


def swapped_unscaling(group: Any, is_odd: bool, library: str) -> Failure | None:
    """Unscale two optimizers, in the second iteration in another order on the odd rank."""
    return swapped_steps(group, is_odd, library, unscales=True)


def swapped_scalers(group: Any, is_odd: bool, library: str) -> Failure | None:
    """Use two scalers over one group, in another order on the odd rank from the first iteration on."""
    trainers = [Trainer(group, library, 1) for _ in range(2)]

    def train() -> None:
        for trainer in reversed(trainers) if is_odd else trainers:
            trainer.iterate((0,))

    return failure_of(train)


def step_left_out(group: Any, is_odd: bool, library: str) -> Failure | None:
    """Leave out a step after unscale_ on the odd rank."""
    trainer = Trainer(group, library, 1)
    trainer.scaler.unscale_(trainer.optimizers[0])
    if not is_odd:
        trainer.scaler.step(trainer.optimizers[0])
    trainer.scaler.update()
    return failure_of(lambda: trainer.iterate((0,)))


# What the odd rank is asked to clip to, and the others.
NORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "norm_of_rank": ({"max_norm": 2.0, "norm_over": "rank"}, {"max_norm": 1.0, "norm_over": "rank"}),
    "norm_of_group": ({"max_norm": 2.0, "norm_over": "group"}, {"max_norm": 1.0, "norm_over": "group"}),
    # One float32, and two float64.
    "last_digit_of_norm": (
        {"max_norm": 0.1 * (1 + 2**-40), "norm_over": "rank"},
        {"max_norm": 0.1, "norm_over": "rank"},
    ),
    "norm_left_out": ({}, {"max_norm": 1.0, "norm_over": "rank"}),
    "group_norm_alone": ({"max_norm": 1.0, "norm_over": "group"}, {"max_norm": 1.0, "norm_over": "rank"}),
}


def clipped(group: Any, library: str, **settings: Any) -> Failure | None:
    """Unscale and step with these settings."""
    trainer = Trainer(group, library, 1)

    def train() -> None:
        trainer.scaler.unscale_(trainer.optimizers[0], **settings)
        trainer.scaler.step(trainer.optimizers[0])

    return failure_of(train)


def diagnosis_alone(group: Any, is_odd: bool, library: str) -> Failure | None:
    """Gather a diagnosis on the odd rank alone, where the others step."""
    trainer = Trainer(group, library)
    trainer.iterate()

    def train() -> None:
        if is_odd:
            trainer.scaler.diagnose(trainer.optimizers[0], gather=True)
        trainer.iterate()

    return failure_of(train)


def diagnosis_of_another(group: Any, is_odd: bool, library: str) -> Failure | None:
    """Gather the diagnosis of another optimizer on the odd rank."""
    trainer = Trainer(group, library)
    trainer.iterate()
    return failure_of(lambda: trainer.scaler.diagnose(trainer.optimizers[is_odd], gather=True))


def agreement_without_a_scaler(group: Any, is_odd: bool, library: str) -> Failure | None:
    """Use a GroupAgreement on the odd rank, where the others step."""
    trainer = Trainer(group, library, 1)
    policy = gradscale.DynamicScale()
    agree = gradscale.GroupAgreement(group, policy, timeout=TIMEOUT)
    state = policy.init(loss(library))
    _, nonfinite = gradscale.unscale(gradients(library), state)

    def train() -> None:
        if is_odd:
            agree(nonfinite, state)
        trainer.iterate((0,))

    return failure_of(train)


def step_refused(group: Any, is_odd: bool, library: str) -> Failure | None:
    """Step with gradients that are refused on the odd rank: no arrays, or float16."""
    trainer = Trainer(group, library, 1, **({"allow_fp16_grads": False} if library == "torch" else {}))
    trainer.iterate((0,))
    trainer.refill()
    optimizer = trainer.optimizers[0]
    if is_odd and library == "torch":
        (parameter,) = optimizer.param_groups[0]["params"]
        parameter.grad, parameter.data = None, parameter.data.half()
        parameter.grad = parameter.data.clone()
    elif is_odd:
        optimizer.grads = [1.0]
    return failure_of(lambda: trainer.scaler.step(optimizer))


def unscaling_refused(group: Any, is_odd: bool, library: str) -> Failure | None:
    """Clip over the group, with gradients that are refused on the odd rank."""
    trainer = Trainer(group, library, 1)
    if is_odd:
        trainer.optimizers[0].grads = [1.0]
    scaler, optimizer = trainer.scaler, trainer.optimizers[0]
    return failure_of(lambda: scaler.unscale_(optimizer, max_norm=1.0, norm_over="group"))


def differ(group: Any, odd_rank: int, what: str, library: str) -> Failure | None:
    """Run the scenario of this name; what this rank was told."""
    is_odd = rank_and_size(group)[0] == odd_rank
    if what in NORMS:
        return clipped(group, library, **NORMS[what][not is_odd])
    told: Failure | None = globals()[what](group, is_odd, library)
    return told


# Legal programs.


def legal(group: Any, odd_rank: int, library: str) -> list[Any]:
    """Do what ranks may do differently, and much that they must do alike; what every rank ends with."""
    rank, _ = rank_and_size(group)
    is_odd = rank == odd_rank
    trainer = Trainer(group, library, 0)
    # Made in another order, and stepped in one.
    first, second = trainer.optimizer(), trainer.optimizer()
    trainer.optimizers = [second, first] if is_odd else [first, second]
    trainer.iterate()
    if is_odd:
        # Nobody is asked, and nothing is sent.
        trainer.scaler.diagnose(trainer.optimizers[1])
        trainer.scaler = copy.deepcopy(trainer.scaler)
        pickle.dumps(trainer.scaler)
    trainer.iterate(unscales=True)
    trainer.scaler.diagnose(trainer.optimizers[1], gather=True)
    trainer.scaler.load_state_dict(trainer.scaler.state_dict())
    # One that was never met, and is gone after its iteration.
    trainer.optimizers.append(trainer.optimizer())
    trainer.iterate((0, 2, 1))
    trainer.optimizers[2] = trainer.optimizer()
    trainer.iterate((2, 0))
    # Left out on every rank.
    trainer.refill()
    trainer.scaler.unscale_(trainer.optimizers[0])
    trainer.scaler.update()
    trainer.iterate()
    other = Trainer(group, library, 1)
    other.iterate((0,))
    trainer.iterate()
    trainer.scaler = pickle.loads(pickle.dumps(trainer.scaler))
    trainer.scaler.set_group(group)
    trainer.iterate()
    trainer.scaler.set_group(group)
    trainer.iterate()
    other.iterate((0,))
    saved = trainer.scaler.state_dict()
    return [float(saved["scale"]), int(saved["_growth_tracker"]), len(trainer.optimizers)]


# What needs groups of its own.


def first_step(group: Any) -> Failure | None:
    """Make one iteration; what is said."""
    trainer = Trainer(group, "numpy", 1)
    return failure_of(lambda: trainer.iterate((0,)))


def other_version(group: Any, odd_rank: int, version: str, kind: str) -> list[Failure | None]:
    """Run another version on the odd rank; what is said twice, and then over another group of one version."""
    rank, _ = rank_and_size(group)
    given = [fresh(group), fresh(group)] if kind == "list" else fresh(group)
    if kind == "agreement":
        policy = gradscale.DynamicScale()
        agree = gradscale.GroupAgreement(given, policy, timeout=TIMEOUT)
        state = policy.init(loss("numpy"))
        call = lambda: agree(gradscale.unscale(gradients("numpy"), state)[1], state)  # noqa: E731
    else:
        trainer = Trainer(given, "numpy" if kind == "list" else kind, 1)
        call = lambda: trainer.iterate((0,))  # noqa: E731
    mine = version if rank == odd_rank else gradscale.__version__
    with mock.patch.object(gradscale, "__version__", mine):
        told = [failure_of(call) for _ in range(2)]
    if kind != "agreement":
        trainer.scaler.set_group(fresh(group))
        told.append(failure_of(call))
    return told


def grid_in_another_order(groups: list[Any], is_odd: bool, library: str, settings: dict[str, Any]) -> Failure | None:
    """Agree over the rows and columns of a grid, in another order on the odd rank."""
    trainer = Trainer(groups[::-1] if is_odd else groups, library, 1, **settings)
    return failure_of(lambda: trainer.iterate((0,)))


def grid_of_mpi(comm: Any, odd_rank: int, library: str) -> list[Failure | None]:
    """Agree over the rows and columns of 2 x 2 ranks: in one order, and in another on the odd rank."""
    row = comm.Split(color=comm.rank // 2, key=comm.rank)
    column = comm.Split(color=comm.rank % 2, key=comm.rank)
    policies: list[Any] = [{}, {"policy": gradscale.StaticScale(4.0)}]
    told = [
        grid_in_another_order([row, column], is_odd and comm.rank == odd_rank, library, settings)
        for settings in policies
        for is_odd in (False, True)
    ]
    row.Free()
    column.Free()
    return told


def torch_norm_on_one_rank(group: Any, odd_rank: int) -> Failure | None:
    """Clip DTensors over their mesh on the odd rank, where the others unscale."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import gradscale_torch

    rank, size = rank_and_size(group)
    mesh = init_device_mesh("cpu", (size,))
    parameter = torch.nn.Parameter(distribute_tensor(torch.ones(2 * size), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(torch.ones(2 * size), mesh, [Shard(0)])
    scaler = gradscale_torch.GradScaler("cpu", timeout=TIMEOUT)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler.scale(torch.ones(()))

    def train() -> None:
        scaler.unscale_(optimizer, **({"max_norm": 1.0} if rank == odd_rank else {}))
        scaler.step(optimizer)

    return failure_of(train)
