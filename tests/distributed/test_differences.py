"""Whatever one rank does differently is an error on every rank that names it; what ranks may do is none.

Of two ranks whose programs differ in one call, both fail, or both are in one state.
"""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import difference_scenarios as scenarios
import numpy as np
import pytest
from difference_scenarios import ITERATION, UNSCALED, Player
from scenarios import Around, Trainer, grid_of_threads, play, raised
from tiers import examples, later
from worlds import GlooWorld, MPIWorld, ProcessWorld, ThreadWorld, agree, each

import gradscale
from gradscale.testing import ThreadCollectives, run_ranks

World = ThreadWorld | ProcessWorld

# Of torch the ranks that are started for one optimizer serve the fused one, too.
NUMPY, TORCH = pytest.param(["numpy"], id="numpy"), ["torch", "torch fused"]
TORCH_LATER = [pytest.mark.torch, pytest.mark.tier("ranks")]


@pytest.mark.parametrize("libraries", [NUMPY, pytest.param(TORCH, id="torch", marks=TORCH_LATER)])
def test_what_one_rank_does_differently_is_named_on_every_rank(world: World, libraries: list[str]):
    own = ("norm", "resumed") if libraries is TORCH else ()
    found = [what for what in scenarios.DIFFERENCES if not what.startswith(own)]
    cases = [
        (rank, what, (None, 5)[(number + rank) % 2], library)
        for library in libraries
        for number, what in enumerate(found)
        for rank in range(world.size)
    ]
    agree(world, scenarios.differ, cases)


@pytest.mark.parametrize("programs", [["step"], pytest.param([*scenarios.PROGRAMS], marks=pytest.mark.tier("ranks"))])
def test_ranks_that_differ_and_send_other_messages_are_told_so(mpi: MPIWorld, programs: list[str]):
    agree(mpi, scenarios.interleaved, itertools.product(range(mpi.size), programs, ["numpy"]))


@pytest.mark.torch
@pytest.mark.tier("ranks")
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_of_torch_that_differ_and_send_other_messages_are_told_so(size: int):
    programs = [*scenarios.ANSWERED, "diagnosis"]
    agree(GlooWorld(size), scenarios.interleaved, itertools.product(range(size), programs, ["numpy", "torch"]))


@pytest.mark.parametrize("libraries", [NUMPY, pytest.param(TORCH, id="torch", marks=pytest.mark.torch)])
def test_what_ranks_may_do_apart_is_no_error(world: World, libraries: list[str]):
    played = (scenarios.legal, scenarios.resumed, scenarios.pipelined)
    agree(world, play, itertools.product(played, range(world.size), libraries))


def test_an_evaluation_of_a_closure_that_scales_on_no_rank_is_an_error_on_all(world: World):
    each(world, scenarios.closure_without_scale, [(rank, one) for rank in range(world.size) for one in (1, 2)])


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("kinds", [["numpy", "list", "agreement"], pytest.param(["torch"], marks=pytest.mark.torch)])
def test_another_version_on_one_rank_is_named_on_every_rank(processes: ProcessWorld, kinds: list[str]):
    versions = ("99.1.2.dev3", "0.0.7", f"{gradscale.__version__}+patched")
    agree(processes, scenarios.other_version, itertools.product(range(processes.size), versions, kinds))


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
        of_rank = groups(collectives.rank)
        trainer = Trainer(of_rank[::-1] if collectives.rank == odd_rank else of_rank, "numpy", 1, policy=policy)
        if odd_rank is None:
            trainer.iterate((0,))
        else:
            said = "position of the group in the list"
            raised(gradscale.ScaleDesyncError, lambda: trainer.iterate((0,)), said)

    run_ranks(4, train)


# Pairs of programs.

