"""Whatever a user passes at any entrance is a GradscaleError or a success, and an error changes nothing.

``GRADSCALE_TEST_EXAMPLES=20000`` sets how many cases each entrance is tried with.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from optimizers import Grouped, Tree, iterate_plainly
from tiers import examples

import gradscale
from gradscale import DynamicScale, GradscaleError, GradScaler, StaticScale, load_foreign_state, presets
from gradscale.core import tree
from gradscale.policies import rules, simulation
from gradscale.reports.logs import read_log
from gradscale.scaler import checkpoint
from gradscale.testing import run_ranks

pytestmark = [pytest.mark.numpy, pytest.mark.tier("ranks")]

fuzz = settings(
    max_examples=int(os.environ.get("GRADSCALE_TEST_EXAMPLES", examples(1500))),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

POLICIES: tuple[type[Any], ...] = (
    DynamicScale,
    StaticScale,
    rules.DelayedScale,
    rules.GradualScale,
    rules.WideningScale,
)
FIELDS = [
    *("init_scale", "growth_factor", "backoff_factor", "growth_interval", "growth_after", "hysteresis"),
    *("hysteresis_refill", "tolerance", "min_scale", "max_scale", "at_min", "fast_start", "threshold"),
    *("consecutive_hysteresis", "raise_at_min"),
]
SAVED = checkpoint.build(DynamicScale(), {"scale": 4.0, "growth_tracker": 3}, 7)
FOREIGN: list[dict[str, Any]] = [
    {"scale": 1.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 5, "_growth_tracker": 1},
    {"scale": 2.0, "growth_tracker": 1, "hysteresis_tracker": 2},
    {"cur_scale": 4.0, "cur_iter": 7, "last_overflow_iter": 2, "cur_hysteresis": 1, "scale_factor": 2.0},
    {"dynamic_loss_scale": True, "cur_scale": 4.0, "cur_iter": 7, "last_overflow_iter": 2, "scale_window": 3},
    {"loss_scaler0": {"loss_scale": 4.0, "unskipped": 3}, "loss_scaler1": {"loss_scale": 8.0, "unskipped": 1}},
    {"loss_scale": 4.0, "counter": 3, "factor": 2, "period": 7},
    {"dynamic_scale": np.float32(4.0), "step_counter": np.int32(2)},
]


def is_made(call: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Make a call that may be refused with an error of ours, and with no other; tell whether it was made."""
    try:
        call(*args, **kwargs)
    except GradscaleError as error:
        message = str(error)
    else:
        return True
    assert 0 < len(message) < 20_000
    return False


def used() -> GradScaler:
    """Return a scaler that has made a few steps."""
    scaler = GradScaler(init_scale=1024.0, growth_interval=3)
    iterate_plainly(scaler, 4)
    return scaler


def assert_unchanged(scaler: Any, before: bytes) -> None:
    """Assert every bit of a state dict, and that the scaler goes on."""
    assert pickle.dumps(scaler.state_dict()) == before
    iterate_plainly(scaler, 1)


@fuzz
@given(hostile.changed(SAVED), hostile.changed(SAVED["policy"]) | hostile.values(), st.booleans())
def test_state_dicts(saved: dict[str, Any], policy: Any, is_whole: bool) -> None:
    scaler = used()
    before = pickle.dumps(scaler.state_dict())
    made = hostile.made(saved if is_whole else {**saved, "policy": policy})
    if not is_made(scaler.load_state_dict, made):
        assert_unchanged(scaler, before)
        return
    again = pickle.dumps(scaler.state_dict())
    scaler.load_state_dict(scaler.state_dict())
    assert pickle.dumps(scaler.state_dict()) == again


@fuzz
@given(
    st.sampled_from(FOREIGN).flatmap(hostile.changed) | hostile.values(),
    hostile.settings_of(FIELDS),
    st.sampled_from([None, None, "torch", "apex", "keras", "jmp"]) | hostile.values(),
    st.sampled_from([None, None, 0, 1]) | hostile.values(),
)
def test_foreign_states(state: Any, given_settings: dict[str, Any], system: Any, loss_id: Any) -> None:
    found = []
    arguments = {**hostile.made(given_settings), "loss_id": hostile.made(loss_id)}
    if is_made(lambda: found.append(load_foreign_state(hostile.made(state), hostile.made(system), **arguments))):
        scaler = GradScaler()
        scaler.load_state_dict(found[0].state_dict)
        assert str(found[0])


@fuzz
@given(st.sampled_from(POLICIES), hostile.settings_of(FIELDS), st.integers(0, 3))
def test_policies(kind: type[Any], given_settings: dict[str, Any], overflow: int) -> None:
    known = {name: value for name, value in given_settings.items() if name in kind.__dataclass_fields__}
    policies = []
    if is_made(lambda: policies.append(kind(**hostile.made(known)))):
        state = policies[0].init(np.float32(1.0))
        for step in range(4):
            state = policies[0].update(state, nonfinite=np.asarray(int(step == overflow)))
        assert 0.0 < float(state.scale) < np.inf


