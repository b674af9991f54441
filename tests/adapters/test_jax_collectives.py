"""AxisCollectives and agree: one verdict over named axes, inside compiled functions; ranks that hold other states."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from jax_devices import COUNT, require_mesh

import gradscale
from gradscale import CallOrderError, DynamicScale, InvalidTypeError, InvalidValueError, ScaleDesyncError, ScaleState

pytestmark = [pytest.mark.jax, pytest.mark.tier("ranks")]

AXES = [
    pytest.param(("data",), (COUNT,), "data", id="one-axis"),
    pytest.param(("data", "model"), (2, 2), ("data", "model"), id="two-axes"),
    pytest.param(("data", "model"), (2, 2), ("model", "data"), id="two-axes-reversed"),
]


def on_devices(jax: Any, function: Any, names: tuple[str, ...], shape: tuple[int, ...], *arrays: Any) -> Any:
    """Run a function on every device of a mesh, on rows of arrays, and return what each device returned."""
    spec = jax.sharding.PartitionSpec(names)
    mapped = jax.shard_map(
        lambda *rows: jax.tree.map(lambda x: x[None], function(*(jax.tree.map(lambda x: x[0], row) for row in rows))),
        mesh=require_mesh(*names, shape=shape),
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    return jax.jit(mapped)(*arrays)


def states(jax: Any, policies: list[DynamicScale]) -> ScaleState:
    """Return the first states of policies, one row each."""
    jnp = jax.numpy
    return jax.tree.map(lambda *xs: jnp.stack(xs), *(policy.init(jnp.zeros(())) for policy in policies))


@pytest.mark.parametrize(("names", "shape", "axis_name"), AXES)
def test_the_maximum_is_of_all_ranks_and_exact(
    jax: Any, gradscale_jax: Any, names: Any, shape: Any, axis_name: Any
) -> None:
    rows = np.random.default_rng(0).integers(-(2**31) + 1, 2**31 - 1, size=(COUNT, 16), dtype=np.int32)

    def reduce(row: Any) -> Any:
        collectives = gradscale_jax.AxisCollectives(axis_name)
        finish = collectives.start_max(row)
        return finish(), finish(), collectives.rank, jax.numpy.asarray(collectives.size)

    first, second, ranks, sizes = on_devices(jax, reduce, names, shape, rows)
    for result in (first, second):
        assert result.dtype == np.int32
        assert np.asarray(result).tolist() == [rows.max(axis=0).tolist()] * COUNT
    assert sorted(ranks.tolist()) == list(range(COUNT))
    assert sizes.tolist() == [COUNT] * COUNT


def test_what_is_no_vector_of_int32_is_refused(jnp: Any, jax: Any, gradscale_jax: Any) -> None:
    def reduce(row: Any) -> Any:
        return gradscale_jax.AxisCollectives("data").start_max(row)()

    for wrong in (jnp.zeros((COUNT, 2)), jnp.zeros((COUNT, 2, 2), dtype=jnp.int32), jnp.zeros(COUNT, dtype=jnp.int32)):
        with pytest.raises(InvalidValueError, match="only 1-d int32"):
            on_devices(jax, reduce, ("data",), (COUNT,), wrong)


@pytest.mark.tier("quick")
@pytest.mark.parametrize("axis_name", [(), None, ["data", []], {}], ids=repr)
def test_what_names_no_axis_is_refused(gradscale_jax: Any, axis_name: Any) -> None:
    with pytest.raises(InvalidTypeError, match="axis_name must be the name of a mapped axis"):
        gradscale_jax.AxisCollectives(axis_name)


def test_an_axis_that_is_not_mapped_is_refused(jax: Any, gradscale_jax: Any) -> None:
    for call in (lambda: gradscale_jax.AxisCollectives("data"), jax.jit(lambda: gradscale_jax.AxisCollectives("data"))):
        with pytest.raises(CallOrderError, match="'data' is not bound here"):
            call()
    with pytest.raises(CallOrderError, match="'other' is not bound here"):
        on_devices(
            jax, lambda _: gradscale_jax.AxisCollectives("other").size, ("data",), (COUNT,), np.zeros((COUNT, 1))
        )


@pytest.mark.parametrize(("names", "shape", "axis_name"), AXES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_an_overflow_on_each_rank_in_turn_is_agreed(
    jax: Any, gradscale_jax: Any, names: Any, shape: Any, axis_name: Any, value: float
) -> None:
    policy = DynamicScale()

    def step(state: ScaleState, grads: Any) -> Any:
        _, nonfinite = gradscale_jax.unscale(grads, state)
        verdict = gradscale_jax.agree(nonfinite, state, policy, axis_name)
        return verdict, policy.update(state, nonfinite=verdict.nonfinite)

    for bad_rank in range(COUNT):
        grads = np.ones((COUNT, 3), dtype=np.float32)
        grads[bad_rank, 1] = value
        verdict, new = on_devices(jax, step, names, shape, states(jax, [policy] * COUNT), [grads, np.ones_like(grads)])
        assert verdict.nonfinite.tolist() == [1] * COUNT
        assert verdict.finite.tolist() == [False] * COUNT if verdict.finite.shape else not bool(verdict.finite)
        assert not np.any(verdict.desynced)
        assert new.scale.tolist() == [2.0**15] * COUNT


def test_one_axis_of_a_mesh_agrees_by_itself(jax: Any, gradscale_jax: Any) -> None:
    """The test above can tell: over one axis of two, only the bad rank's column skips."""
    policy = DynamicScale()

    def step(state: ScaleState, grads: Any) -> Any:
        return gradscale_jax.agree(gradscale_jax.unscale(grads, state)[1], state, policy, "data").nonfinite

    grads = np.ones((COUNT, 1), dtype=np.float32)
    grads[3] = np.nan
    found = on_devices(jax, step, ("data", "model"), (2, 2), states(jax, [policy] * COUNT), grads)
    assert found.tolist() == [0, 1, 0, 1]


