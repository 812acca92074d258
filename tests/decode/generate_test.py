"""Losslessness: whatever is drafted, greedy output is the target's own."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.config import Domino, Markov, Recurrent
from dspark_jax.decode import generate
from dspark_jax.decode.draft import NoProposer
from dspark_jax.decode.engine import Request, engine
from dspark_jax.decode.propose import Candidates
from dspark_jax.nn.target import Target

from ..conftest import TARGET, sharpened
from . import doubles
from .conftest import PROMPTS, SHAPES, VOCABULARY

NEW = 40
RAGGED = tuple(PROMPTS[n] for n in doubles.RAGGED)
LONG = tuple(np.random.default_rng(0).integers(97, size=48).tolist())
SCRIPTS = (doubles.oracle, doubles.half, doubles.stubborn, doubles.adversary)


def slowly(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def ask(prompts, new=NEW, **how) -> list[Request]:
    return [Request(tokens=prompt, max_new_tokens=new, **how) for prompt in prompts]


def assert_untouched(generations, expected):
    """Same tokens, same count, same reason."""
    for generation, tokens in zip(generations, expected, strict=True):
        assert generation.tokens == tokens
        assert generation.finish_reason == "length"


@pytest.mark.parametrize(
    ("size", "rows"),
    [
        *((size, 4) for size in (1, 2, 4, 7)),
        *((size, 1) for size in (1, 4)),
        *(slowly(size, 1) for size in (2, 7)),
    ],
)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_output_is_the_targets_own_whatever_is_drafted(
    streams, greedy, scripted, script, size, rows
):
    prompts = RAGGED[-rows:]
    truth = streams(prompts)
    lines = script(truth, size)
    generations = scripted(lines).generate(ask(prompts))
    assert_untouched(generations, [greedy(prompt, NEW) for prompt in prompts])
    for i, generation in enumerate(generations):
        length = len(prompts[i])
        expected = doubles.replay(lines[i], truth[i], length, length + NEW)
        assert (generation.rounds, generation.survived) == expected


@pytest.mark.parametrize(
    ("script", "accepted"), [(doubles.oracle, 4), (doubles.half, 2)], ids=["oracle", "half"]
)
def test_each_round_commits_what_stands_and_the_bonus(streams, scripted, script, accepted):
    lines = script(streams(RAGGED), 4)
    for generation in scripted(lines).generate(ask(RAGGED)):
        rounds = math.ceil((NEW - 1) / (accepted + 1))
        assert generation.rounds == rounds
        assert generation.survived == (rounds,) * accepted + (0,) * (4 - accepted)
        assert generation.accepted_length == (NEW - 1) / rounds


@pytest.mark.parametrize(
    ("size", "rows"),
    [
        (1, 4),
        (4, 1),
        (4, 4),
        (7, 4),
        *(slowly(*shape) for shape in [(1, 1), (2, 1), (2, 4), (7, 1)]),
    ],
)
def test_a_drafter_leaves_greedy_output_untouched(greedy, drafted, size, rows):
    prompts = RAGGED[-rows:]
    generations = drafted(block_size=size).generate(ask(prompts))
    assert_untouched(generations, [greedy(prompt, NEW) for prompt in prompts])
    for generation in generations:  # some drafts stand, some do not
        assert 0 < generation.survived[0] < generation.rounds < NEW - 1


LAYOUTS = [
    (False, Markov(rank=97)),
    (False, None),
    (True, None),
    (True, Markov(rank=97, gate="gated")),
    (True, Markov(rank=97, gate="linear")),
    (False, Recurrent(rank=8)),
    (False, Domino(rank=8, gru_width=8, pure_prefix=1)),
    (True, Recurrent(rank=8)),
    (True, Domino(rank=8, gru_width=8, pure_prefix=0)),
]


@pytest.mark.parametrize(
    ("size", "predict_from_anchor", "head"),
    [(4, *layout) for layout in LAYOUTS[:2]]
    + [slowly(4, *layout) for layout in LAYOUTS[2:]]
    + [slowly(size, *layout) for size in (1, 2) for layout in LAYOUTS],
    ids=str,
)
def test_every_layout_and_head_is_lossless(greedy, drafted, size, predict_from_anchor, head):
    """C10."""
    engine = drafted(block_size=size, predict_from_anchor=predict_from_anchor, head=head)
    assert_untouched(engine.generate(ask(RAGGED)), [greedy(prompt, NEW) for prompt in RAGGED])


@pytest.mark.slow
def test_sixty_four_new_tokens_are_the_targets_own(shallow_target, build_drafter):
    """C10: as plain decoding gives them, which needs twice the tiny target's context."""
    config = dataclasses.replace(shallow_target.config, max_length=128)
    longer = nnx.merge(
        nnx.graphdef(nnx.eval_shape(lambda: Target(config, rngs=nnx.Rngs(0)))),
        nnx.state(shallow_target),
    )
    requests = ask(RAGGED, 64)
    plain = engine(longer, None, **SHAPES).generate(requests)
    assert [len(generation.tokens) for generation in plain] == [64] * len(RAGGED)
    generations = engine(longer, build_drafter(block_size=4), **SHAPES).generate(requests)
    assert_untouched(generations, [generation.tokens for generation in plain])
    assert all(0 < g.survived[0] < g.rounds for g in generations)


