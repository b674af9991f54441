"""Drawn training programs of gradscale_jax, each step of which is held to the core's scaler on NumPy arrays.

A program is a loop around an optax transformation, or by ``value_and_grad``: eager, compiled, mapped over models of
their own, or over ranks of named axes. Its gradients hold bad values, its losses and norms spikes, and halfway it is
saved and loaded. Each step must leave, to the bit, what a GradScaler makes of the same numbers, or a ShardedGradScaler
on each rank, with an optimizer that makes the step of the transformation alone.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import pickle
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from axes import require
from axes_jax import COUNT, P, assert_same_bits, gradscale_jax, jax, jnp, mesh, x64_mode
from tiers import later

import gradscale
from gradscale import DynamicScale, ScaleState, SkipSpikes, StaticScale
from gradscale.testing import run_ranks

optax = require("optax")
pytestmark = [
    pytest.mark.jax,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Sharding info not provided:UserWarning"),
]

STEPS = 12  # of each half
SIZES = {"bias": 4, "weight": 6}
MOST = 2**31 - 1


def watching():
    """Return a transformation whose state is what it was given last."""

    def update(updates, _, params=None, *, value=0.0, factor, **__):
        seen = {"grads": updates, "params": params, "value": jnp.asarray(value * factor, jnp.float32)}
        return jax.tree.map(lambda grad: grad * factor.astype(grad.dtype), updates), seen

    def init(params):
        return {"grads": params, "params": params, "value": jnp.float32(0.0)}

    return optax.GradientTransformationExtraArgs(init, update)


MOMENTUM, HALVED = optax.sgd(0.25, momentum=1.0), optax.piecewise_constant_schedule(0.5, {4: 0.5})
CONSTANT = {"weight": np.full(6, -0.5, np.float32), "bias": -0.25}
# Whatever the order of their sums, none is rounded.
INNER: dict[str, Any] = {
    "momentum": MOMENTUM,
    "watching": watching(),
    "several steps": optax.MultiSteps(watching(), every_k_schedule=2),
    "masked": optax.masked(MOMENTUM, {"weight": True, "bias": False}),
    "partitioned": optax.partition({"a": MOMENTUM, "b": optax.sgd(0.25)}, {"weight": "a", "bias": "b"}),
    "no arrays of JAX": optax.stateless(lambda *_: CONSTANT),
    "with a schedule": optax.sgd(HALVED, momentum=1.0),
    "clipped": optax.chain(optax.clip(2.0), MOMENTUM),
    "injected": optax.inject_hyperparams(optax.sgd)(learning_rate=HALVED, momentum=1.0),
    "no state": optax.sgd(0.25),
    "of random numbers": optax.chain(optax.add_noise(0.0, 0.55, 0), MOMENTUM),
}
# How the models of a program run, and over which axes they agree.
HOWS: dict[str, tuple[str, ...]] = {
    "jit": (),
    "vmap over ranks": ("data",),
    "vmap": (),
    "shard_map": ("data",),
    "eager": (),
    "pmap": ("data",),
    "shard_map of two axes": ("model", "data"),
}
POLICIES = (
    DynamicScale(init_scale=2.0**16, growth_interval=1, growth_factor=4.0),
    DynamicScale(init_scale=2.0**15, growth_interval=2, growth_after="interval_plus_one"),
    DynamicScale(init_scale=64.0, growth_interval=1, hysteresis=2, hysteresis_refill=("growth",)),
    DynamicScale(init_scale=8.0, min_scale=2.0, at_min="raise"),
    DynamicScale(init_scale=8.0, min_scale=2.0, at_min="hold"),
    DynamicScale(init_scale=2.0**9, growth_interval=3, tolerance=0.5),
    StaticScale(1.0),
    StaticScale(16.0),
)
RULES = (
    SkipSpikes(window=4),
    None,
    SkipSpikes(above=100.0, of="loss"),
    SkipSpikes(window=3, of="norm", patience=2),
    SkipSpikes(window=6, sides="both", learns_from_skipped=True),
)
LIMITS: Any = ({"warn_after": 2, "give_up_after": 4}, {}, {"give_up_after": 3}, {"warn_after": 3})
CHOICES: dict[str, Any] = {"by_optax": (True, False, True), "inner": [*INNER], "how": [*HOWS], "rule": RULES}
CHOICES |= {"limits": LIMITS}
NARROW = {"float16", "bfloat16"}


def is_trained(leaf) -> bool:
    """Tell whether a leaf is a floating or complex array."""
    return isinstance(leaf, jax.Array | np.ndarray) and jnp.issubdtype(leaf.dtype, jnp.inexact)


# The arguments in which value_and_grad is given the parameters, the positions of these, and what is said of them.
FORMS = {
    "tree": (lambda params: [params], [0], {}),
    "apart": (lambda params: ["neither", *params.values()], [1, -1], {}),
    "filtered": (lambda params: [len, [params["bias"], "a", None], params["weight"]], [1, -1], {"filter": is_trained}),
    "integers": (lambda params: [params | {"ids": jnp.arange(3)}], [0], {"allow_int": True}),
}
# Of the bias and of the weight.
DTYPES = (("float32", "float32"), ("float32", "float16"), ("float16", "bfloat16"), ("float32", "float64"))


def draw(number: int) -> SimpleNamespace:
    """Return a program but its numbers; the next one has the next of each thing that can be chosen."""
    chance = random.Random(number)
    made = SimpleNamespace(number=number, **{name: each[number % len(each)] for name, each in CHOICES.items()})
    made.axes, made.models = HOWS[made.how], 1 if made.how in ("eager", "jit") else COUNT
    # Ranks of one model, whose gradients are summed, by shard_map itself if it checks what varies over them.
    made.is_whole, made.is_checked = made.how == "shard_map" and number // 7 % 2 == 0, number // 14 % 2 == 1
    made.rows, made.models = made.models, 1 if made.is_whole else made.models
    made.policy = chance.choice(POLICIES)
    made.way = "none" if made.inner == "of random numbers" else chance.choice([*WAYS])
    made.loss_dtype, made.tells_loss, made.skipped, dtypes = "float32", True, chance.choice([0, MOST - 2]), DTYPES[0]
    if not made.by_optax:
        made.form, made.has_aux = [*FORMS.values()][number // 5 % len(FORMS)], chance.random() < 0.5
        _, (first, *more), _ = made.form
        made.argnums = [first, *more] if more or chance.random() < 0.3 else np.int64(first)
        made.loss_dtype = ("float32", "float16", "bfloat16")[number // 3 % 3]
        if made.loss_dtype == "float16":
            # Of which the scale comes to the most that the first cotangent can hold.
            made.policy = POLICIES[number % 2]
        # Where a norm is judged.
        dtypes = ("float16", "complex64") if number % 15 == 13 else chance.choice(DTYPES)
    else:
        # The state of one that is parted is of the weight, and numbers that are injected are of the first leaf.
        alike = {"partitioned": DTYPES[2], "injected": DTYPES[0]}
        dtypes = alike.get(made.inner) or chance.choice(DTYPES)
        made.tells_loss = made.rule is None or "norm" not in made.rule.of or chance.random() < 0.7
    if made.is_whole:
        # Of which no sum is rounded.
        made.loss_dtype, dtypes = "float32", DTYPES[0]
    made.dtypes = dict(zip(SIZES, dtypes, strict=True))
    # Without a dtype, state in half precision is refused.
    may_keep = not made.by_optax or made.inner.startswith("no ")
    is_wide = NARROW.isdisjoint(dtypes) or (made.by_optax and made.inner == "partitioned")
    made.dtype = None if is_wide or (may_keep and chance.random() < 0.5) else "float32"
    made.mode = functools.partial(x64_mode, "float64" in dtypes)
    return made


def first_params(program):
    """Return the parameters, one of which is a negative zero."""
    return {name: jnp.asarray([-0.0, *range(1, size)], program.dtypes[name]) for name, size in SIZES.items()}


def cast(program, tree):
    """Return a tree in the dtype that is wanted of gradients; complex leaves as they are."""
    dtype = program.dtype
    return jax.tree.map(lambda x: x if dtype is None or x.dtype.kind == "c" else x.astype(dtype), tree)


def given_to(program, batch: Batch):
    """Return what ``update`` is given by name."""
    return {"factor": batch.factor} | ({"value": batch.loss} if program.tells_loss else {})


class Batch(NamedTuple):
    """What a step is given."""

    grads: Any
    loss: Any
    factor: Any


def drawn_batches(program) -> Batch:
    """Return the batches by model and step. Ranks hold gradients of one norm, until one of them is bad."""
    chance, numbers = random.Random(program.number), np.random.default_rng(program.number)
    shape, is_group = (program.rows, 2 * STEPS), bool(program.axes)
    grads = numbers.integers(1, 5, size=(1 if is_group else program.rows, 2 * STEPS, 10))
    grads = np.float32(grads * numbers.choice([-1, 1], size=(program.rows, 1, 1)))
    loss = np.float32(numbers.choice([2.0, 2.5, 3.0], size=shape))
    for model in range(1 if is_group else program.rows):
        event = ""
        for step in range(2 * STEPS):
            at = chance.randrange(program.rows) if is_group else model
            if chance.random() < 0.5:
                event = chance.choice(["", "", "", "bad", "bad", "spike", "NaN", "norm"])
            if event == "norm":
                grads[slice(None) if is_group else model, step] *= 1024.0
            elif event in ("spike", "NaN"):
                loss[at, step] = math.nan if event == "NaN" else 4096.0
            if event == "bad" or (event and chance.random() < 0.2):
                for place in chance.sample(range(10), chance.randint(1, 3)):
                    grads[at, step, place] = chance.choice([math.inf, -math.inf, math.nan])
    wide = {name: "float32" if dtype in NARROW else dtype for name, dtype in program.dtypes.items()}
    split = {"bias": grads[..., :4].astype(wide["bias"]), "weight": grads[..., 4:].astype(wide["weight"])}
    return Batch(split, loss.astype(jnp.dtype(program.loss_dtype)), np.float32(numbers.choice([1.0, 2.0], size=shape)))


# The loops of gradscale_jax.


class Left(NamedTuple):
    """What a step has left."""

    params: Any
    updates: Any
    inner: Any
    scale_state: Any
    windows: Any
    skipped: Any
    verdict: Any
    value: Any = ()


@jax.custom_vjp
def given_loss(_params, _grads, loss):
    """Return a loss whose gradient by the parameters is given."""
    return loss


def _backward(kept, seed):
    def times_seed(param, grad):
        return (grad * seed.astype(grad.dtype)).astype(param.dtype)

    return jax.tree.map(times_seed, *kept), None, None


given_loss.defvjp(lambda params, grads, loss: (loss, (params, grads)), _backward)


def parts_of(state):
    """Return the inner transformation's state, the scale's, the windows, and how many steps were skipped."""
    if isinstance(state, gradscale_jax.ScaledOptimizerState):
        return state.inner_state, state.scale_state, state.windows or (), state.skipped
    if isinstance(state, ScaleState):
        return optax.EmptyState(), state, (), 0
    return optax.EmptyState(), state.scale_state, next(iter(state.windows.values()), ()), 0


def whole(program, tree, reduce):
    """Return what is the same on all ranks of a model that they have together."""
    return jax.tree.map(lambda leaf: reduce(leaf, program.axes), tree) if program.is_whole else tree


def summed(program, grads):
    return grads if program.is_checked else whole(program, grads, jax.lax.psum)


def batch_of(program, batch: Batch):
    return Batch(batch.grads, *whole(program, batch[1:], jax.lax.pmean))


def spread(program, params):
    """Let each rank of a model differentiate by parameters of its own."""
    return whole(program, params, lambda leaf, axes: leaf * (jax.lax.axis_index(axes) >= 0).astype(leaf.dtype))


def params_in(tree):
    """Return the parameters, or their gradients, in any form."""
    return dict(zip(SIZES, filter(is_trained, jax.tree.leaves(tree)), strict=True))


def loop_of(program):
    """Return the first carry of a model, and a step of it: (carry, batch) to (carry, what is left)."""
    params, axes = first_params(program), program.axes
    options = {"axis_name": axes[0] if len(axes) == 1 else axes or None, "dtype": program.dtype, "skip": program.rule}
    options |= program.limits
    if program.by_optax:
        tx = gradscale_jax.scaled(INNER[program.inner], program.policy, **options)

        def step(carry, batch: Batch):
            params, state = carry
            batch = batch_of(program, batch)

            def loss(params):
                value = given_loss(spread(program, params), *batch[:2])
                return gradscale_jax.scale(value, gradscale_jax.scale_state(state))

            grads = summed(program, jax.grad(loss)(params))
            updates, state = tx.update(grads, state, params, **given_to(program, batch))
            params = optax.apply_updates(params, updates)
            return (params, state), Left(params, updates, *parts_of(state), gradscale_jax.verdict_of(state))

        return (params, tx.init(params)._replace(skipped=jnp.int32(program.skipped))), step

    arguments_of, positions, told = program.form

    def loss_of(*arguments, batch: Batch):
        assert jax.tree.structure(arguments) == jax.tree.structure((*arguments_of(first_params(program)),))
        loss = given_loss(spread(program, params_in(arguments)), *batch[:2])
        return (loss, {"seen": batch.loss + 1}) if program.has_aux else loss

    options |= told | {"reduce": functools.partial(summed, program)}
    differentiate = gradscale_jax.value_and_grad(loss_of, program.policy, program.argnums, program.has_aux, **options)

    def step_without(carry, batch: Batch):
        params, state = carry
        arguments = arguments_of(params)
        batch = batch_of(program, batch)
        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            value, grads, verdict, state = differentiate(state, *arguments, batch=batch)
        trained = jax.tree.map(lambda x: x if is_trained(x) or "filter" not in told else None, arguments)
        wanted = [trained[position] for position in positions]
        assert jax.tree.structure(grads) == jax.tree.structure(tuple(wanted) if type(grads) is tuple else wanted[0])
        grads = params_in(grads)
        updates = gradscale_jax.select(verdict.taken, grads, jax.tree.map(lambda grad: -jnp.zeros_like(grad), grads))
        params = optax.apply_updates(params, updates)
        return (params, state), Left(params, updates, *parts_of(state), verdict, value)

    return (params, differentiate.init(params)), step_without


def runner_of(program, step) -> Callable[..., Any]:
    """Return a function of carries and batches, by model and step, to carries and what each step has left."""
    axes = program.axes
    called = jax.jit(step) if program.how == "jit" else step

    def scanned(carry, batches):
        return jax.lax.scan(step, carry, batches)

    def looped(carry, batches):
        left = []
        for index in range(STEPS):
            carry, after = called(carry, jax.tree.map(lambda leaf, index=index: leaf[index], batches))
            left.append(after)
        assert called is step or called._cache_size() <= 2
        return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *left)

    def of_one(run, *rows):
        return jax.tree.map(lambda leaf: leaf[None], run(*jax.tree.map(lambda leaf: leaf[0], rows)))

    if not axes and program.models == 1:
        return functools.partial(of_one, looped)
    if program.how == "pmap":
        return jax.pmap(scanned, axis_name=axes[0])
    if program.how.startswith("vmap"):
        return jax.jit(jax.vmap(scanned, axis_name=axes[0] if axes else None))
    over, split = mesh(*axes, shape=(COUNT,) if len(axes) == 1 else (2, COUNT // 2)), P(axes)
    held, checks = P() if program.is_whole else split, program.is_whole and program.is_checked
    mapped = functools.partial(of_one, scanned)
    run = jax.jit(jax.shard_map(mapped, mesh=over, in_specs=(held, split), out_specs=held, check_vma=checks))
    # Where it comes back, so that this is compiled once.
    return lambda carry, batches: run(jax.device_put(carry, jax.sharding.NamedSharding(over, held)), batches)


# The ways in which a carry is saved, and loaded into a fresh one.


def through_flax_bytes(carry, fresh, _folder: Path):
    serialization = require("flax").serialization
    return jax.tree.map(jnp.asarray, serialization.from_bytes(fresh, serialization.to_bytes(carry)))


def through_orbax(carry, fresh, folder: Path):
    with require("orbax").StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "carry", {"carry": carry})
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "carry", {"carry": fresh})["carry"]


WAYS: dict[str, Callable[..., Any]] = {
    "none": lambda carry, *_: carry,
    "pickle": lambda carry, *_: pickle.loads(pickle.dumps(jax.device_get(carry))),
    "flax-bytes": through_flax_bytes,
    "orbax": through_orbax,
}


# The core's scaler.


class Alone:
    """An optimizer that makes the steps of a transformation by itself."""

    def __init__(self, program, transformation):
        self.params, self.grads, self.given, self.updates = first_params(program), [], {}, None
        self.state, self._update = transformation.init(cast(program, self.params)), transformation.update

    def step(self):
        """Make a step."""
        grads = dict(zip(SIZES, map(jnp.asarray, self.grads), strict=True))
        self.params, self.updates, self.state = self._update(grads, self.state, self.params, self.given)


def alone(program):
    """Return the transformation of a program, without scaling; its update is compiled once, and applies itself."""
    inner = INNER[program.inner] if program.by_optax else optax.identity()
    if isinstance(inner, optax.MultiSteps):
        inner = optax.GradientTransformationExtraArgs(inner.init, inner.update)
    inner = optax.with_extra_args_support(inner)

    def update(grads, state, params, given):
        updates, state = inner.update(grads, state, cast(program, params), **given)
        return optax.apply_updates(params, updates), jax.tree.map(jnp.asarray, updates), state

    return inner._replace(update=jax.jit(update))


def follow(program, batches: Batch, transformation, model: int, group=None):
    """Return what the core's scaler comes to with the batches of a model, or of a rank, which is a thread.

    For each step: what there is of the optimizer after it, the state dict, the report, and the error of ``update``.
    """
    policy, judges_norm = program.policy, program.rule is not None and "norm" in program.rule.of
    if program.loss_dtype == "float16" and isinstance(policy, DynamicScale):
        # As much as the first cotangent can hold.
        policy = dataclasses.replace(policy, max_scale=2.0**15, init_scale=min(policy.init_scale, 2.0**15))
    options: Any = {"policy": policy, "skip": program.rule, "warn_after": None, **program.limits}
    # As that of step(), a loss that a transformation is given must be finite.
    in_one_call = program.by_optax and program.tells_loss
    if in_one_call and judges_norm:
        options["max_norm"] = math.inf
    scaler = gradscale.GradScaler(**options) if group is None else gradscale.ShardedGradScaler(group=group, **options)
    clip: Any = {"max_norm": math.inf} | ({} if group is None else {"norm_over": "rank"}) if judges_norm else {}
    followed = []
    with program.mode(), np.errstate(all="ignore"):
        optimizer = Alone(program, transformation)
        for step in range(2 * STEPS):
            batch: Batch = jax.tree.map(lambda leaf, at=(model, step): leaf[at], batches)
            scale, error = np.float32(scaler.get_scale()), None
            grads = {name: (grad * scale).astype(program.dtypes[name]) for name, grad in batch.grads.items()}
            optimizer.grads, optimizer.given = [*cast(program, grads).values()], given_to(program, batch)
            scaler.scale(np.zeros(2, np.float32), loss=batch.loss if program.tells_loss else False)
            if not in_one_call:
                scaler.unscale_(optimizer, **clip)
            scaler.step(optimizer, **({"loss": batch.loss} if in_one_call else {}))
            report = scaler.last_step(optimizer)
            try:
                scaler.update()
            except (gradscale.ScaleUnderflowError, gradscale.TrainingStalledError) as raised:
                error = raised
            after = _numpy((optimizer.params, optimizer.updates, optimizer.state))
            followed.append((after, scaler.state_dict(), report, error))
    return followed


# What is held to what.


def left_by(program, batches: Batch, folder: Path) -> Left:
    """Run a program; return what each step has left, by model and step."""
    halves = [jax.tree.map(lambda leaf, at=at: leaf[:, at : at + STEPS], batches) for at in (0, STEPS)]
    with program.mode():
        carry, step = loop_of(program)
        run = runner_of(program, step)
        # Keys of random numbers are arrays of another class.
        assert not any(getattr(leaf, "weak_type", False) for leaf in jax.tree.leaves(carry))
        stacked = jax.jit(lambda carry: jax.tree.map(lambda leaf: jnp.stack([leaf] * program.models), carry))
        carry, first = run(stacked(carry), halves[0])
        fresh = jax.tree.map(jnp.zeros_like, carry)
        carry, second = run(WAYS[program.way](carry, fresh, folder), halves[1])
        assert jax.tree.map(lambda leaf: leaf.dtype, carry) == jax.tree.map(lambda leaf: leaf.dtype, fresh)
        assert not any(getattr(leaf, "weak_type", False) for leaf in jax.tree.leaves(carry))
        left: Left = jax.tree.map(lambda *those: np.concatenate(those, axis=1), _numpy(first), _numpy(second))
        if program.models > 1 and program.axes:
            assert_drift_is_found(program, run, carry, halves[1], left.verdict)
    return left


def assert_held(program, batches: Batch, left: Left):
    """Hold what each step has left to what the core's scaler comes to."""
    if program.is_whole:
        grads = jax.tree.map(lambda leaf: leaf.sum(axis=0, keepdims=True), batches.grads)
        batches = Batch(grads, *(leaf.mean(axis=0, keepdims=True) for leaf in batches[1:]))
    with program.mode():
        following = functools.partial(follow, program, batches, alone(program))
        with warnings.catch_warnings(action="ignore"):
            if program.axes and program.models > 1:
                followed = run_ranks(program.models, lambda group: following(group.rank, group))
            else:
                followed = [following(model) for model in range(program.models)]
    if program.limits:
        counts = [[saved["counts"] for _, saved, *_ in steps] for steps in followed]
        names = ("taken", "overflow", "spike")
        assert left.verdict.counts() == {name: [[each[name] for each in row] for row in counts] for name in names}
    for model, steps in enumerate(followed):
        row: list[float] = []
        for step, one in enumerate(steps):
            here: Left = jax.tree.map(lambda leaf, at=(model, step): leaf[at], left)
            row = [*row, one[2].scale] if one[2].skipped else []
            assert_step(program, batches.loss[model, step], here, row, *one)
        # All together they say the worst of it.
        errors = sorted((type(error) for *_, error in steps if error), key=lambda kind: kind.__name__)
        kind, _ = checked(jax.tree.map(lambda leaf, model=model: leaf[model], left.verdict), program)
        assert kind in (errors[:1] or [None, gradscale.TrainingStalledWarning])