def test_ranks_of_vmap_agree_too(jax: Any, gradscale_jax: Any) -> None:
    policy = DynamicScale()
    run = gradscale_jax.value_and_grad(lambda w, x: (w * x).sum(), policy, axis_name="models")
    grads = jax.numpy.asarray([[1.0], [math.nan], [1.0]])
    mapped = jax.vmap(run, in_axes=(None, None, 0), axis_name="models")
    scaled = jax.jit(mapped)(policy.init(jax.numpy.zeros(())), jax.numpy.ones(1), grads)
    assert scaled.verdict.nonfinite.tolist() == [1, 1, 1]
    assert scaled.state.scale.tolist() == [2.0**15] * 3


def test_the_names_of_pmap_serve(jax: Any, gradscale_jax: Any) -> None:
    policy = DynamicScale()
    run = gradscale_jax.value_and_grad(lambda w, x: (w * x).sum(), policy, axis_name="devices")
    inputs = jax.numpy.ones((COUNT, 1)).at[1].set(math.nan)
    scaled = jax.pmap(run, in_axes=(None, None, 0), axis_name="devices")(
        policy.init(jax.numpy.zeros(())), jax.numpy.ones(1), inputs
    )
    assert np.asarray(scaled.verdict.nonfinite).tolist() == [1] * COUNT


@pytest.mark.parametrize("field", ScaleState._fields)
def test_a_rank_that_has_drifted_is_found_on_every_rank(jax: Any, gradscale_jax: Any, field: str) -> None:
    policy = DynamicScale(init_scale=4.0, growth_interval=1)

    def step(state: ScaleState, w: Any) -> Any:
        run = gradscale_jax.value_and_grad(lambda w: w.sum(), policy, axis_name="data")
        scaled = run(state, w)
        return scaled.verdict, scaled.state, scaled.verdict.finite

    weights = np.ones((COUNT, 2), dtype=np.float32)
    for drifting_rank in range(COUNT):
        before = states(jax, [policy] * COUNT)
        column = getattr(before, field)
        before = before._replace(**{field: column.at[drifting_rank].set(2)})
        verdict, after, finite = on_devices(jax, step, ("data",), (COUNT,), before, weights)
        assert verdict.desynced.tolist() == [True] * COUNT
        # No rank takes the step, and none touches its state.
        assert finite.tolist() == [False] * COUNT
        assert [x.tolist() for x in after] == [x.tolist() for x in before]
        with pytest.raises(ScaleDesyncError, match=f"{field} from .* No rank took this step"):
            jax.tree.map(lambda x: x[0], verdict).check(policy)
    verdict, _, finite = on_devices(jax, step, ("data",), (COUNT,), states(jax, [policy] * COUNT), weights)
    assert finite.tolist() == [True] * COUNT
    jax.tree.map(lambda x: x[0], verdict).check(policy)


