"""diagnose(gather=True): random ones are the model's, the same on every rank, over threads, MPI and gloo."""

import itertools

import diagnoses
import numpy as np
import pytest
from axes import require
from scenarios import begun, gradients, grid_of_threads, raised
from tiers import examples, later
from worlds import ProcessWorld, ThreadWorld, agree, each

import gradscale
from gradscale.testing import ThreadCollectives, run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:gradients of .* are divided by the scale in .*float16:UserWarning"),
    pytest.mark.numpy,
    pytest.mark.filterwarnings(
        r"ignore:scale\(\) was not called:UserWarning", "ignore:(invalid value|overflow) encountered:RuntimeWarning"
    ),
    # JAX has no float64 unless asked for it.
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype .*float64:UserWarning"),
]


@pytest.mark.parametrize("library", ["numpy", pytest.param("torch", marks=pytest.mark.torch)])
def test_random_diagnoses_of_a_group_are_the_models_on_every_rank(world: ThreadWorld | ProcessWorld, library: str):
    number = examples(100 if library == "numpy" else 40) if isinstance(world, ThreadWorld) else 20
    for _, results in each(world, diagnoses.diagnosed, [(seed, library) for seed in range(number)]):
        diagnoses.check(results, [(rank,) for rank in range(world.size)])


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("library", ["strict", pytest.param("jax", marks=pytest.mark.jax)])
def test_random_diagnoses_of_other_libraries_are_the_models(library: str):
    require(library)
    for _, results in each(ThreadWorld(3), diagnoses.diagnosed, [(seed, library) for seed in range(examples(30))]):
        diagnoses.check(results, [(rank,) for rank in range(3)])


def test_of_many_ranks_the_eight_worst_entries_of_each_are_listed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gradscale.scaler.diagnosis.gather._GATHERED", 30)
    for _, results in each(ThreadWorld(10), diagnoses.diagnosed, [(seed, "numpy", 9) for seed in range(examples(15))]):
        diagnoses.check(results, [(rank,) for rank in range(10)], listed=30)


# How many entries are listed of all ranks; each of the four gives a fourth of them.
@pytest.mark.parametrize("listed", [36, *later("ranks", 4096)])
def test_groups_of_a_grid_are_gathered_in_turn(monkeypatch: pytest.MonkeyPatch, listed: int):
    if listed == 36:
        monkeypatch.setattr("gradscale.scaler.diagnosis.gather._GATHERED", listed)
    for seed in range(25, 25 + examples(40 if listed == 36 else 10)):
        groups = grid_of_threads()

        def live(collectives: ThreadCollectives, seed=seed, groups=groups):
            many = 1 + listed // 4 * (seed % 3 == 0)
            return diagnoses.diagnosed(groups(collectives.rank), seed, "numpy", many, (collectives.rank, 4))

        diagnoses.check(run_ranks(4, live), [(0, 0), (1, 0), (0, 1), (1, 1)], listed=listed)


def refused_on(group, bad_rank: int, kind: str):
    """Give one rank too few names, names that fail, or a gradient that is none: all are told, and can go on."""
    rank, scaler, optimizer = begun(group, backend="numpy")
    scaler.scale(np.float32(1.0))
    optimizer.grads = gradients("numpy")
    names = None if kind == "gradient" else ["a", "b", "c"]
    if rank == bad_rank and kind == "gradient":
        optimizer.grads = [np.array(["text"])]
    elif rank == bad_rank:
        names = {"too few": ["a"], "failing": (missing["name"] for missing in [{}])}[kind]
    own = gradscale.InvalidValueError if kind == "too few" else gradscale.InvalidTypeError
    said = ["one for each of the optimizer's 3 parameters, got 1"] * (kind == "too few")
    if rank != bad_rank:
        said.append(f"failed on rank {bad_rank}, and so on all: {own.__name__}")
    expected: type[Exception] = own if rank == bad_rank else gradscale.BackendError
    error = raised(expected, lambda: scaler.diagnose(optimizer, names, gather=True), *said)
    assert type(error) is expected
    optimizer.grads = gradients("numpy")
    scaler.diagnose(optimizer, gather=True)
    scaler.step(optimizer)


def test_what_one_rank_cannot_look_at_is_refused_on_all(world: ThreadWorld | ProcessWorld):
    agree(world, refused_on, itertools.product(range(world.size), ["too few", "failing", "gradient"]))
