"""The equivalences hold for every head: eagerly, under jit, on a mesh, in fp32 and in fp64."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax import check
from dspark_jax.config import Convolution, Domino, Markov, Recurrent
from dspark_jax.decode import propose
from dspark_jax.nn import selector
from dspark_jax.nn.drafter import Drafter
from dspark_jax.nn.target import Target
from dspark_jax.sharding import make_mesh, place, place_rows

from .conftest import DRAFTER, TARGET

ROWS = 8
DRAFTERS = {
    "none": {"head": None, "predict_from_anchor": False},
    "vanilla": {"head": Markov(rank=4)},
    "gated": {"head": Markov(rank=4, gate="gated")},
    "linear": {
        "head": Markov(rank=4, gate="linear"),
        "predict_from_anchor": False,
        "convolution": Convolution(group_size=8),
        "windows": (6, None),
    },
    "rnn": {"head": Recurrent(rank=4)},
    "domino": {"head": Domino(rank=5, gru_width=6), "predict_from_anchor": False},
    "domino shifted": {"head": Domino(rank=5, gru_width=6, pure_prefix=0)},
}

REDUCED = {"reduced": {"head": Markov(rank=4, gate="gated"), "draft_vocab_size": 48}}


def random(module: nnx.Module, dtype) -> nnx.Module:
    """Parameters drawn by NumPy, large enough for laws far from uniform."""
    draws = np.random.default_rng(0)
    graphdef, state = nnx.split(module)

    def draw(x):
        if x.dtype == jnp.int32:  # which tokens are drafted
            return jnp.arange(x.size, dtype=jnp.int32) * 2 + 1
        noise = draws.normal(size=x.shape)
        return jnp.asarray(noise / 3 if len(x.shape) > 1 else 1 + noise / 8, dtype)

    return nnx.merge(graphdef, jax.tree.map(draw, state))


def make_case(name: str, dtype=jnp.float32) -> check.Case:
    """Eight blocks of a tiny drafter over 96 tokens, which two devices can share."""
    change = {"confidence": None, "vocab_size": 96, "mask_token": 95, **(DRAFTERS | REDUCED)[name]}
    config = dataclasses.replace(DRAFTER, **change)
    target_config = dataclasses.replace(TARGET, vocab_size=96)
    target, drafter = nnx.eval_shape(
        lambda: (Target(target_config, rngs=nnx.Rngs(0)), Drafter(config, rngs=nnx.Rngs(0)))
    )
    return check.make_case(random(target, dtype), random(drafter, dtype), ROWS)


def spread(case: check.Case) -> check.Case:
    """The case on eight devices: tables split over the vocabulary, rows over `data`."""
    mesh = make_mesh("data=4,tensor=2")
    rows = place_rows({n: case[n] for n in ("features", "anchors", "keys")}, ROWS, mesh)
    graphdef, params = nnx.split(case.drafter)
    drafter = nnx.merge(graphdef, place(params, mesh))
    lent = place({"embed_tokens": case.lent.embedding, "lm_head": case.lent.head}, mesh)
    lent = case.lent.replace(embedding=lent["embed_tokens"], head=lent["lm_head"])
    assert len(lent.head.addressable_shards[0].data) == 48
    return case.replace(drafter=drafter, lent=lent, **rows)


def assert_all_pass(findings: list[check.Finding], name: str):
    assert [f for f in findings if not f.passed] == []
    checked = [f.says for f in findings if f.difference is not None]
    assert len(checked) == {"none": 6, "rnn": 5, "linear": 9}.get(name, 5 if "dom" in name else 8)


# By default every head once, the mesh's programs being jitted too; everything on demand.
CASES = [(name, "mesh") for name in ("linear", "rnn", "domino")]
CASES += [(name, "jit") for name in ("none", "vanilla", "gated", "domino shifted")]
MORE = [(n, how) for how in ("eager", "jit", "mesh") for n in DRAFTERS if (n, how) not in CASES]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in MORE]


@pytest.mark.parametrize(("name", "how"), CASES + SLOW)
def test_every_statement_holds(name, how):
    """F11 too: along a walk's own path, `follow` sees what the walk saw, for every kind of head."""
    case = make_case(name)
    case = spread(case) if how == "mesh" else case
    transform = (lambda sides: sides) if how == "eager" else jax.jit
    assert_all_pass(list(check.check(case, transform)), name)


@pytest.mark.slow
def test_every_statement_holds_for_a_reduced_vocabulary():
    assert_all_pass(list(check.check(make_case("reduced"))), "reduced")


PRECISE = ("linear", "domino")
LESS = [pytest.param(name, marks=pytest.mark.slow) for name in DRAFTERS if name not in PRECISE]


@pytest.mark.parametrize("name", [*PRECISE, *LESS])
def test_it_is_the_mathematics_that_agree(name):
    """fp64: to 1e-12 of the largest value."""
    with jax.enable_x64(True):
        case = make_case(name, jnp.float64)
        chex.assert_type(case.hidden(), jnp.float64)
        findings = list(check.check(case))
    assert_all_pass(findings, name)
    assert {f.limit for f in findings} == {0.0, 1e-12}


def test_nan_anywhere_is_never_within_the_limit():
    theirs = jnp.ones(3)
    nan = check.difference((theirs, jnp.full(3, jnp.nan)), (theirs, theirs))
    assert not check.Finding("", nan, 1e-6).passed


def test_a_broken_part_is_found(monkeypatch):
    """A check that cannot fail proves nothing: pairs transposed, an associative walk off by one."""
    sound, walked = selector.pair_scores, propose.walk_table_associative
    monkeypatch.setattr(selector, "pair_scores", lambda *args: jnp.swapaxes(sound(*args), -1, -2))
    shifted = lambda *args: jax.tree.map(lambda x: jnp.roll(x, 1, 0), walked(*args))  # noqa: E731
    monkeypatch.setattr(propose, "walk_table_associative", shifted)
    failed = {f.says for f in check.check(make_case("gated")) if not f.passed}
    assert failed == {
        "Selector with sigmoid gate == gated Markov on the candidates",
        "vmap of vmap == einsum",
        "C = V candidate walk == sequential walk on the first 128 tokens (greedy and sampled)",
        "C < V candidate walk == sequential walk on masked logits",
        "scan == associative == loop (greedy and sampled)",
    }
