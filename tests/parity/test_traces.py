"""DynamicScale against the recorded scales of 48 variants of known systems, step by step.

``policy_traces.json`` holds the scale after each step of four sequences of clean (C) and overflowing (O) steps, as the
original code gave it, or what it raised. Common numbers: scale 256, interval 4, factor 2, minimum 1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from libraries import Library, opened
from optimizers import Tree, iterate

from gradscale import DynamicScale, GradScaler, ScaleUnderflowError

TRACES = json.loads(Path(__file__).with_name("policy_traces.json").read_text(encoding="utf-8"))
SEQUENCES: dict[str, str] = TRACES["sequences"]
RECORDED: dict[str, dict[str, list[Any]]] = {
    name: variant["scale_after_each_step"] for name, variant in TRACES["implementations"].items()
}

CLEAN, GROWTH, CLEAN_OR_BACKOFF = ("clean_step",), ("growth",), ("clean_step", "backoff")


def policy(**settings: Any) -> DynamicScale:
    """Return a policy with the traces' common numbers."""
    return DynamicScale(**{"init_scale": 256.0, "growth_interval": 4} | settings)


def fairseq(tolerance: float, smallest: float, at_min: Any = "raise") -> DynamicScale:
    """Return fairseq's rule, whose ``smallest`` is the least scale that it does not raise at reaching."""
    return policy(tolerance=tolerance, min_scale=smallest, at_min=at_min)


EXPRESSED: dict[str, DynamicScale] = {
    "apex.amp.LossScaler(min=None)": policy(max_scale=4096.0),
    "apex.amp.LossScaler(min=1.0)": policy(max_scale=4096.0, min_scale=1.0),
    "apex.fp16_utils.DynamicLossScaler": policy(min_scale=1.0),
    "apex.contrib.FP16_Optimizer": policy(min_scale=1.0),
    "deepspeed.FP16_Optimizer(stage0)": policy(min_scale=1.0, growth_after="first_interval_plus_one"),
    # It raises when a decrease would reach its minimum: 0.0001 is passed from 2**-13, and 1 from 2.
    "fairseq.DynamicLossScaler(tol=0.0,threshold=None,min=0.0001)": fairseq(0.0, 2.0**-13),
    "fairseq.DynamicLossScaler(tol=0.3,threshold=None,min=0.0001)": fairseq(0.3, 2.0**-13),
    "fairseq.DynamicLossScaler(tol=0.0,threshold=None,min=1.0)": fairseq(0.0, 2.0),
    # Its threshold clamps, above the minimum at which it would raise.
    "fairseq.DynamicLossScaler(tol=0.0,threshold=8.0,min=0.0001)": fairseq(0.0, 8.0, at_min="clamp"),
    "mindspore.DynamicLossScaleManager": policy(min_scale=1.0),
    "jmp.DynamicLossScale": policy(min_scale=1.0),
    "flax.DynamicScale": policy(min_scale=1.0, growth_after="interval_plus_one"),
    "mpx.DynamicLossScaling": policy(min_scale=1.0, max_scale=65504.0),
    "keras.LossScaleOptimizer": policy(),
}
for _h in (1, 2, 3):
    EXPRESSED[f"apex.amp_C.update_scale_hysteresis(h={_h})"] = policy(hysteresis=_h, hysteresis_refill=CLEAN)
    EXPRESSED[f"megatron.DynamicGradScaler(h={_h})"] = policy(hysteresis=_h, hysteresis_refill=GROWTH, min_scale=1.0)
    for _consecutive in (False, True):
        for _raises in (False, True):
            _name = f"deepspeed.DynamicLossScaler(h={_h},consecutive={_consecutive},raise={_raises})"
            EXPRESSED[_name] = policy(
                hysteresis=_h,
                hysteresis_refill=CLEAN if _consecutive else GROWTH,
                growth_after="first_interval_plus_one",
                min_scale=1.0,
                at_min="raise" if _raises else "clamp",
            )
for _h in (0, 1, 2, 3):
    # Its hysteresis of 0 is one of 1.
    EXPRESSED[f"colossalai.DynamicGradScaler(h={_h})"] = policy(
        hysteresis=max(_h, 1), hysteresis_refill=GROWTH, min_scale=1.0, max_scale=4096.0
    )
for _n in (1, 2):
    EXPRESSED[f"paddle.AmpScaler._update(decr_every_n={_n})"] = policy(
        hysteresis=_n, hysteresis_refill=CLEAN_OR_BACKOFF
    )
    EXPRESSED[f"paddle.phi.update_loss_scaling(decr_every_n={_n})"] = policy(
        hysteresis=_n, hysteresis_refill=CLEAN_OR_BACKOFF, min_scale=1.0
    )

