"""AxisCollectives and agree: one verdict over named axes, inside compiled functions; ranks that hold other states."""

from __future__ import annotations

import math

import numpy as np
import pytest
from axes_jax import COUNT, P, assert_one_reduction, gradscale_jax, jax, jnp, mesh, on_mesh

from gradscale import (
    CallOrderError,
    DynamicScale,
    InvalidTypeError,
    InvalidValueError,
    SkipSpikes,
    StaticScale,
)

pytestmark = [pytest.mark.jax, pytest.mark.tier("ranks")]

POLICY = DynamicScale()


def on_devices(function, *arrays, names: tuple[str, ...] = ("data",), shape=(COUNT,)):
    """Run a function on every device of a mesh, on rows of arrays, and return what each device returned."""
    mapped = jax.shard_map(
        lambda *rows: jax.tree.map(lambda x: x[None], function(*(jax.tree.map(lambda x: x[0], row) for row in rows))),
        mesh=mesh(*names, shape=shape),
        in_specs=P(names),
        out_specs=P(names),
        check_vma=False,
    )
    return jax.jit(mapped)(*arrays)


@pytest.mark.parametrize("axis_name", [("data", "model"), ("model", "data")])
def test_the_maximum_is_of_all_ranks_and_exact(axis_name: tuple[str, str]):
    rows = np.random.default_rng(0).integers(-(2**31) + 1, 2**31 - 1, size=(COUNT, 16), dtype=np.int32)

    def reduce(row):
        collectives = gradscale_jax.AxisCollectives(axis_name)
        finish = collectives.start_max(row)
        return finish(), finish(), collectives.rank, jnp.asarray(collectives.size)

    first, second, ranks, sizes = on_devices(reduce, rows, names=("data", "model"), shape=(2, 2))
    for result in (first, second):
        assert result.dtype == np.int32
        assert np.asarray(result).tolist() == [rows.max(axis=0).tolist()] * COUNT
    assert (sorted(ranks.tolist()), sizes.tolist()) == (list(range(COUNT)), [COUNT] * COUNT)


def test_what_is_no_vector_of_int32_is_refused():
    def reduce(row):
        return gradscale_jax.AxisCollectives("data").start_max(row)()

    for wrong in (jnp.zeros((COUNT, 2)), jnp.zeros((COUNT, 2, 2), dtype=jnp.int32), jnp.zeros(COUNT, dtype=jnp.int32)):
        with pytest.raises(InvalidValueError, match="only 1-d int32"):
            on_devices(reduce, wrong)


@pytest.mark.tier("quick")
@pytest.mark.parametrize("axis_name", [(), None, ["data", []], {}], ids=repr)
def test_what_names_no_axis_is_refused(axis_name):
    with pytest.raises(InvalidTypeError, match="axis_name must be the name of a mapped axis"):
        gradscale_jax.AxisCollectives(axis_name)


def test_an_axis_that_is_not_mapped_is_refused():
    run = gradscale_jax.value_and_grad(lambda w: w.sum(), POLICY, axis_name=("data", "model"))
    for call in (
        lambda: gradscale_jax.AxisCollectives("data"),
        jax.jit(lambda: gradscale_jax.AxisCollectives("data")),
        lambda: jax.jit(run)(POLICY.init(jnp.zeros(())), jnp.ones(2)),
    ):
        with pytest.raises(CallOrderError, match=r"'data'.* is not bound here .* jax\.shard_map"):
            call()
    with pytest.raises(CallOrderError, match="'other' is not bound here"):
        on_devices(lambda _: gradscale_jax.AxisCollectives("other").size, np.zeros((COUNT, 1)))


@pytest.mark.tier("quick")
@pytest.mark.parametrize("count", [np.float32(0.25), jnp.zeros(2, jnp.int32), jnp.asarray(True), 0], ids=repr)
def test_a_count_that_is_not_one_int32_is_refused(count):
    # A mean over ranks, such as by lax.pmean, would be cut to 0.
    with pytest.raises(InvalidTypeError, match="nonfinite must be a 0-d int32 array, such as unscale returns, got"):
        gradscale_jax.agree(count, POLICY.init(jnp.zeros(())), POLICY)