def test_windows_and_causal_blocks_of_a_drafter_are_lossless(greedy, shallow_target, build_drafter):
    """C20: contexts far past the window, and no draft of any round stands."""
    layout = {"windows": (8, 4), "causal": (True, False), "block_size": 4}
    drafter = nnx.clone(build_drafter(head=Markov(rank=4), **layout))
    expected = [greedy(prompt, NEW) for prompt in RAGGED]
    never = min(set(range(VOCABULARY)) - set(sum(expected, ())))
    drafter.heads.head.w1.set_value(jnp.ones((VOCABULARY, 4)))
    drafter.heads.head.w2.set_value(jnp.zeros((VOCABULARY, 4)).at[never].set(1e4))
    generations = engine(shallow_target, drafter, **SHAPES).generate(ask(RAGGED))
    assert_untouched(generations, expected)
    assert {(g.rounds, g.survived) for g in generations} == {(NEW - 1, (0, 0, 0, 0))}


def test_a_reduced_vocabulary_leaves_greedy_output_untouched(
    greedy, shallow_target, build_drafter, commonest
):
    """It knows every other token; drafts of those it knows may stand."""
    drafter = nnx.clone(build_drafter(head=Markov(rank=4), draft_vocab_size=48))
    tokens = jnp.arange(48) * 2 + commonest % 2
    drafter.heads.draft_tokens.set_value(tokens)
    drafter.heads.lm_head.set_value(shallow_target.head[tokens])
    one = engine(shallow_target, drafter, **SHAPES)
    assert_untouched(one.generate(ask(RAGGED)), [greedy(prompt, NEW) for prompt in RAGGED])


def test_fewer_drafts_than_the_block_holds(greedy, drafted, shallow_target, build_drafter):
    """C26: two of four stand as often as the first two of four; more than four are refused."""
    drafter, prompts = build_drafter(block_size=4), [PROMPTS[12]]
    fewer = engine(shallow_target, drafter, block_size=2, **SHAPES).generate(ask(prompts, 2))
    whole = drafted(block_size=4).generate(ask(prompts, 2))  # one round each, the same draft
    assert fewer[0].survived == whole[0].survived[:2]
    fewer = engine(shallow_target, drafter, block_size=2, **SHAPES).generate(ask(RAGGED))
    assert_untouched(fewer, [greedy(prompt, NEW) for prompt in RAGGED])
    with pytest.raises(ValueError, match=r"block_size = 6: this drafter drafts 1..4 tokens"):
        engine(shallow_target, drafter, block_size=6, **SHAPES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("walk", "head"),
    [
        ("scan", Markov(rank=97)),
        ("associative", Markov(rank=97)),
        ("scan", Domino(rank=8, gru_width=8)),
    ],
    ids=str,
)
def test_a_vocabulary_cut_to_candidates_is_lossless(greedy, drafted, walk, head):
    engine = drafted(block_size=4, head=head)
    cut = dataclasses.replace(engine.proposer, candidates=Candidates(count=8, walk=walk))
    generations = dataclasses.replace(engine, proposer=cut).generate(ask(RAGGED))
    assert_untouched(generations, [greedy(prompt, NEW) for prompt in RAGGED])


def test_the_mask_token_is_a_token_like_any_other(greedy, drafted, commonest):
    """C15: the target emits it, and nothing is dropped."""
    generations = drafted(block_size=4).generate(ask(RAGGED))
    assert any(commonest in generation.tokens for generation in generations)
    assert_untouched(generations, [greedy(prompt, NEW) for prompt in RAGGED])