def _numpy(tree):
    def converted(leaf):
        is_key = isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return jax.tree.map(converted, tree)


def assert_step(program, loss, here: Left, row: list[float], stepped, saved, report, error):
    """Compare a step of a loss; ``row``: the scales of the skipped steps up to it, if it is one."""
    verdict, counts, rule = here.verdict, saved["counts"], program.rule
    told = bool(verdict.taken), int(verdict.nonfinite), bool(verdict.spike), bool(verdict.desynced)
    assert told == (not report.skipped, report.nonfinite, report.reason == "spike", False)
    assert str(verdict).endswith(f", scale {report.scale:.9g})")
    trackers = ("scale", "_growth_tracker", "_overflow_tracker", "_rescale_tracker")
    assert [field.item() for field in here.scale_state] == [saved.get(name, 0) for name in trackers]
    if not program.by_optax:
        assert_same_bits(here.value, (loss, {"seen": loss + 1}) if program.has_aux else loss)
    assert not program.by_optax or here.skipped == min(program.skipped + counts["overflow"] + counts["spike"], MOST)
    for position, name in enumerate(() if rule is None else rule.of):
        values, count, skipped = (field[position] for field in here.windows)
        window = json.loads(saved["spikes"])[0][name] if json.loads(saved["spikes"]) else {"values": [], "skipped": 0}
        assert (values[len(values) - count :].tolist(), skipped) == (window["values"], window["skipped"])
    updates = jax.tree.map(lambda x: np.full_like(x, -0.0), here.updates) if report.skipped else stepped[1]
    assert_same_bits((here.params, here.updates, here.inner), (stepped[0], updates, stepped[2]))
    kind, said = checked(verdict, program)
    if error or len(row) >= program.limits.get("give_up_after", MOST):
        assert kind is type(error)
    else:
        is_falling = len(row) > 1 and 1.0 < row[-1] < row[0] and any(a > b for a, b in itertools.pairwise(row[-33:]))
        warns = len(row) >= program.limits.get("warn_after", MOST) and not is_falling
        assert kind is (gradscale.TrainingStalledWarning if warns else None)
    if kind is gradscale.ScaleUnderflowError:
        assert f"although the scale has fallen to the minimum of {program.policy!r}" in said
    if kind is gradscale.TrainingStalledError:
        # The core says also which rank was the first, and why.
        words = re.compile(r"last \d+ iterations|\d+ for [a-z]+[- ][a-z]+|went from \S+ to \S+,")
        assert sorted(words.findall(said)) == sorted(words.findall(str(error)))
        assert ("skip= may be too strict" in said) == ("is given is a spike" in str(error))


