"""What gradscale_jax refuses, in words that say what to do."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from axes import require
from axes_jax import gradscale_jax, jax, jnp
from optimizers import Tree

import gradscale
from gradscale import CallOrderError, DynamicScale, InvalidTypeError, InvalidValueError, SkipSpikes, registry
from gradscale.testing import run_ranks

optax = require("optax")
pytestmark = pytest.mark.jax

POLICY = DynamicScale(init_scale=1024.0)
STATE = POLICY.init(jnp.zeros(()))
RULES = [None, *(SkipSpikes(window=window, of=of) for window, of in ((8, "loss"), (4, "loss"), (4, "norm")))]
SGD = optax.sgd(1.0)
VALUE, TYPE, ORDER = InvalidValueError, InvalidTypeError, CallOrderError


def differentiated(fun, *given, **options):
    return gradscale_jax.value_and_grad(fun, POLICY, **options)(STATE, *(given or [jnp.ones(2)]))


def by_leaf(leaf):
    return differentiated(lambda a, b: jnp.sum(b["w"][0]) + a, 0, {"w": [jnp.ones(2), leaf]}, argnums=-1)


def by_nnx():
    nnx = importlib.import_module(require("flax").__name__ + ".nnx")
    return differentiated(lambda norm: norm(jnp.ones((6, 8))).sum(), nnx.BatchNorm(8, rngs=nnx.Rngs(0)))


def by_equinox():
    eqx = require("equinox")
    norm, _ = eqx.nn.make_with_state(eqx.nn.BatchNorm)(8, "batch", mode="batch")
    return differentiated(lambda norm: norm.weight.sum(), norm)


def unscaled_in_a_trace():
    scaler = gradscale.GradScaler()
    scaler.scale(jnp.ones(()))
    jax.jit(lambda w: scaler.unscale_(Tree([w])) or w)(1.0)


def run(w, **options):
    return gradscale_jax.value_and_grad(lambda w: w.sum(), POLICY, **options)(STATE, w).verdict


def in_group(policy=POLICY, transform=lambda call: call):
    return run_ranks(1, lambda group: transform(lambda n: gradscale.GroupAgreement(group, policy)(n, STATE))(ZERO))


def agree(count=0, policy=POLICY, **options):
    count = jnp.int32(count) if isinstance(count, int) else count
    return gradscale_jax.agree(count, STATE, policy, **options)


def scaled(tx=SGD, **options):
    return gradscale_jax.scaled(tx, POLICY, **options)


def update(tx, grads, *params, state=None, **given):
    return tx.update(grads, tx.init(grads) if state is None else state, *params, **given)


ZERO, ONES = jnp.int32(0), jnp.ones(2)
NO_LEAF = r"argument 1.* got %s at \['w'\]\[1\].*eqx\.partition.*nnx\.split"
NO_MODULE = r"argument 0.* got 'batch' at \.axis_name: say filter=eqx\.is_inexact_array.*params, static = eqx.partition"
CHANGING = r"argument 0.*BatchStat.*graphdef, params, others = nnx\.split"
NO_SPIKE = r"spike must be a 0-d bool, .*: .* jnp\.any\(spike\)"
TRACED = "%s was called in a function that jax traces"
UNBOUND = r"'data'.* is not bound here .* jax\.shard_map"
PARAMS, MASKED = {"a": jnp.ones(()), "b": jnp.ones(())}, {"a": True, "b": False}
HALF, WIDE = {"a": jnp.ones((), jnp.bfloat16)}, {"a": jnp.ones(())}
ADAM, ONE, OF_LOSS = scaled(optax.adam(0.1)), scaled(), scaled(skip=SkipSpikes(of="loss"))
TEXTS = scaled(optax.stateless(lambda updates, _: dict.fromkeys(updates, "0.1")))
RESTORED = optax.MaskedState(ONE.init(PARAMS))
NO_POLICY = "policy must be an instance of a policy"
REFUSED = {
    # value_and_grad, and the verdict.
    "vector": (lambda: differentiated(lambda w: w), VALUE, r"one of shape \(2,\): take its mean or sum"),
    "two": (lambda: differentiated(lambda w: (w.sum(), 1)), TYPE, "say has_aux=True"),
    "complex": (lambda: differentiated(lambda w: w.sum() + 1j), TYPE, "real floating loss, got complex64"),
    "integer": (lambda: jax.jit(differentiated, static_argnums=0)(lambda w: w.sum().astype(int)), TYPE, "got int32"),
    "no pair": (lambda: differentiated(jnp.sum, has_aux=True), TYPE, r"a pair \(loss, aux\)"),
    "no state": (lambda: gradscale_jax.value_and_grad(jnp.sum, POLICY)(ONES, STATE), TYPE, "must be a ScaleState"),
    "leaf text": (lambda: by_leaf("text"), TYPE, NO_LEAF % "'text'"),
    "leaf int32": (lambda: by_leaf(np.zeros(2, np.int32)), TYPE, NO_LEAF % "int32"),
    "equinox": (by_equinox, TYPE, NO_MODULE),
    "nnx": (by_nnx, TYPE, CHANGING),
    "structures": (lambda: gradscale_jax.select(jnp.asarray(True), {"a": 1.0}, {"b": 1.0}), VALUE, "one structure"),
    "branch": (lambda: not run(ONES), TYPE, r"inside jit use gradscale_jax\.select\(verdict\.taken, new, old"),
    "traced check": (lambda: jax.jit(lambda w: run(w).check(POLICY))(ONES), ORDER, "outside of jit"),
    "traced scale": (lambda: jax.jit(jax.grad(gradscale.GradScaler().scale))(1.0), TYPE, TRACED % r"scale\(\)"),
    "traced unscale": (unscaled_in_a_trace, TYPE, TRACED % r"unscale_\(\)"),
    "traced read": (lambda: jax.jit(registry.get("jax").read)(ONES), TYPE, r"use gradscale_jax\.value_and_grad"),
    # Agreement. A mean over ranks, such as by lax.pmean, would be cut to 0.
    "group": (lambda: in_group(transform=jax.jit), TYPE, TRACED % "GroupAgreement"),
    "unbound": (lambda: agree(axis_name="data"), ORDER, UNBOUND),
    "unbound axes": (lambda: jax.jit(lambda w: run(w, axis_name=("data", "model")))(ONES), ORDER, UNBOUND),
    **{
        f"axes {names}": (lambda names=names: agree(axis_name=names), TYPE, "must be the name of a mapped axis")
        for names in ((), ["data", []], {})
    },
    **{
        f"count {count!r}": (lambda count=count: agree(count), TYPE, "nonfinite must be a 0-d int32 array, such as ")
        for count in (np.float32(0.25), jnp.zeros(2, jnp.int32), jnp.asarray(True), np.int64(0))
    },
    **{
        f"spike {spike!r}": (lambda spike=spike: agree(spike=spike), TYPE, NO_SPIKE)
        for spike in (np.zeros(2, bool), [True], "yes")
    },
    "no policy": (lambda: agree(policy=DynamicScale), TYPE, NO_POLICY),
    "no policy of a group": (lambda: in_group(policy=DynamicScale), TYPE, NO_POLICY),
    # scaled.
    "no policy of scaled": (lambda: gradscale_jax.scaled(SGD, DynamicScale), TYPE, NO_POLICY),
    "in masked": (lambda: optax.masked(ONE, MASKED).init(PARAMS), VALUE, r"still scaled.*scaled\(optax.masked"),
    "restored": (lambda: optax.masked(ONE, MASKED).update(PARAMS, RESTORED, PARAMS), VALUE, "MaskedNode"),
    "in a chain": (lambda: scaled(optax.chain(optax.identity(), ONE)).init(PARAMS), VALUE, "twice"),
    "to integers": (lambda: scaled(dtype=jnp.int32).init(HALF), VALUE, "dtype must be a real floating dtype"),
    "empty state": (lambda: ADAM.update(HALF, optax.EmptyState(), HALF), TYPE, "the state must be the one"),
    "a text": (lambda: update(ADAM, {"a": "text"}, state=ADAM.init(HALF)), TYPE, "array"),
    "wide": (lambda: ADAM.update(WIDE, ADAM.init(HALF), HALF), TYPE, "got float32 .* bfloat16 .*=jnp.float32"),
    "texts": (lambda: update(TEXTS, HALF), TYPE, "an update of tx cannot be read, got TypeError"),
    "no loss": (lambda: update(OF_LOSS, ONES), VALUE, r"losses alone, and .*\(.* value=loss\)"),
    **{
        f"loss of {loss!r}": (
            lambda loss=loss: update(OF_LOSS, ONES, value=loss),
            *(TYPE, "value must be the loss, a number or a real floating array of one"),
        )
        for loss in ("7.5", ONES, jnp.asarray(7))
    },
    "no transformation": (lambda: scaled("adam"), TYPE, r"tx must be an optax.GradientTransfor.*got"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_differentiated_agreed_on_or_scaled_is_refused_with_what_to_do(what: str):
    call, error, message = REFUSED[what]
    with pytest.raises(error, match=message):
        call()


def test_state_in_which_an_epsilon_is_zero_is_refused_unless_a_dtype_is_given():
    for dtype in ("float8_e4m3fn", "float8_e5m2", "float16"):
        narrow = {"w": jnp.ones(2, dtype)}
        for given, init in ((narrow, ADAM.init), (jax.device_get(narrow), ADAM.init), (narrow, jax.jit(ADAM.init))):
            with pytest.raises(TYPE, match=r"got float\d.* in tx.init\(params\)\[0\].mu\['w'\].*jnp.float32\)"):
                init(given)
    for dtype in ("bfloat16", "float32", "complex64", "int32"):
        ADAM.init({"w": jnp.ones(2, dtype)})
    # Not of the parameters.
    scaled(optax.adam(0.1, mu_dtype="float16")).init({"w": ONES})
    scaled(dtype=jnp.float16).init(narrow)
    for tx, params, rtol in ((scaled(optax.adam(0.1), dtype=jnp.float32), narrow, 1e-4), (ADAM, {"w": ONES}, 1e-3)):
        updates, _ = update(tx, {"w": jnp.asarray([1024.0, 0.0], jnp.float16)}, params, state=tx.init(params))
        # The second is an unused row, whose gradient is 0.
        np.testing.assert_allclose(updates["w"], [-0.1, 0.0], rtol=rtol)


def test_windows_of_another_rule_or_of_none_are_kept_and_refused():
    transformations = [scaled(skip=rule) for rule in RULES]
    states = [tx.init(ONES) for tx in transformations]
    unnamed = states[0]._replace(windows=states[-1].windows)
    assert str(unnamed.windows) == str(states[-1].windows)
    for used, own in zip(transformations, states, strict=True):
        for state in (*states, unnamed):
            if state is not own:
                with pytest.raises(
                    TYPE, match=r"must be one that has .*, got one that has .*: go on by gradscale_jax.carry_over"
                ):
                    update(used, ONES, state=state, value=1.0)


NONE = "one that has no skip="
OF = "one that has skip= and windows of shape {{'gradscale_loss': (1, {})}}"
COUNTS = "one that does not count steps", r"one that counts steps (warn_after=, give_up_after=)"


@pytest.mark.parametrize(
    "make", [gradscale_jax.guarded, lambda tx, **options: gradscale_jax.scaled(tx, POLICY, **options)]
)
@pytest.mark.parametrize(
    ("old", "new", "differences"),
    [
        ({"skip": RULES[1]}, {"skip": RULES[2]}, [(OF.format(4), OF.format(8))]),
        ({}, {"skip": RULES[1]}, [(OF.format(8), NONE)]),
        ({"skip": RULES[1]}, {}, [(NONE, OF.format(8))]),
        ({}, {"warn_after": 3}, [COUNTS[::-1]]),
        ({"give_up_after": 3, "skip": RULES[1]}, {}, [COUNTS, (NONE, OF.format(8))]),
    ],
    ids=["window", "skip= turned on", "skip= turned off", "counts turned on", "both turned off"],
)
def test_only_what_differs_of_the_options_of_a_state_is_named(make, old, new, differences: list[tuple[str, str]]):
    said = ", and ".join(f"{wanted}, got {got}" for wanted, got in differences)
    with pytest.raises(TYPE) as caught:
        make(SGD, **new).update(ONES, make(SGD, **old).init(ONES), ONES, value=1.0)
    assert str(caught.value).startswith(f"the state must be {said}: go on by gradscale_jax.carry_over(state")


def test_a_missing_policy_or_state_is_told_with_what_to_give():
    for call in (gradscale_jax.scaled, gradscale_jax.value_and_grad):
        with pytest.raises(TYPE, match=r"policy must be an instance of a policy, such as gradscale\.DynamicScale\(\)"):
            call(SGD)
    for read in (gradscale_jax.verdict_of, gradscale_jax.scale_state):
        with pytest.raises(
            VALUE, match=r"one state of gradscale_jax\.scaled\(tx, policy\) or guarded\(tx\), got tuple"
        ):
            read(optax.adam(0.1).init(ONES))
