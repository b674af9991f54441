"""All ranks skip together, back off together, and end with bit-identical states, wherever the bad value is."""

import pytest
import scenarios
from axes import require
from worlds import Failure, GlooWorld, ProcessWorld, ThreadWorld, assert_all_equal, each

World = ThreadWorld | ProcessWorld


def test_assert_all_equal_fails_for_a_rank_that_differs_or_raised() -> None:
    assert_all_equal([1, 1])
    for wrong in ([1, 2], [1, Failure.of(ValueError("x"))], [Failure.of(ValueError("x"))] * 2):
        with pytest.raises(AssertionError):
            assert_all_equal(wrong)


@pytest.mark.tier("quick")
@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale_-then-step"])
def test_overflow_on_each_rank_in_turn_skips_all_ranks(world: World, explicit: bool) -> None:
    values = (float("inf"), float("-inf"), float("nan"))
    cases = [([bad_rank], value, "numpy", explicit) for bad_rank in range(world.size) for value in values]
    for (bad_ranks, *_), results in each(world, scenarios.overflow_on, cases):
        seen = [result.pop("seen here") for result in results]
        assert seen == [[0, int(rank in bad_ranks), 0, 0] for rank in range(world.size)]
        assert_all_equal(results)
        skipped = [report[0] for report in results[0]["reports"]]
        scales = [report[1] for report in results[0]["reports"]]
        assert skipped == [False, True, False, False]
        assert scales == [65536.0, 65536.0, 32768.0, 32768.0]
        assert [report[2] for report in results[0]["reports"]] == ["moved", None, "moved", "moved"]
        assert results[0]["steps"] == 3
        assert results[0]["state"]["_growth_tracker"] == 2


def test_overflow_on_all_ranks_at_once_backs_off_once(world: World) -> None:
    results = world.run(scenarios.overflow_on, list(range(world.size)), float("nan"), "numpy", False)
    assert [result.pop("seen here") for result in results] == [[0, 1, 0, 0]] * world.size
    assert_all_equal(results)
    assert results[0]["state"]["scale"] == 32768.0


@pytest.mark.parametrize(
    "library", ["strict", pytest.param("torch", marks=pytest.mark.torch), pytest.param("jax", marks=pytest.mark.jax)]
)
def test_arrays_of_any_library_agree_over_any_group(world: World, library: str) -> None:
    require(library)
    results = world.run(scenarios.overflow_on, [world.size - 1], float("inf"), library, True)
    assert [result.pop("seen here")[1] for result in results] == [0] * (world.size - 1) + [1]
    assert_all_equal(results)
    assert [report[0] for report in results[0]["reports"]] == [False, True, False, False]


@pytest.mark.parametrize("kind", ["list", "none", "zero-size"])
def test_a_rank_without_gradients_takes_part(world: World, kind: str) -> None:
    check_empty_ranks(world, kind)


@pytest.mark.tier("ranks")
def test_a_rank_that_never_has_an_array_needs_no_backend(processes: ProcessWorld) -> None:
    check_empty_ranks(processes, "no backend", "torch" if isinstance(processes, GlooWorld) else "numpy")


def check_empty_ranks(world: World, kind: str, library: str = "numpy") -> None:
    """Assert that each rank in turn may have nothing, while another one overflows or none does."""
    ranks = range(world.size)
    cases = [([rank], bad, kind, library) for rank in ranks for bad in ([], [(rank + 1) % world.size])]
    for (_, bad, *_), results in each(world, scenarios.empty_on, cases):
        end = {"skipped": [False, True, False], "scale": 32768.0, "steps": 2}
        assert results == [end if bad else {"skipped": [False] * 3, "scale": 65536.0, "steps": 3}] * world.size


def test_no_rank_with_gradients_is_the_same_error_on_every_rank(world: World) -> None:
    for result in world.run(scenarios.empty_on, list(range(world.size)), [], "none"):
        assert isinstance(result, Failure)
        assert result.kind == "CallOrderError"
        assert "none of whose parameters has a gradient on any rank" in result.message


def test_an_overflow_in_a_closure_is_retried_on_all_ranks(world: World) -> None:
    for _, results in each(world, scenarios.closure_overflow, [(bad_rank,) for bad_rank in range(world.size)]):
        assert_all_equal(results)
        assert results[0]["evaluations"] == [65536.0, 32768.0, 16384.0]
        assert results[0]["gradient"] == [1.0, 1.0, 1.0]
        assert results[0]["report"] == (False, 16384.0, 0, "stepped", 1, 2, 0, None)
        assert results[0]["scale"] == 16384.0
        assert (results[0]["steps"], results[0]["returned"]) == (1, 1.0)


def test_overflow_at_the_minimum_raises_on_every_rank(world: World) -> None:
    for _, results in each(world, scenarios.underflow, [(bad_rank,) for bad_rank in range(world.size)]):
        assert_all_equal(results)
        first, second, third = results[0]["raised"]
        assert (first, third) == ("", "")
        assert "minimum, 1.0" in second
        assert results[0]["state"]["scale"] == 1.0
        assert results[0]["steps"] == 1


@pytest.mark.parametrize("library", ["numpy", "strict", pytest.param("torch", marks=pytest.mark.torch)])
def test_collectives_pass_the_conformance_suite(world: World, library: str) -> None:
    require(library)
    assert_all_equal(world.run(scenarios.collectives_conform, library, 200 if library == "numpy" else 10))
