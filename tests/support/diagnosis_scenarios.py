"""What the ranks do in the tests of gathered diagnoses: functions of a group, run in every world."""

from __future__ import annotations

import math

import numpy as np
from momentum import Momentum, of, overflow
from scenarios import SGD, begun, gradients, loss, raised, rank_and_size

import gradscale


def bad_on(group, bad_rank: int, library: str, when: str):
    """Gather a diagnosis before or after a step in which one rank holds a NaN, which it names."""
    rank, scaler, optimizer = begun(group)
    optimizer.grads = gradients(library)
    if rank == bad_rank:
        optimizer.grads[1] = optimizer.grads[1] * math.nan
    scaler.scale(loss(library))
    if when != "before":
        scaler.step(optimizer)
    if when == "after update":
        scaler.update()
    report = scaler.diagnose(optimizer, ["a", "b", "c"], gather=True)
    if when == "before":
        scaler.step(optimizer)
    assert [(one.name, one.rank, one.nan) for one in report.entries if one.nan] == [("b", (bad_rank,), 10)]
    assert len(report.entries) == 3 * rank_and_size(group)[1]
    assert {one.largest for one in report.entries} == {None, 1.0}
    assert (report.scale, report.iteration, report.cause) == (65536.0, 1, "scale")
    assert f"b on rank {bad_rank} overflows" in report.to_dict()["explanation"]
    assert str(report).splitlines()[4].split()[:2] == ["b", str(bad_rank)]
    assert scaler.last_step(optimizer).skipped
    assert len(scaler.diagnose(optimizer).entries) == 3
    return report.to_dict()


def on_overflow(group, bad_rank: int, bad_loss: bool):
    """Let the scaler gather by itself when a step is skipped."""
    rank, scaler, optimizer = begun(group, diagnose="on_overflow")
    optimizer.grads = gradients("numpy", np.inf if rank == bad_rank else 1.0)
    scaler.scale(np.float32(np.nan if bad_loss and rank == bad_rank else 1.0))
    scaler.step(optimizer)
    report = scaler.last_step(optimizer).overflow
    assert (report.cause, report.loss_nonfinite) == ("model" if bad_loss else "scale", int(bad_loss))
    assert {one.rank for one in report.entries if one.inf} == {(bad_rank,)}
    return report.to_dict()


def broken_on(group, bad_rank: int, place: str, library: str):
    """Gather a search of weights and a state, of which one array is bad on one rank, or on all for rank -1."""
    rank, scaler, optimizer = begun(group)
    scaler.scale(loss(library))
    optimizer.grads = gradients(library)
    held = {"params": gradients(library), "state": {"momentum": [*gradients(library), None]}}
    places = {"weight": held["params"], "state": held["state"]["momentum"]}  # type: ignore[call-overload]
    # A weight is named before a state, whatever ranks hold that.
    for bad in [name for name in places if place in (name, "both")]:
        if bad_rank in (rank, -1) or (place == "both" and bad == "state"):
            places[bad][1] = places[bad][1] * math.inf
    # One rank asks for nothing, and hears of it all the same.
    asked = held if rank == bad_rank or bad_rank < 0 or rank == 0 else {}
    report = scaler.diagnose(optimizer, gather=True, **asked)
    ranks = [bad_rank] if bad_rank >= 0 else list(range(rank_and_size(group)[1]))
    name, key, kind = ("state", "['momentum'][1]", "state") if place == "state" else ("[1]", "", "weight")
    assert report.cause == ("weights" if kind == "weight" else "optimizer state")
    found = [(one.name, one.key, one.rank) for one in report.broken if one.kind == kind]
    assert found == [(name, key, (one,)) for one in ranks]
    assert (len(found) < len(report.broken)) == (place == "both")
    assert f"on rank {', '.join(map(str, ranks))}, the most in {name + key!r}" in report.explanation
    return report.to_dict()


def found_by_itself_on(group, bad_rank: int, place: str):
    """Break the model on one rank, and let another one overflow three times."""
    rank, scaler, _ = begun(group, diagnose="on_overflow")
    optimizer = Momentum()
    overflow(scaler, optimizer, 1.0)
    if rank == bad_rank:
        (optimizer.weights[1] if place == "weight" else of(optimizer, 1)["exp_avg"])[0] = math.nan
    reports = [overflow(scaler, optimizer, math.inf if rank == 0 else 1.0).overflow for _ in range(3)]
    assert [(one.cause, one.broken) for one in reports[:2]] == [("scale", None)] * 2
    third = reports[2]
    assert third.cause == ("weights" if place == "weight" else "optimizer state")
    found = [(one.name, one.key, one.rank, one.nan) for one in third.broken]
    assert found == [("layer.1", "" if place == "weight" else "exp_avg", (bad_rank,), 1)]
    return [report.to_dict() for report in reports]


def nothing_on(group, empty_rank: int):
    """Gather where one rank has seen no array at all."""
    rank, scaler, _ = begun(group, backend="numpy")
    if rank != empty_rank:
        scaler.scale(np.float32(1.0))
    report = scaler.diagnose(SGD([] if rank == empty_rank else gradients("numpy")), gather=True)
    assert [one.largest for one in report.entries] == [1.0] * 3 * (rank_and_size(group)[1] - 1)
    return report.to_dict()


def many(group, count: int):
    """Gather more parameters than a report lists: it keeps the worst."""
    rank, scaler, _ = begun(group)
    size = rank_and_size(group)[1]
    scaler.scale(np.float32(1.0))
    bad = count - 1
    grads = [np.full(2, np.inf if rank == 0 and k < bad else 1.0, np.float32) for k in range(count)]
    report = scaler.diagnose(SGD(grads), gather=True)
    listed = 4096 // size
    assert len(report.entries) == listed * size
    omitted = report.omitted_nonfinite, report.omitted_finite
    assert omitted == (bad - listed, 1 + (count - listed) * (size - 1)), omitted
    assert sorted((entry.rank, entry.index) for entry in report.nonfinite) == [((0,), k) for k in range(listed)]
    assert str(report).startswith(f"{bad} of {count * size} gradients"), str(report)[:40]
    return report.to_dict()


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


def scaled_on(group, scaling_rank: int):
    """Call ``scale`` on one rank alone, as a pipeline does; gather in the second iteration and after it."""
    rank, scaler, optimizer = begun(group)
    reports = []
    for value in (np.inf, 1.0):
        if rank == scaling_rank:
            scaler.scale(np.float32(1.0))
        optimizer.grads = gradients("numpy", value)
        reports.append(scaler.diagnose(optimizer, gather=True))
        scaler.step(optimizer)
        scaler.update()
    reports.append(scaler.diagnose(optimizer, gather=True))
    assert [(one.scale, one.iteration) for one in reports] == [(65536.0, 1), (32768.0, 2), (32768.0, 2)]
    return [one.to_dict() for one in reports]