def test_the_message_names_both_ends_of_the_difference(jax: Any, gradscale_jax: Any) -> None:
    policy = DynamicScale()
    rows = states(jax, [DynamicScale(init_scale=2.0**exponent) for exponent in (3, 5, 4, 5)])

    def step(state: ScaleState) -> Any:
        return gradscale_jax.agree(jax.numpy.zeros((), dtype="int32"), state, policy, "data")

    verdict = on_devices(jax, step, ("data",), (COUNT,), rows)
    with pytest.raises(ScaleDesyncError, match=r"scale from 8\.0 to 32\.0\. No rank"):
        jax.tree.map(lambda x: x[2], verdict).check(policy)


@pytest.mark.tier("quick")
def test_agreement_is_one_reduction_of_100_bytes(jax: Any, gradscale_jax: Any) -> None:
    policy = DynamicScale()

    def step(state: ScaleState, w: Any) -> Any:
        # Parameters of one's own, so that shard_map has nothing to sum.
        run = gradscale_jax.value_and_grad(lambda w: (w * w).sum(), policy, axis_name="data")
        return run(state, w).state

    spec = jax.sharding.PartitionSpec
    mapped = jax.shard_map(step, mesh=require_mesh("data"), in_specs=(spec(), spec("data")), out_specs=spec())
    arguments = (policy.init(jax.numpy.zeros(())), jax.numpy.ones(COUNT))
    compiled = jax.jit(mapped).lower(*arguments).compile().as_text()
    reductions = [line for line in compiled.splitlines() if " all-reduce(" in line or " all-reduce-start(" in line]
    assert len(reductions) == 1, reductions
    assert "s32[25]" in reductions[0]


@pytest.mark.parametrize("is_spread", [False, True], ids=["anywhere", "over the mesh"])
@pytest.mark.parametrize("policy", [DynamicScale(), gradscale.StaticScale(4.0)], ids=["dynamic", "static"])
def test_a_state_that_is_closed_over_serves(jax: Any, gradscale_jax: Any, policy: Any, is_spread: bool) -> None:
    over = jax.sharding.NamedSharding(require_mesh("data"), jax.sharding.PartitionSpec("data"))
    state = policy.init(jax.device_put(jax.numpy.zeros(COUNT), over) if is_spread else jax.numpy.zeros(()))

    def step(w: Any) -> Any:
        run = gradscale_jax.value_and_grad(lambda w: (w * w).sum(), policy, axis_name="data")
        return run(state, w).verdict.nonfinite

    spec = jax.sharding.PartitionSpec
    mapped = jax.jit(jax.shard_map(step, mesh=require_mesh("data"), in_specs=spec("data"), out_specs=spec()))
    assert int(mapped(jax.numpy.ones(COUNT))) == 0
    assert int(mapped(jax.numpy.ones(COUNT).at[2].set(math.nan))) == 1


def test_a_verdict_of_no_axis_goes_on_to_a_mesh(jax: Any, gradscale_jax: Any) -> None:
    """Eager agreement must not tie arrays to the first device."""
    policy = DynamicScale()
    state = policy.init(jax.numpy.zeros(()))
    verdict = gradscale_jax.agree(jax.numpy.zeros((), dtype="int32"), state, policy)
    assert not any(field.committed for field in verdict)
