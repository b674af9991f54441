"""Whatever one rank does differently is an error on every rank that names it; what ranks may do is none."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import difference_scenarios as scenarios
import numpy as np
import pytest
from axes import require
from scenarios import grid_of_threads
from tiers import later
from worlds import Failure, GlooWorld, MPIWorld, ProcessWorld, ThreadWorld

import gradscale
from gradscale.testing import ThreadCollectives, run_ranks

World = ThreadWorld | ProcessWorld

LIBRARIES = [pytest.param("numpy", id="numpy"), pytest.param("torch", id="torch", marks=pytest.mark.torch)]

OPTIMIZERS = "optimizer from 0 to 1 (here {own}), numbered in the order in which the scaler has met them"
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


# What the odd rank is told is its own error, at once.
REFUSED = ("", "rank {odd_rank} has refused its gradients")
# By the scenario: what the odd rank is told, and what the others are.
TOLD: dict[str, tuple[str, str]] = {
    "swapped_steps": (OPTIMIZERS.format(own=1), OPTIMIZERS.format(own=0)),
    "swapped_unscaling": (OPTIMIZERS.format(own=1), OPTIMIZERS.format(own=0)),
    "step_left_out": ("steps made so far from 0 to 1 (here 0)", "steps made so far from 0 to 1 (here 1)"),
    "diagnosis_alone": (calls("diagnosis", "step"), calls("step", "diagnosis")),
    "diagnosis_of_another": (OPTIMIZERS.format(own=1), OPTIMIZERS.format(own=0)),
    "agreement_without_a_scaler": (calls("agreement", "step"), calls("step", "agreement")),
    "step_refused": REFUSED,
}
# Of gradscale's own scaler alone: torch's replacement finds the group of a norm in the parameters.
TOLD_OF_NORMS: dict[str, tuple[str, str]] = {
    "norm_of_rank": (norms(2.0, 1.0), norms(1.0, 2.0)),
    "norm_of_group": (norms(2.0, 1.0), norms(1.0, 2.0)),
    "last_digit_of_norm": ("max_norm, in digits that float32 does not have",) * 2,
    "norm_left_out": (norms(None, 1.0), norms(1.0, None)),
    "group_norm_alone": (calls("norm", "step"), calls("step", "norm")),
    "unscaling_refused": REFUSED,
}
CASES = [(what, "numpy", *told) for what, told in (TOLD | TOLD_OF_NORMS).items()]
CASES += [(what, "torch", *told) for what, told in TOLD.items()]


def assert_told(result: Any, expected: str, rank: int, size: int) -> None:
    """Assert that a rank was told of a difference by a ScaleDesyncError that says so."""
    assert isinstance(result, Failure), f"rank {rank} was told nothing"
    assert result.kind == "ScaleDesyncError", result.traceback
    assert expected in result.message, result.message
    assert f"rank {rank} of {size}" in result.message


def test_the_comparison_fails_for_a_rank_that_was_told_nothing_or_something_else() -> None:
    right = gradscale.ScaleDesyncError("rank 0 of 2: optimizer")
    assert_told(Failure.of(right), "optimizer", 0, 2)
    for wrong in (None, Failure.of(ValueError("rank 0 of 2: optimizer")), Failure.of(gradscale.ScaleDesyncError("x"))):
        with pytest.raises(AssertionError):
            assert_told(wrong, "optimizer", 0, 2)


@pytest.mark.parametrize(
    ("what", "library", "odd", "others"),
    [
        pytest.param(*case, id=f"{case[0]}-{case[1]}", marks=[pytest.mark.torch] * (case[1] == "torch"))
        for case in CASES
    ],
)
def test_what_one_rank_does_differently_is_named_on_every_rank(
    world: World, what: str, library: str, odd: str, others: str
) -> None:
    require(library)
    cases = [(odd_rank, what, library) for odd_rank in range(world.size)]
    for (odd_rank, *_), results in zip(cases, world.run_each(scenarios.differ, cases), strict=True):
        for rank, result in enumerate(results):
            if rank == odd_rank and not odd:
                assert result.kind in ("InvalidTypeError", "InvalidValueError"), result.traceback
            else:
                expected = odd if rank == odd_rank else others.format(odd_rank=odd_rank)
                assert_told(result, expected, rank, world.size)


@pytest.mark.parametrize("library", LIBRARIES)
def test_two_scalers_in_another_order_on_one_rank_are_named_on_every_rank(world: World, library: str) -> None:
    require(library)
    cases = [(odd_rank, "swapped_scalers", library) for odd_rank in range(world.size)]
    for (odd_rank, *_), results in zip(cases, world.run_each(scenarios.differ, cases), strict=True):
        for rank, result in enumerate(results):
            assert_told(result, "numbered in the order of their construction", rank, world.size)
            # The group of a world has had the scalers of the cases before.
            found = re.search(r"scaler of the group from (\d+) to (\d+) \(here (\d+)\)", result.message)
            assert found is not None, result.message
            least, most, own = map(int, found.groups())
            assert (most, own) == (least + 1, most if rank == odd_rank else least)


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_ranks_may_do_is_no_error(world: World, library: str) -> None:
    require(library)
    for results in world.run_each(scenarios.legal, [(rank, library) for rank in range(world.size)]):
        assert not [result for result in results if isinstance(result, Failure)], results
        assert results == [[65536.0, 9, 3]] * world.size


# Versions.


@pytest.mark.parametrize("kind", ["numpy", pytest.param("torch", marks=pytest.mark.torch), "list", "agreement"])
def test_another_version_on_one_rank_is_named_on_every_rank(processes: ProcessWorld, kind: str) -> None:
    require("torch" if kind == "torch" else "numpy")
    own = gradscale.__version__
    for other, least in (("99.1.2.dev3", own), ("0.0.7", "0.0.7"), (f"{own}+patched", None)):
        cases = [(odd_rank, other, kind) for odd_rank in range(processes.size)]
        for results in processes.run_each(scenarios.other_version, cases):
            for rank, (told, again, *afterwards) in enumerate(results):
                expected = f"versions from {least} to " if least else f"two builds of version {own}"
                assert_told(told, expected, rank, processes.size)
                assert again.kind == ("BackendError" if kind == "agreement" else "ScaleDesyncError")
                assert afterwards == [None] * (kind != "agreement")


class Greeting:
    """A rank of a group that begins with the message of version 99.1.2, whose form never changes."""

    def __init__(self, group: ThreadCollectives) -> None:
        self.rank, self.size, self._group = group.rank, group.size, group

    def start_max(self, _: Any, /) -> Callable[[], Any]:
        release, build = 99 << 20 | 1 << 10 | 2, 7
        return self._group.start_max(np.asarray([release, -release, build, -build], np.int32))


def test_the_first_message_over_a_group_is_of_one_form_for_ever() -> None:
    def rank(group: ThreadCollectives) -> Failure | None:
        told: Failure | None = scenarios.first_step(Greeting(group) if group.rank == 1 else group)
        return told

    expected = f"versions from {gradscale.__version__} to 99.1.2 (here {gradscale.__version__})"
    for index, told in enumerate(run_ranks(3, rank)):
        assert_told(told, expected, index, 3)


# Lists of groups.


@pytest.mark.parametrize("policy", [None, gradscale.StaticScale(4.0)], ids=["dynamic", "static"])
@pytest.mark.parametrize("odd_rank", [None, 0, 1, 2, 3])
def test_a_list_of_groups_in_another_order_on_one_rank_is_named_on_every_rank(
    odd_rank: int | None, policy: Any
) -> None:
    groups = grid_of_threads()

    def train(collectives: ThreadCollectives) -> Any:
        is_odd = collectives.rank == odd_rank
        return scenarios.grid_in_another_order(groups(collectives.rank), is_odd, "numpy", {"policy": policy})

    for result in run_ranks(4, train):
        if odd_rank is None:
            assert result is None
            continue
        assert result.kind == "ScaleDesyncError", result.traceback
        assert "position of the group in the list" in result.message


@pytest.mark.mpi
@pytest.mark.tier("all")
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_list_of_communicators_in_another_order_on_one_rank_is_named_on_every_rank(library: str) -> None:
    require("mpi")
    require(library)
    # Of 3 ranks two would have no group in common, and one would not hear of the other.
    world = MPIWorld(4)
    for results in world.run_each(scenarios.grid_of_mpi, [(rank, library) for rank in range(4)]):
        for right, wrong, right_again, wrong_again in results:
            assert right is right_again is None
            for failure in (wrong, wrong_again):
                assert failure.kind == "ScaleDesyncError", failure.traceback
                assert "position of the group in the list" in failure.message


# Collectives of a mesh.


@pytest.mark.torch
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.tier("ranks")), *later("all", 3)])
def test_a_norm_over_a_mesh_on_one_rank_is_named_on_every_rank(size: int) -> None:
    require("torch")
    cases = [(odd_rank,) for odd_rank in range(size)]
    by_case = GlooWorld(size).run_each(scenarios.torch_norm_on_one_rank, cases)
    for odd_rank, results in enumerate(by_case):
        for rank, result in enumerate(results):
            assert_told(result, calls("norm", "step") if rank == odd_rank else calls("step", "norm"), rank, size)