@pytest.fixture(scope="module")
def windowed():
    """The tiny target with sliding windows; nothing else differs."""
    config = dataclasses.replace(TARGET, num_layers=2, windows=(8, None))
    return sharpened(Target(config, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("script", [doubles.half, doubles.stubborn], ids=["half", "stubborn"])
@pytest.mark.parametrize("size", [1, 4])
def test_a_sliding_window_survives_long_decoding_and_refused_blocks(
    windowed, greedy, scripted, script, size
):
    """Seven windows long."""
    prompt, new = PROMPTS[3], 57
    stream = doubles.plain_greedy(windowed, [prompt])
    expected = tuple(stream[0, len(prompt) : len(prompt) + new].tolist())
    assert expected != greedy(prompt, new)
    lines = script(stream, size)
    assert_untouched(scripted(lines, windowed).generate(ask([prompt], new)), [expected])


def test_rows_decode_as_if_they_were_alone(greedy, drafted):
    """Sixteen rows of lengths 3 to 18, four, one: same tokens, same accepted counts."""
    engine, prompts = drafted(block_size=4), tuple(PROMPTS.values())
    sixteen = engine.generate(ask(prompts, 24))
    assert_untouched(sixteen, [greedy(prompt, 24) for prompt in prompts])
    assert engine.generate(ask(prompts, 24), batch_size=4) == sixteen
    assert engine.generate(ask(prompts, 24), batch_size=1) == sixteen


def test_rows_of_different_widths_decode_as_if_they_were_alone(greedy, drafted):
    """C21: two, four, one and all drafts of a round may stand."""
    engine, prompts = drafted(block_size=4), RAGGED
    requests = [ask([p], num_drafts=n)[0] for p, n in zip(prompts, (2, 4, 1, 0), strict=True)]
    together = engine.generate(requests)
    assert_untouched(together, [greedy(prompt, NEW) for prompt in prompts])
    assert together == engine.generate(requests, batch_size=1)
    for generation, width in zip(together, (2, 4, 1, 4), strict=True):
        assert generation.survived[width - 1] > 0 or width == 4
        assert not any(generation.survived[width:])
    with pytest.raises(ValueError, match=r"request 0: num_drafts = 5: must be in 0..4"):
        engine.generate(ask([prompts[0]], num_drafts=5))


def test_a_prompt_may_end_anywhere_in_a_prefill_chunk(shallow_target, scripted):
    prompts = [LONG[:length] for length in (1, 15, 16, 17, 32, 33, 47, 48)]
    truth = doubles.plain_greedy(shallow_target, prompts)
    engine = scripted(doubles.half(truth[:4], 4))  # drafts for the others are as good as random
    generations = engine.generate(ask(prompts, 8), batch_size=4)
    for prompt, stream, generation in zip(prompts, truth, generations, strict=True):
        assert generation.tokens == tuple(stream[len(prompt) :][:8].tolist())


OTHERS = [
    None,
    Markov(rank=97, gate="gated"),
    Markov(rank=97, gate="linear"),
    Recurrent(rank=8),
    Domino(rank=8, gru_width=8),
]


@pytest.mark.parametrize("change", [{}, *(slowly({"head": head}) for head in OTHERS)], ids=str)
def test_a_drafter_corrupted_between_rounds_changes_nothing(greedy, drafted, change):
    """C11."""
    engine = drafted(block_size=4, **change)
    length, models = len(RAGGED[-1]), engine.models
    requests, progress = doubles.begin(engine, doubles.padded(RAGGED[-1]), [length], NEW)
    for _ in range(NEW):
        progress, commit = generate.advance(
            engine.target, engine.proposer, models, requests, progress
        )
        noise = jax.tree.map(lambda x: jnp.roll(-2 * x, 1), models.proposer)
        models = models.replace(proposer=noise)
        if commit.done[0]:
            break
    assert tuple(progress.tokens[0, length : length + NEW].tolist()) == greedy(RAGGED[-1], NEW)


def test_rounds_need_no_host(greedy, drafted):
    engine, length = drafted(block_size=4), len(RAGGED[-1])
    requests, progress = doubles.begin(engine, doubles.padded(RAGGED[-1]), [length], NEW)
    with jax.transfer_guard("disallow"):
        progress = doubles.finish(engine, requests, progress)
    assert tuple(progress.tokens[0, length : length + NEW].tolist()) == greedy(RAGGED[-1], NEW)


@pytest.mark.parametrize(
    "proposer", [NoProposer(), doubles.TableDrafter(vocabulary=4, block_size=2)]
)
def test_ties_go_to_the_lowest_id_in_draft_verify_and_plain_decoding(proposer):
    tied = np.tile(np.asarray([1, 3, 3, 0], np.float32), (85, 1))
    engine = doubles.table_engine(proposer, tied, tied)
    requests, progress = doubles.begin(engine, np.zeros((1, 8)), [1], 7)
    progress = doubles.finish(engine, requests, progress)
    assert progress.tokens[0, 1:].tolist() == [1] * 7
    assert progress.survived[0].tolist() == [2] * proposer.block_size


def test_bf16_output_is_the_targets_own_up_to_near_ties(shallow_target, build_drafter):
    """Teacher-forced: every token is the uncached pass's best, or within the stated gap."""

    def halved(module):
        graphdef, state = nnx.split(module)
        return nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state))

    target, prompt = halved(shallow_target), RAGGED[-1]
    (generation,) = engine(target, halved(build_drafter(block_size=4)), **SHAPES).generate(
        ask([prompt])
    )
    graphdef, params = nnx.split(target)
    tokens = doubles.padded([*prompt, *generation.tokens])
    gaps = []
    for slot in range(len(prompt), len(prompt) + NEW):
        where = np.arange(doubles.SLOTS)[None]
        logits = np.asarray(doubles.forward(graphdef, params, tokens, where, slot - 1))[0]
        gaps.append(logits.max() - logits[tokens[0, slot]])
    assert max(gaps) <= 2 * 2.0**-7 * np.abs(logits).max()  # two steps of bf16
