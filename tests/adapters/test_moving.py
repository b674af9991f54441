"""The pages that lead here from other systems: those of JAX run, and do what the lines before did, to the bit."""

from __future__ import annotations

import pytest
from axes import require
from recipe_blocks import INTEROP, blocks_on, run_on

from gradscale import presets

pytestmark = pytest.mark.tier("all")

PAGES = ("torch_amp", "deepspeed", "megatron")
TABLES = ("apex", "flax", "jmp", "keras")  # of one page
OVERFLOWS = (1, 3, 8)  # of 8 batches


def ran(system: str, block: str, **given):
    """Run a page's block with these names, and return all names that there are then."""
    return run_on(INTEROP / "other.md", block if block == "state_jax" else f"{system}_{block}", **given)


@pytest.mark.tier("quick")
def test_each_page_has_the_lines_before_and_after_and_what_loads_a_state():
    assert {path.stem for path in INTEROP.glob("*.md")} == {*PAGES, "other"}
    tables = blocks_on(INTEROP / "other.md")
    states = {name: tables.pop(name) for name in ("state_torch", "state_jax")}
    assert all("load_foreign_state(" in block for block in states.values())
    assert {name.partition("_")[0] for name in tables} == set(TABLES)
    for system in (*PAGES, *TABLES):
        after = {"after_torch", "after_jax"} if system == "keras" else {"after"}
        prefix = f"{system}_"
        blocks = {name.removeprefix(prefix): block for name, block in tables.items() if name.startswith(prefix)}
        blocks = blocks or blocks_on(INTEROP / f"{system}.md")
        others = {"flax": set(), "apex": set(), "jmp": set()}.get(system, {"state"})
        assert set(blocks) == {"before"} | after | others
        # Not all of those systems can be had here.
        compile(blocks["before"], system, "exec")
        name = system.removesuffix("_amp")
        assert name == "torch" or f"presets.{name}(" in "".join(blocks[block] for block in after)
        assert name in presets.names()


def jax_names():
    """Return what the pages for JAX take for granted; some batches overflow."""
    jnp, optax = require("jax").numpy, require("optax")
    # By powers of two, since compilers may add before they round a product.
    tx = optax.sgd(0.25, momentum=0.5)
    params = {"w": jnp.asarray([0.5, -2.0, 0.125])}
    batches = [jnp.full(3, jnp.inf if number in OVERFLOWS else number / 8.0) for number in range(1, 9)]
    return {
        "tx": tx,
        "params": params,
        "opt_state": tx.init(params),
        "loader": batches,
        "loss_of": lambda params, batch: jnp.mean((params["w"] * batch - 1.0) ** 2),
    }


@pytest.mark.jax
@pytest.mark.parametrize(
    ("system", "kept", "scale"), [("flax", "dynamic_scale", 2.0**13), ("jmp", "loss_scale", 2.0**12)]
)
def test_from_a_scaler_of_jax_every_bit_stays(system: str, kept: str, scale: float, capsys: pytest.CaptureFixture[str]):
    jax = require("jax")
    require(system)
    before, after = (ran(system, block, **jax_names()) for block in ("before", "after"))
    ends = (jax.tree.leaves((one["params"], one["opt_state"])) for one in (before, after))
    for theirs, ours in zip(*ends, strict=True):
        assert theirs.tolist() == ours.tolist()
    assert after["params"]["w"].tolist() != jax_names()["params"]["w"].tolist()
    saved = vars(before[kept])
    assert [float(saved["scale" if system == "flax" else "loss_scale"]), float(after["state"].scale)] == [scale, scale]
    # A batch more, which does not overflow, so that there is a step to count.
    more = {"loader": [jax_names()["loader"][1]]}
    before, after = (ran(system, block, **jax_names() | more) for block in ("before", "after"))
    loaded = ran(system, "state_jax", saved=vars(before[kept]))
    assert [number.item() for number in loaded["state"]] == [number.item() for number in after["state"]]
    assert loaded["state"].growth_tracker == 1
    assert loaded["policy"].growth_interval == 500
    assert f"{system} state" in capsys.readouterr().out
