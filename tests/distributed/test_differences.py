"""Whatever one rank does differently is an error on every rank that names it; what ranks may do is none."""

import difference_scenarios as scenarios
import numpy as np
import pytest
from axes import require
from scenarios import Around, Trainer, grid_of_threads, raised
from worlds import GlooWorld, ProcessWorld, ThreadWorld, agree, each

import gradscale
from gradscale.testing import ThreadCollectives, run_ranks

World = ThreadWorld | ProcessWorld

LIBRARIES = ["numpy", *(pytest.param(name, marks=pytest.mark.torch) for name in ("torch", "torch fused"))]


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_one_rank_does_differently_is_named_on_every_rank(world: World, library: str):
    found = [what for what in scenarios.DIFFERENCES if library == "numpy" or not what.startswith("norm")]
    ranks = range(world.size)
    cases = [(rank, what, (number + rank) % 3, library) for number, what in enumerate(found) for rank in ranks]
    agree(world, scenarios.differ, cases)


@pytest.mark.parametrize("library", LIBRARIES)
def test_scalers_of_a_group_in_another_order_on_one_rank_are_named_on_every_rank(world: World, library: str):
    agree(world, scenarios.swapped_scalers, [(odd_rank, library) for odd_rank in range(world.size)])


@pytest.mark.parametrize("program", scenarios.PROGRAMS)
def test_ranks_that_differ_and_send_other_messages_are_told_so(processes: ProcessWorld, program: str):
    cases = [(odd_rank, program, "numpy") for odd_rank in range(processes.size)]
    agree(processes, scenarios.interleaved, cases)


@pytest.mark.torch
@pytest.mark.tier("ranks")
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("program", [*scenarios.ANSWERED, "diagnosis"])
def test_ranks_of_torch_that_differ_and_send_other_messages_are_told_so(program: str, size: int):
    cases = [(odd_rank, program, library) for odd_rank in range(size) for library in ("numpy", "torch")]
    agree(GlooWorld(size), scenarios.interleaved, cases)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("scenario", [scenarios.legal, scenarios.resumed, scenarios.pipelined])
def test_what_ranks_may_do_apart_is_no_error(world: World, scenario, library: str):
    agree(world, scenario, [(rank, library) for rank in range(world.size)])


@pytest.mark.parametrize(
    ("what", "library"),
    [("a step is under way", "numpy"), ("a step is under way", "torch"), ("an optimizer refuses", "numpy")],
)
def test_ranks_that_resume_from_states_after_other_steps_are_told_so(world: World, what: str, library: str):
    require(library)
    agree(world, scenarios.saved_apart, [(rank, what, library) for rank in range(world.size)])


def test_an_evaluation_of_a_closure_that_scales_on_no_rank_is_an_error_on_all(world: World):
    each(world, scenarios.closure_without_scale, [(rank, one) for rank in range(world.size) for one in (1, 2)])


@pytest.mark.parametrize("kind", ["numpy", pytest.param("torch", marks=pytest.mark.torch), "list", "agreement"])
def test_another_version_on_one_rank_is_named_on_every_rank(processes: ProcessWorld, kind: str):
    versions = ("99.1.2.dev3", "0.0.7", f"{gradscale.__version__}+patched")
    cases = [(odd_rank, other, kind) for other in versions for odd_rank in range(processes.size)]
    agree(processes, scenarios.other_version, cases)


class Greeting(Around):
    """A rank of a group that begins with the message of version 99.1.2, whose form never changes."""

    def start_max(self, _, /):
        release, build = 99 << 20 | 1 << 10 | 2, 7
        return super().start_max(np.asarray([release, -release, build, -build], np.int32))


def test_the_first_message_over_a_group_is_of_one_form_for_ever():
    own = gradscale.__version__

    def rank(group: ThreadCollectives):
        trainer = Trainer(Greeting(group) if group.rank == 1 else group, "numpy", 1)
        said = f"versions from {own} to 99.1.2 (here {own})", f"rank {group.rank} of 3"
        raised(gradscale.ScaleDesyncError, lambda: trainer.iterate((0,)), *said)

    run_ranks(3, rank)


@pytest.mark.parametrize("policy", [None, gradscale.StaticScale(4.0)], ids=["dynamic", "static"])
@pytest.mark.parametrize("odd_rank", [None, 0, 1, 2, 3])
def test_a_list_of_groups_in_another_order_on_one_rank_is_named_on_every_rank(odd_rank: int | None, policy):
    groups = grid_of_threads()

    def train(collectives: ThreadCollectives):
        of_rank, is_odd = groups(collectives.rank), collectives.rank == odd_rank
        scenarios.grid_in_another_order(of_rank, is_odd, odd_rank is not None, "numpy", {"policy": policy})

    run_ranks(4, train)