@pytest.mark.tier("quick")
@pytest.mark.parametrize("spike", [np.zeros(2, bool), jnp.zeros((1, 1), bool), [True], "yes"], ids=repr)
def test_a_spike_that_is_not_one_value_is_refused(spike):
    state = POLICY.init(jnp.zeros(()))
    with pytest.raises(InvalidTypeError, match=r"spike must be a 0-d bool, .*: .* jnp\.any\(spike\)"):
        gradscale_jax.agree(jnp.zeros((), jnp.int32), state, POLICY, spike=spike)
    for one in (True, np.True_, np.asarray(True), jnp.asarray(True)):
        assert bool(gradscale_jax.agree(jnp.zeros((), jnp.int32), state, POLICY, spike=one).spike)


@pytest.mark.tier("quick")
def test_a_verdict_says_in_words_what_happened():
    state = POLICY.init(jnp.zeros(()))._replace(scale=jnp.float32(2.0**24))
    traced = []

    def verdict(nonfinite, spike):
        made = gradscale_jax.agree(nonfinite, state, POLICY, spike=spike)
        traced.append(str(made))
        return made

    for given, words in (
        ((0, False), "taken, scale 16777216"),
        ((2, False), "skipped, gradient arrays that are not finite: 2, scale 16777216"),
        ((2, True), "skipped, gradient arrays that are not finite: 2, scale 16777216"),
        ((0, True), "skipped, a spike, scale 16777216"),
    ):
        for made in (verdict(jnp.int32(given[0]), given[1]), jax.jit(verdict)(*given)):
            assert str(made) == repr(made) == repr(jax.device_get(made)) == f"Verdict({words})"
        assert str(jax.tree.map(lambda x: x.dtype, made)) == (
            "Verdict(nonfinite=dtype('int32'), desynced=dtype('bool'), spike=dtype('bool'))"
        )
    assert any("Tracer" in text for text in traced)

    def held(scale):
        return gradscale_jax.agree(jnp.int32(0), state._replace(scale=scale), POLICY, "ranks")

    several = jax.vmap(held, axis_name="ranks")(jnp.asarray([2.0, 4.0]))
    assert str(several).startswith("Verdict(nonfinite=Array([0, 0], dtype=int32), desynced=Array([ True,  True]")
    one = str(jax.tree.map(lambda x: x[0], several))
    assert one == "Verdict(skipped, ranks hold different states; scale from 2.0 to 4.0)"


def squares_over_the_mesh(policy, **options):
    return gradscale_jax.value_and_grad(lambda w: (w * w).sum(), policy, axis_name="data", **options)


@pytest.mark.tier("quick")
@pytest.mark.parametrize("options", [{}, {"skip": SkipSpikes(), "give_up_after": 20}], ids=["", "guarded"])
def test_agreement_is_one_reduction_of_84_bytes(options):
    run = squares_over_the_mesh(POLICY, **options)
    # Parameters of one's own, so that shard_map has nothing to sum.
    mapped = jax.shard_map(
        lambda state, w: run(state, w).verdict.nonfinite, mesh=mesh("data"), in_specs=(P(), P("data")), out_specs=P()
    )
    assert_one_reduction(mapped, run.init(jnp.ones(())), jnp.ones(COUNT))


@pytest.mark.parametrize("is_spread", [False, True], ids=["anywhere", "over the mesh"])
@pytest.mark.parametrize("policy", [POLICY, StaticScale(4.0)], ids=["dynamic", "static"])
def test_a_state_that_is_closed_over_serves(policy, is_spread: bool):
    state = policy.init(on_mesh(jnp.zeros(COUNT), "data") if is_spread else jnp.zeros(()))

    def step(w):
        return squares_over_the_mesh(policy)(state, w).verdict.nonfinite

    mapped = jax.jit(jax.shard_map(step, mesh=mesh("data"), in_specs=P("data"), out_specs=P()))
    assert int(mapped(jnp.ones(COUNT))) == 0
    assert int(mapped(jnp.ones(COUNT).at[2].set(math.nan))) == 1


def test_a_verdict_of_no_axis_goes_on_to_a_mesh():
    """Eager agreement must not tie arrays to the first device."""
    verdict = gradscale_jax.agree(jnp.zeros((), dtype="int32"), POLICY.init(jnp.zeros(())), POLICY)
    assert not any(field.committed for field in jax.tree.leaves(verdict))
