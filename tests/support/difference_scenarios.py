"""What the ranks do in the tests of ranks that do something different: another order, another call, another norm.

Each scenario takes a group, the odd rank, what it does differently, and the library whose scaler is meant: "numpy" or
"torch". It asserts what its rank is told, which does not depend on how far the others came.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

from group_scenarios import fresh
from scenarios import TIMEOUT, Trainer, agreement, gradients, loss, raised, rank_and_size

import gradscale

ORDER = "optimizer from 0 to 1 (here {}), numbered in the order in which the scaler has met them"
CALLS = {
    "step": "unscale_() or step()",
    "norm": "unscale_(max_norm=), for the norm over the group",
    "diagnosis": "diagnose(gather=True)",
    "agreement": "a GroupAgreement",
}


def calls(own: str, other: str) -> str:
    """Return what is said of two calls that meet, in the order in which they are listed above."""
    least, most = sorted([own, other], key=list(CALLS).index)
    return f"the call itself from {CALLS[least]} to {CALLS[most]} (here {CALLS[own]})"


def norms(own: Any, other: Any) -> str:
    """Return what is said of two largest norms."""
    least, most = sorted([own, other], key=lambda value: -1.0 if value is None else value)
    return f"max_norm from {least} to {most} (here {own})"


def both(said: Callable[..., str], odd: Any, others: Any) -> tuple[str, str]:
    """Return what the odd rank is told, and what the others are."""
    return said(odd, others), said(others, odd)


# What the odd rank is told is its own error, at once.
REFUSED = ("", "rank {odd_rank} has refused its gradients")
TOLD: dict[str, tuple[str, str]] = {
    "swapped_steps": (ORDER.format(1), ORDER.format(0)),
    "swapped_unscaling": (ORDER.format(1), ORDER.format(0)),
    "swapped_scalers": ("numbered in the order of their construction",) * 2,
    "step_left_out": ("steps made so far from 0 to 1 (here 0)", "steps made so far from 0 to 1 (here 1)"),
    "diagnosis_alone": both(calls, "diagnosis", "step"),
    "diagnosis_of_another": (ORDER.format(1), ORDER.format(0)),
    "agreement_without_a_scaler": both(calls, "agreement", "step"),
    "step_refused": REFUSED,
}
# Of gradscale's own scaler alone: torch's replacement finds the group of a norm in the parameters.
TOLD_OF_NORMS: dict[str, tuple[str, str]] = {
    "norm_of_rank": both(norms, 2.0, 1.0),
    "norm_of_group": both(norms, 2.0, 1.0),
    "last_digit_of_norm": ("max_norm, in digits that float32 does not have",) * 2,
    "norm_left_out": both(norms, None, 1.0),
    "group_norm_alone": both(calls, "norm", "step"),
    "unscaling_refused": REFUSED,
}
# What the odd rank is asked to clip to, and the others.
NORMS: dict[str, tuple[Any, Any]] = {
    "norm_of_rank": ((2.0, "rank"), (1.0, "rank")),
    "norm_of_group": ((2.0, "group"), (1.0, "group")),
    # One float32, and two float64.
    "last_digit_of_norm": ((0.1 * (1 + 2**-40), "rank"), (0.1, "rank")),
    "norm_left_out": (None, (1.0, "rank")),
    "group_norm_alone": ((1.0, "group"), (1.0, "rank")),
    "unscaling_refused": ((1.0, "group"), (1.0, "group")),
}


def refuse(trainer: Trainer) -> None:
    """Give the first optimizer a gradient that is none."""
    optimizer = trainer.optimizers[0]
    if trainer.library == "torch":
        (parameter,) = optimizer.param_groups[0]["params"]
        parameter.grad = parameter.detach().new_ones(1).expand(3)
    else:
        optimizer.grads = [1.0]


def train(group: Any, what: str, is_odd: bool, library: str) -> None:
    """Make the iterations of a scenario; the odd rank's differ."""
    if what == "swapped_scalers":
        # Over one group, in another order from the first iteration on.
        trainers = [Trainer(group, library, 1) for _ in range(2)]
        for one in reversed(trainers) if is_odd else trainers:
            one.iterate((0,))
    has_one = what in ("step_left_out", "agreement_without_a_scaler", "step_refused") or what in NORMS
    trainer = Trainer(group, library, 1 if has_one else 2)
    order = (0,) if has_one else (0, 1)
    scaler, optimizer = trainer.scaler, trainer.optimizers[0]
    if what in NORMS:
        if is_odd and what == "unscaling_refused":
            refuse(trainer)
        asked = NORMS[what][not is_odd]
        scaler.unscale_(optimizer, **({} if asked is None else {"max_norm": asked[0], "norm_over": asked[1]}))
        scaler.step(optimizer)
    if what == "step_left_out":
        scaler.unscale_(optimizer)
        if not is_odd:
            scaler.step(optimizer)
        scaler.update()
    elif what == "agreement_without_a_scaler" and is_odd:
        agreeing(group, library)()
    elif what == "step_refused":
        if is_odd:
            refuse(trainer)
        scaler.step(optimizer)
    elif not has_one:
        trainer.iterate(unscales=what == "swapped_unscaling")
    if what == "diagnosis_of_another" or (what == "diagnosis_alone" and is_odd):
        scaler.diagnose(trainer.optimizers[is_odd], gather=True)
    swaps = is_odd and what.startswith("swapped")
    trainer.iterate(order[::-1] if swaps else order, what == "swapped_unscaling")