def checked(verdict, program) -> tuple[type | None, str]:
    """Return as what the check of a verdict is told, and its words."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            verdict.check(program.policy)
        except gradscale.GradscaleError as raised:
            return type(raised), str(raised)
    return (caught[0].category, str(caught[0].message)) if caught else (None, "")


def assert_drift_is_found(program, run, carry, batches: Batch, earlier):
    """Let one rank go on from another state: in no step does any rank move, and all are told; after those before."""
    chance = random.Random(program.number)
    field, rank = chance.choice(ScaleState._fields), chance.randrange(program.models)

    params, state = carry
    scale_state = parts_of(state)[1]
    value = jnp.asarray(getattr(scale_state, field)).at[rank]
    other = scale_state._replace(**{field: value.divide(2.0) if field == "scale" else value.add(1)})
    state = other if state is scale_state else state._replace(scale_state=other)
    _, left = run((params, state), batches)
    left, (*before, _) = _numpy(left), _numpy((params, *parts_of(state)))
    assert np.all(left.verdict.desynced)
    assert not np.any(left.verdict.taken)
    held = jax.tree.map(lambda leaf: np.repeat(leaf[:, None], STEPS, axis=1), before)
    assert_same_bits([left.params, left.inner, left.scale_state, left.windows], held)
    verdicts = jax.tree.map(lambda *those: np.concatenate(those, axis=1), earlier, left.verdict)
    kind, said = checked(verdicts, program)
    assert kind is gradscale.ScaleDesyncError
    values = getattr(before[2], field).tolist()
    assert f"ranks hold different states: {field} from {min(values)} to {max(values)}. " in said


# The tests.


# 3 and 45 are of one model over ranks. By 77 every optimizer has run in every way.
QUICK = [3, 22, 36, 45, 70]
REST = [number for number in range(231) if number not in QUICK]
NUMBERS = [*QUICK, *later("ranks", *REST[:20]), *later("all", *REST[20:])]
# Other settings for some of them, each of which must be found.
WRONG: dict[int, dict[str, Any]] = {
    36: {"limits": {"give_up_after": 4}, "inner": "no state"},
    45: {"policy": DynamicScale(init_scale=16.0), "rule": SkipSpikes(window=4, deviations=1e6), "skipped": 1},
}


@pytest.mark.parametrize("number", NUMBERS)
def test_each_step_of_a_program_leaves_what_the_core_comes_to(number: int, tmp_path: Path):
    program = draw(number)
    batches = drawn_batches(program)
    left = left_by(program, batches, tmp_path)
    assert_held(program, batches, left)
    for setting, wrong in WRONG.get(number, {}).items():
        with pytest.raises(AssertionError):
            assert_held(SimpleNamespace(**vars(program) | {setting: wrong}), batches, left)


def test_trees_that_differ_are_told_apart():
    for other in (np.float32([1.0, 2.001]), np.float64([1.0, 2.0]), np.float32([1.0]), None):
        with pytest.raises(AssertionError):
            assert_same_bits({"a": np.float32([1.0, 2.0])}, {"a": other})


@pytest.mark.tier("ranks")
def test_windows_of_losses_are_not_loaded_as_windows_of_norms(tmp_path: Path):
    rules = (SkipSpikes(window=4, of=of) for of in ("loss", "norm"))
    of_loss, of_norm = (gradscale_jax.scaled(MOMENTUM, POLICIES[0], skip=rule).init(jnp.ones(2)) for rule in rules)
    through_flax_bytes(of_loss, of_loss, tmp_path)
    with pytest.raises(ValueError, match="gradscale_norm"):
        through_flax_bytes(of_loss, of_norm, tmp_path)