_METASEQ = "growth doubles the interval and backoff halves it"
NOT_EXPRESSED = {
    "metaseq.DynamicLossScaler(tol=0.0,threshold=None,min=0.0001)": _METASEQ,
    "metaseq.DynamicLossScaler(tol=0.3,threshold=None,min=0.0001)": _METASEQ,
    "metaseq.DynamicLossScaler(tol=0.0,threshold=8.0,min=0.0001)": _METASEQ,
    "metaseq.DynamicLossScaler(tol=0.0,threshold=None,min=1.0)": _METASEQ,
    "chainer.Optimizer.loss_scaling(interval=4)": "grows by the interval-th root of 2 on every clean step",
    "mxnet.amp.LossScaler": "changes of the scale take effect one call late",
    "guided_diffusion.MixedPrecisionTrainer": "grows by 2**0.001 on every clean step, in the logarithm",
    "optax.apply_if_finite(max_consecutive_errors=3)": "has no scale",
}


def trace(arrays: Library, rule: DynamicScale, sequence: str) -> list[Any]:
    """Return the scale after each step, ending in "raised" where an overflow exhausts the policy."""
    state = rule.init(arrays.asarray(0.0))
    got: list[Any] = []
    for step in sequence:
        exhausted = rule.exhausted(state)
        if step == "O" and exhausted is not None and arrays.item(exhausted):
            return [*got, "raised"]
        state = rule.update(state, arrays.asarray(int(step == "O"), "int32"))
        got.append(arrays.item(state.scale))
    return got


def plain(recorded: list[Any]) -> list[Any]:
    """Return a recorded trace with "raised" in place of the original's exception."""
    return ["raised" if isinstance(value, dict) else value for value in recorded]


def test_no_variant_is_left_out() -> None:
    assert len(RECORDED) == 48
    assert EXPRESSED.keys() | NOT_EXPRESSED.keys() == RECORDED.keys()
    assert not EXPRESSED.keys() & NOT_EXPRESSED.keys()
    assert all(set(recorded) == set(SEQUENCES) for recorded in RECORDED.values())


@pytest.mark.parametrize("name", EXPRESSED)
def test_the_scale_is_the_originals_after_each_step(arrays: Library, name: str) -> None:
    for sequence, steps in SEQUENCES.items():
        expected = plain(RECORDED[name][sequence])
        assert len(expected) == len(steps) or expected[-1] == "raised"
        assert trace(arrays, EXPRESSED[name], steps) == expected, sequence


@pytest.mark.parametrize("name", [name for name in NOT_EXPRESSED if "optax" not in name])
def test_what_is_not_expressed_differs_from_the_plain_rule_indeed(strict: Library, name: str) -> None:
    candidates = [policy(), policy(min_scale=1.0), policy(min_scale=8.0), fairseq(0.3, 2.0**-13)]
    for rule in candidates:
        differs = [trace(strict, rule, steps) != plain(RECORDED[name][key]) for key, steps in SEQUENCES.items()]
        assert any(differs)


def test_a_wrong_rule_does_not_pass(strict: Library) -> None:
    """Every setting is told apart from its neighbours by some sequence."""
    wrong = {
        "megatron.DynamicGradScaler(h=2)": EXPRESSED["apex.amp_C.update_scale_hysteresis(h=2)"],
        "apex.amp_C.update_scale_hysteresis(h=2)": EXPRESSED["paddle.AmpScaler._update(decr_every_n=2)"],
        "flax.DynamicScale": EXPRESSED["deepspeed.FP16_Optimizer(stage0)"],
        "jmp.DynamicLossScale": EXPRESSED["flax.DynamicScale"],
        "keras.LossScaleOptimizer": EXPRESSED["jmp.DynamicLossScale"],
        "fairseq.DynamicLossScaler(tol=0.3,threshold=None,min=0.0001)": fairseq(0.0, 2.0**-13),
        "deepspeed.DynamicLossScaler(h=1,consecutive=True,raise=True)": policy(
            growth_after="first_interval_plus_one", min_scale=1.0
        ),
    }
    for name, rule in wrong.items():
        assert any(trace(strict, rule, steps) != plain(RECORDED[name][key]) for key, steps in SEQUENCES.items()), name


@pytest.mark.numpy
@pytest.mark.parametrize("name", [name for name in EXPRESSED if name.startswith(("deepspeed", "fairseq"))])
def test_the_scaler_raises_where_the_original_does(name: str) -> None:
    with opened("numpy") as library:
        for sequence, steps in SEQUENCES.items():
            scaler, optimizer = GradScaler(policy=EXPRESSED[name]), Tree()
            got: list[Any] = []
            for step in steps:
                try:
                    iterate(library, scaler, optimizer, [float("nan") if step == "O" else 1.0])
                except ScaleUnderflowError:
                    got.append("raised")
                    break
                got.append(scaler.get_scale())
            assert got == plain(RECORDED[name][sequence]), sequence