@fuzz
@given(st.sampled_from(presets.names()) | hostile.values(), hostile.settings_of(FIELDS))
def test_presets(name: Any, given_settings: dict[str, Any]) -> None:
    is_made(lambda: presets.named(hostile.made(name), **hostile.made(given_settings)))


@fuzz
@given(
    hostile.settings_of(
        [*FIELDS[:4], "policy", "enabled", "backend", "on_skip", "on_update", "diagnose", "history_size", "timeout"]
    ),
    st.none() | hostile.values(),
)
def test_constructors(options: dict[str, Any], group: Any) -> None:
    own = hostile.made({name: value for name, value in options.items() if name not in ("timeout", "unheard_of")})
    if is_made(GradScaler, **own):
        assert GradScaler(**own).state_dict() is not None
    options = hostile.made({name: value for name, value in options.items() if name != "unheard_of"})
    threads = run_ranks(1, lambda ranks: ranks)[0]
    is_made(gradscale.ShardedGradScaler, group=threads if group is None else hostile.made(group), **options)


@fuzz
@given(hostile.values(), st.sampled_from(["growth_factor", "backoff_factor", "growth_interval", "update", "max_norm"]))
def test_setters(value: Any, what: str) -> None:
    scaler = used()
    before = pickle.dumps(scaler.state_dict())
    made = hostile.made(value)
    optimizer = Tree([np.ones(2, np.float32)])
    if what == "update":
        # An iteration may be ended without a new scale once something was scaled.
        scaler.scale(np.float32(1.0))
        is_refused = not is_made(scaler.update, made)
    elif what == "max_norm":
        is_refused = not is_made(scaler.unscale_, optimizer, max_norm=made)
        assert is_refused == bool(optimizer.grads[0][0] == 1.0)
    else:
        is_refused = not is_made(getattr(scaler, f"set_{what}"), made)
    if is_refused:
        assert_unchanged(scaler, before)


@fuzz
@given(hostile.values() | st.lists(st.booleans() | hostile.values(), max_size=5), st.text("cCoO x", max_size=6))
def test_traces(trace: Any, text: str) -> None:
    for function in (simulation.recorded, simulation.measured, simulation.Gradients):
        is_made(lambda function=function: function(hostile.made(trace)))
    is_made(lambda: simulation.simulate(DynamicScale(growth_interval=2), hostile.made(trace)))
    is_made(simulation.simulate, DynamicScale(growth_interval=2), text)
    is_made(lambda: simulation.simulate(hostile.made(trace), "CO"))


@fuzz
@given(
    st.binary(max_size=60)
    | st.text(max_size=60).map(str.encode)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
        lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=4), below, max_size=3),
    ).map(lambda value: json.dumps(value).encode()),
    hostile.values(),
)
def test_logs(tmp_path_factory: pytest.TempPathFactory, content: bytes, path: Any) -> None:
    file = Path(tmp_path_factory.getbasetemp(), "log.jsonl")
    file.write_bytes(content)
    is_made(read_log, file)
    made = hostile.made(path)
    if not isinstance(made, int):
        is_made(read_log, made)


@fuzz
@given(hostile.trees())
def test_trees(spec: Any) -> None:
    scaler = used()
    before = pickle.dumps(scaler.state_dict())
    state = DynamicScale(init_scale=2.0).init(np.float32(1.0))
    with np.errstate(all="ignore"):
        for call in (scaler.scale, lambda outputs: gradscale.scale(outputs, state), tree.leaves_with_paths):
            is_made(call, hostile.made(spec))  # type: ignore[arg-type]
        is_made(gradscale.unscale, hostile.made(spec), state)
        is_made(gradscale.select, np.asarray(True), hostile.made(spec), hostile.made(spec))
        is_made(gradscale.unscale, hostile.made(spec), state, out=hostile.made(spec))
    assert pickle.dumps(scaler.state_dict()) == before


@fuzz
@given(hostile.trees(), st.sampled_from(["grads", "params", "group", "groups", "optimizer"]), st.booleans())
def test_param_groups(spec: Any, where: str, names_it: bool) -> None:
    scaler = used()
    before = pickle.dumps(scaler.state_dict())
    made = hostile.made(spec)
    optimizer: Any = Grouped([np.ones(1, np.float32)])
    if where == "grads":
        optimizer = Tree(made)
    elif where == "params":
        optimizer.param_groups = [{"params": made}]
    elif where == "group":
        optimizer.param_groups = [made]
    elif where == "groups":
        optimizer.param_groups = made
    else:
        optimizer = made
    scaler.scale(np.float32(1.0))
    with np.errstate(all="ignore"):
        is_made(scaler.diagnose, optimizer, hostile.made(spec) if names_it else None)
        if not is_made(scaler.unscale_, optimizer):
            assert pickle.dumps(scaler.state_dict()) == before
            scaler.update()
            iterate_plainly(scaler, 1)