def agreeing(group: Any, library: str) -> Callable[[], Any]:
    """Return a call of a GroupAgreement."""
    policy = gradscale.DynamicScale()
    agree, state = agreement(group, policy), policy.init(loss(library))
    return lambda: agree(gradscale.unscale(gradients(library), state)[1], state)


def differ(group: Any, odd_rank: int, what: str, library: str) -> None:
    """Do something differently on one rank; each is told of it by a ScaleDesyncError that names it."""
    rank, size = rank_and_size(group)
    is_odd = rank == odd_rank
    said = (TOLD | TOLD_OF_NORMS)[what][not is_odd].format(odd_rank=odd_rank)
    if not said:
        kinds: Any = (gradscale.InvalidTypeError, gradscale.InvalidValueError)
        raised(kinds, lambda: train(group, what, is_odd, library))
        return
    call = lambda: train(group, what, is_odd, library)  # noqa: E731
    error = raised(gradscale.ScaleDesyncError, call, said, f"rank {rank} of {size}")
    if what == "swapped_scalers":
        # The group of a world has had the scalers of the cases before.
        found = re.search(r"scaler of the group from (\d+) to (\d+) \(here (\d+)\)", str(error))
        assert found is not None, error
        least, most, own = map(int, found.groups())
        assert (most, own) == (least + 1, most if is_odd else least)


# Legal programs.


def legal(group: Any, odd_rank: int, library: str) -> None:
    """Do what ranks may do differently, and much that they must do alike."""
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
    for _ in range(2):
        trainer.scaler.set_group(group)
        trainer.iterate()
    other.iterate((0,))
    saved = trainer.scaler.state_dict()
    assert (float(saved["scale"]), int(saved["_growth_tracker"])) == (65536.0, 9)


# What needs groups of its own.


def other_version(group: Any, odd_rank: int, version: str, kind: str) -> None:
    """Run another version on the odd rank; all are told, now and again, until they have a group of one version."""
    rank, size = rank_and_size(group)
    own = gradscale.__version__
    given = [fresh(group), fresh(group)] if kind == "list" else fresh(group)
    again: Any = gradscale.ScaleDesyncError
    if kind == "agreement":
        call, again = agreeing(given, "numpy"), gradscale.BackendError
    else:
        trainer = Trainer(given, "numpy" if kind == "list" else kind, 1)
        call = lambda: trainer.iterate((0,))  # noqa: E731
    said = f"two builds of version {own}" if version.startswith(own) else f"versions from {min(own, version)} to "
    with mock.patch.object(gradscale, "__version__", version if rank == odd_rank else own):
        raised(gradscale.ScaleDesyncError, call, said, f"rank {rank} of {size}")
        raised(again, call)
    if kind != "agreement":
        trainer.scaler.set_group(fresh(group))
        call()


def grid_in_another_order(groups: list[Any], is_odd: bool, is_told: bool, library: str, settings: Any) -> None:
    """Agree over the rows and columns of a grid, in another order on the odd rank."""
    trainer = Trainer(groups[::-1] if is_odd else groups, library, 1, **settings)
    if is_told:
        raised(gradscale.ScaleDesyncError, lambda: trainer.iterate((0,)), "position of the group in the list")
    else:
        trainer.iterate((0,))


def grid_of_mpi(comm: Any, odd_rank: int, library: str) -> None:
    """Agree over the rows and columns of 2 x 2 ranks: in one order, and in another on the odd rank."""
    row = comm.Split(color=comm.rank // 2, key=comm.rank)
    column = comm.Split(color=comm.rank % 2, key=comm.rank)
    policies: list[Any] = [{}, {"policy": gradscale.StaticScale(4.0)}]
    for settings in policies:
        for is_odd in (False, True):
            grid_in_another_order([row, column], is_odd and comm.rank == odd_rank, is_odd, library, settings)
    row.Free()
    column.Free()


def torch_norm_on_one_rank(group: Any, odd_rank: int) -> None:
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

    def step() -> None:
        scaler.unscale_(optimizer, **({"max_norm": 1.0} if rank == odd_rank else {}))
        scaler.step(optimizer)

    said = both(calls, "norm", "step")[rank != odd_rank]
    raised(gradscale.ScaleDesyncError, step, said, f"rank {rank} of {size}")