RULE = gradscale.SkipSpikes(window=2, of="loss", above=10.0)
PROGRAMS = {
    "plain": f"{ITERATION}, {ITERATION}",
    "unscaled": f"{UNSCALED}, {UNSCALED}",
    "skips and restarts": (
        f"{ITERATION}, overflow A, unscale_ A, step A, step B, update, save, scale, step B, update, load"
    ),
    "optimizers of two classes": "scale, step A, step C, update, scale, unscale_ C, step A, step C, update",
    "settings": f"{ITERATION}, set_growth_interval 3, scale, step A, update 64.0, get_scale, {ITERATION}",
    "a diagnosis": f"{ITERATION}, gather A, {ITERATION}",
    "accumulated": "scale, scale, step A, update, scale, unscale_ A, update",
    "clipped": f"scale, clip A 1.0 rank, step A, unscale_ B, update, {ITERATION}",
    "refused": f"refuse A, {ITERATION}, scale, refuse B, unscale_ B, step A, step B, update",
    "spikes": f"{ITERATION}, spike, step A, step B, update, {ITERATION}",
}
CALLS = [
    *(f"{call} {name}" for call in ("unscale_", "step") for name in "ABC"),
    *(f"{call} {name}" for call in ("overflow", "refuse", "gather") for name in "AB"),
    *("name A x", "name B x", "give A None", "give B None"),
    *("step_alone A", "decline A", "last_step A", "schedule A", "diagnose A", "update", "update 4.0", "update 65536.0"),
    *("set_growth_interval 2", "set_growth_interval 5", "set_growth_factor 4.0", "scale", "spike", "get_scale", "save"),
    *("load", "copy", "pickle", "join", "construct", "clip A 1.0 rank", "clip A 2.0 rank", "clip B 1.0 rank"),
]


class Outcome(NamedTuple):
    """How a program ended on one rank."""

    error: BaseException | None
    state: Any = None
    steps: Any = None


def outcomes(*programs: str) -> list[Outcome]:
    """Return how two programs end, of which each is followed by two usual iterations."""
    ended: dict[int, Outcome] = {}

    def work(group: ThreadCollectives):
        try:
            player = Player(group, "numpy", growth_interval=2, skip=RULE)
            player.run(programs[group.rank], ITERATION, ITERATION)
        except BaseException as error:
            ended[group.rank] = Outcome(error)
            raise
        # Each rank's window holds its own losses.
        state = {name: value for name, value in player.scaler.state_dict().items() if name != "spikes"}
        ended[group.rank] = Outcome(None, state, [optimizer.steps for optimizer in player.optimizers])

    with contextlib.suppress(Exception):
        run_ranks(2, work)
    return [ended[rank] for rank in range(2)]


def variants(program: str) -> Iterator[tuple[str, str]]:
    """Yield each program that differs in one call: dropped, exchanged with the next, added or replaced."""
    usual = program.split(", ")
    for place in range(len(usual) + 1):
        before, (own, *after) = usual[:place], [*usual[place:], ""]
        others = [[*before, call, *rest] for call in CALLS for rest in ([own, *after], after)]
        for one in [[*before, *after], [*before, *after[:1], own, *after[1:]], *others]:
            calls = [call for call in one if call]
            if calls != usual:
                yield f"{place}: {calls[place : place + 2]}", ", ".join(calls)


def is_safe(ended: list[Outcome], own_gradients: bool) -> bool:
    """Tell whether both ranks have failed with an error of gradscale, or both are in one state after the same steps."""
    if all(one.error is not None for one in ended):
        return all(isinstance(one.error, gradscale.GradscaleError) for one in ended)
    if any(one.error is not None for one in ended) or ended[0].state != ended[1].state:
        return False
    return own_gradients or ended[0].steps == ended[1].steps


# Parts, since all pairs of a program take minutes.
@pytest.mark.tier("ranks")
@pytest.mark.parametrize("part", [0, 3, *later("all", 1, 2)])
@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("name", PROGRAMS)
def test_ranks_that_differ_in_one_call_fail_together_or_stay_equal(name: str, odd: int, part: int):
    usual = PROGRAMS[name]
    for one in outcomes(usual, usual):
        assert one.error is None
        # Of steps that all skip ranks may leave some out.
        assert max(one.steps) > 2
    pairs = list(variants(usual))[part::4]
    wrong = []
    # A tenth before the last tier, others for each rank.
    step = 1 if examples(10) == 10 else 10
    for what, program in pairs[odd % step :: step]:
        ended = outcomes(program, usual) if odd == 0 else outcomes(usual, program)
        # A rank may step an optimizer by itself, without the scaler.
        if not is_safe(ended, "step_alone" in what):
            wrong.append((what, ended))
    assert not wrong


def test_ranks_that_end_apart_are_found():
    ended, failed = Outcome(None, {"scale": 4.0}, [1]), Outcome(gradscale.ScaleDesyncError(""))
    assert is_safe([ended, ended], False)
    assert is_safe([failed, failed], False)
    for other in (failed, ended._replace(state={"scale": 2.0}), ended._replace(steps=[0])):
        assert not is_safe([ended, other], False)
    assert not is_safe([failed, failed._replace(error=RuntimeError())], False)
