"""Requests: limits, stops, seeds, streams, errors; and how many programs are compiled."""

import dataclasses
import logging

import jax
import numpy as np
import pytest
from flax import nnx

from dspark_jax.decode.engine import Request, engine
from dspark_jax.nn.drafter import Drafter, check_pair
from dspark_jax.nn.target import Target

from ..conftest import DRAFTER, GEOMETRY, TARGET
from . import doubles
from .conftest import PROMPTS, VOCABULARY

RAGGED = tuple(PROMPTS[n] for n in doubles.RAGGED)
PROMPT = PROMPTS[18]
LONG = tuple(np.random.default_rng(0).integers(VOCABULARY, size=64).tolist())


def streamed(engine, request):
    """Pieces of a stream, and its Generation."""
    pieces, stream = [], engine.stream(request)
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            return pieces, end.value


@pytest.fixture
def knowing(streams, scripted):
    """An engine whose drafts for these prompts are always right, four at a time."""

    def build(prompts=(PROMPT,), **options):
        return scripted(doubles.oracle(streams(prompts), 4), **options)

    return build


@pytest.mark.parametrize("new", [0, 1, 2, 5, 6, 7])
def test_the_bound_on_new_tokens_is_exact(knowing, greedy, new):
    (generation,) = knowing().generate([Request(PROMPT, max_new_tokens=new)])
    assert generation.tokens == greedy(PROMPT, new)
    assert generation.finish_reason == "length"
    assert generation.rounds == -(-max(new - 1, 0) // 5)
    assert (generation.accepted_length is None) == (generation.rounds == 0)


@pytest.mark.parametrize(("length", "new"), [(60, 4), (63, 1), (64, 0)])
def test_the_context_limit_ends_a_row(knowing, greedy, length, new):
    prompt = LONG[:length]
    (generation,) = knowing([prompt]).generate([Request(prompt, max_new_tokens=50)])
    assert generation.tokens == greedy(prompt, 50)
    assert len(generation.tokens) == new
    assert generation.finish_reason == "length"


@pytest.mark.parametrize("index", range(8))
def test_a_stop_token_ends_a_row_wherever_it_stands_in_a_block(knowing, greedy, index):
    """As the prefill's token, as a draft, as a bonus; nothing behind it is returned."""
    stream = greedy(PROMPT, 40)
    stop = stream[index]
    (generation,) = knowing(stop_tokens=(stop,)).generate([Request(PROMPT, max_new_tokens=40)])
    assert generation.tokens == stream[: stream.index(stop) + 1]
    assert generation.finish_reason == "stop"


def test_any_of_several_stop_tokens_ends_a_row_and_no_other_does(knowing, greedy):
    """Rows stop apart from each other."""
    continuations = [greedy(prompt, 40) for prompt in RAGGED]
    stops = (continuations[0][6], continuations[3][9])
    engine = knowing(RAGGED, stop_tokens=stops)
    generations = engine.generate([Request(p, max_new_tokens=40) for p in RAGGED])
    for generation, stream in zip(generations, continuations, strict=True):
        ends = [i for i, token in enumerate(stream) if token in stops]
        assert generation.tokens == stream[: ends[0] + 1 if ends else 40]
        assert generation.finish_reason == ("stop" if ends else "length")
    assert len({len(generation.tokens) for generation in generations}) > 2


def test_a_stop_token_at_the_limit_is_a_stop(knowing, greedy):
    stream = greedy(PROMPT, 40)
    index = next(i for i in range(4, 40) if stream[i] not in stream[:i])
    engine = knowing(stop_tokens=(stream[index],))
    (generation,) = engine.generate([Request(PROMPT, max_new_tokens=index + 1)])
    assert (generation.tokens, generation.finish_reason) == (stream[: index + 1], "stop")


def test_a_stream_gives_the_prefills_token_then_one_piece_a_round(knowing, greedy):
    """The prefill's token is counted once; an accepted block comes with the token behind it."""
    engine, request = knowing(), Request(PROMPT, max_new_tokens=14)
    pieces, generation = streamed(engine, request)
    assert [len(piece) for piece in pieces] == [1, 5, 5, 3]
    assert sum(pieces, ()) == generation.tokens == greedy(PROMPT, 14)
    assert 1 + generation.rounds * generation.accepted_length == 14
    assert [generation] == engine.generate([request])


@pytest.mark.parametrize("how", [{}, {"temperature": 0.8, "top_k": 20, "seed": 5}], ids=str)
def test_a_stream_is_the_generation_in_pieces(drafted, how):
    engine, request = drafted(block_size=4), Request(PROMPT, max_new_tokens=30, **how)
    pieces, generation = streamed(engine, request)
    assert sum(pieces, ()) == generation.tokens
    assert all(pieces)
    assert [generation] == engine.generate([request])


def test_an_empty_stream_ends_at_once(knowing):
    pieces, generation = streamed(knowing(), Request(PROMPT, max_new_tokens=0))
    assert (pieces, generation.tokens) == ([], ())


def test_a_stream_may_be_left_early(drafted, greedy):
    """Others, begun before or after, are as they were."""
    engine = drafted(block_size=4)
    left = engine.stream(Request(PROMPT, max_new_tokens=30))
    other = engine.stream(Request(PROMPTS[7], max_new_tokens=30))
    next(left), next(other), next(left)
    first = greedy(PROMPTS[7], 1)
    left.close()
    assert first + sum(other, ()) == greedy(PROMPTS[7], 30)
    assert engine.generate([Request(PROMPT, max_new_tokens=30)])[0].tokens == greedy(PROMPT, 30)


def test_a_stream_fetches_from_the_device_once_a_round(drafted, monkeypatch):
    engine, fetches, get = drafted(block_size=4), [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: fetches.append(1) or get(tree))
    _, generation = streamed(engine, Request(PROMPT, max_new_tokens=30))
    assert len(fetches) == generation.rounds + 2  # and the prefill's token, and the counts


def test_a_request_does_not_remember_the_one_before(drafted, greedy):
    engine = drafted(block_size=4)
    engine.generate([Request(LONG[:20], max_new_tokens=30)])
    (second,) = engine.generate([Request(PROMPTS[7], max_new_tokens=30)])
    assert second.tokens == greedy(PROMPTS[7], 30)
    assert [second] == engine.generate([Request(PROMPTS[7], max_new_tokens=30)])


def test_positions_may_skip(drafted, shallow_target, greedy):
    """As behind an image: generated tokens go on from the last position, not from the length."""
    skipping = (0, 1, 2, 3, 4, 5, *range(20, 32))
    (generation,) = drafted(block_size=4).generate(
        [Request(PROMPT, max_new_tokens=30, positions=skipping)]
    )
    expected = doubles.plain_greedy(shallow_target, [PROMPT], skipping)[0]
    assert generation.tokens == tuple(expected[18:48].tolist()) != greedy(PROMPT, 30)


def test_a_seed_means_the_same_alone_and_in_any_batch(drafted):
    engine = drafted(block_size=4)
    requests = [
        Request(PROMPTS[n], max_new_tokens=20, temperature=t, top_p=p, seed=seed)
        for n, t, p, seed in [
            (3, 1.0, 1.0, 1),
            (18, 0.7, 0.9, 2),
            (7, 0.0, 1.0, 3),
            (12, 1.3, 1.0, 1),
        ]
    ]
    together = engine.generate(requests)
    assert engine.generate(requests[::-1]) == together[::-1]
    assert engine.generate(requests, batch_size=1) == together


def test_another_seed_gives_other_tokens(drafted):
    requests = [Request(PROMPT, max_new_tokens=20, temperature=1.0, seed=seed) for seed in range(4)]
    generations = drafted(block_size=4).generate(requests)
    assert len({generation.tokens for generation in generations}) == 4


def test_filters_that_leave_one_token_are_greedy(drafted, greedy):
    """In one batch; the greedy row among them too."""
    hows = [
        {},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 2.0, "top_k": 1, "top_p": 0.5},
    ]
    requests = [Request(PROMPT, max_new_tokens=20, seed=i, **how) for i, how in enumerate(hows)]
    for generation in drafted(block_size=4).generate(requests):
        assert generation.tokens == greedy(PROMPT, 20)


def test_filters_that_leave_everything_change_nothing(drafted):
    hows = [{}, {"top_k": VOCABULARY}, {"top_k": 10 * VOCABULARY}, {"top_p": 1.0}]
    requests = [Request(PROMPT, max_new_tokens=20, temperature=1.0, seed=3, **how) for how in hows]
    generations = drafted(block_size=4).generate(requests)
    assert generations == [generations[0]] * 4


def test_greedy_rows_beside_sampled_ones_are_the_targets_own(drafted, greedy):
    requests = [
        Request(prompt, max_new_tokens=20, temperature=temperature, seed=9)
        for prompt, temperature in zip(RAGGED, [0.0, 1.0, 0.0, 0.5], strict=True)
    ]
    generations = drafted(block_size=4).generate(requests)
    for i in (0, 2):
        assert generations[i].tokens == greedy(RAGGED[i], 20)
    for i in (1, 3):
        assert generations[i].tokens != greedy(RAGGED[i], 20)
        assert all(0 <= token < VOCABULARY for token in generations[i].tokens)


def test_the_last_batch_is_padded_and_order_is_kept(drafted, greedy):
    prompts = [PROMPTS[n] for n in (18, 3, 9, 12, 7)]
    requests = [Request(p, max_new_tokens=5 + i) for i, p in enumerate(prompts)]
    generations = drafted(block_size=4).generate(requests, batch_size=4)
    assert [g.tokens for g in generations] == [greedy(p, 5 + i) for i, p in enumerate(prompts)]
    assert drafted(block_size=4).generate([]) == []


def test_one_program_a_bucket_whatever_the_lengths(drafted, caplog):
    """Nothing at all is compiled for new lengths, bounds and seeds."""
    engine = dataclasses.replace(drafted(block_size=4), smallest_bucket=32)

    def run(length, new, seed=0):
        engine.generate([Request(LONG[:length], max_new_tokens=new, seed=seed)])

    def compilations():
        return [r.getMessage() for r in caplog.records if r.getMessage().startswith("Compiling")]

    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        run(5, 5), run(40, 5)  # buckets of 32 and 64
        assert compilations(), "the count does not work"
        caplog.clear()
        for i in range(20):
            run(3 + 2 * i, 1 + i, seed=i)
        assert not compilations()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(()), "no tokens"),
        (Request((1, -1)), r"\[-1\] are outside the target's 0..96"),
        (Request((1, 97, 200)), r"\[97, 200\] are outside"),
        (Request((*LONG, 1)), "65 tokens, the target sees 64"),
        (Request((1,), max_new_tokens=-1), "max_new_tokens = -1"),
        (Request((1,), temperature=-0.1), "temperature = -0.1"),
        (Request((1,), top_k=-1), "top_k = -1"),
        (Request((1,), top_p=0.0), "top_p = 0.0"),
        (Request((1,), top_p=1.1), "top_p = 1.1"),
        (Request((1,), temperature=float("nan")), "temperature = nan"),
        (Request((1,), seed=-1), "seed = -1"),
        (Request((1, 2), positions=(0,)), "1 positions for 2 tokens"),
        (Request((1, 2), positions=(3, 3)), "positions must rise"),
        (Request((1, 2), positions=(0, 64)), r"within 0\.\.63"),
    ],
)
def test_what_cannot_be_decoded_is_refused_by_name(knowing, request_, message):
    for ask in (
        lambda e: e.generate([Request((1,)), request_]),
        lambda e: list(e.stream(request_)),
    ):
        with pytest.raises(ValueError, match=message):
            ask(knowing())


def shapes(**change):
    """The tiny target and a changed drafter, without weights."""
    config = dataclasses.replace(DRAFTER, **change)
    return nnx.eval_shape(
        lambda: (Target(TARGET, rngs=nnx.Rngs(0)), Drafter(config, rngs=nnx.Rngs(0)))
    )


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_has_at_least_one_row(knowing, size):
    with pytest.raises(ValueError, match=f"batch_size = {size}"):
        knowing().generate([Request((1,))], batch_size=size)


@pytest.mark.parametrize(("chunk", "bucket"), [(48, 64), (0, 64), (128, 64)])
def test_chunks_fill_a_bucket(knowing, chunk, bucket):
    with pytest.raises(ValueError, match=f"chunk = {chunk} must divide smallest_bucket = 64"):
        knowing(chunk=chunk, smallest_bucket=bucket)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"geometry": dataclasses.replace(GEOMETRY, width=16)}, "width = 16, target width = 32"),
        ({"vocab_size": 96, "mask_token": 0}, "vocab_size = 96 is smaller than the target's 97"),
        ({"target_layer_ids": (0, 4)}, r"\[4\] are outside the target's -1..3"),
        ({"mask_token": 97, "vocab_size": 98}, "mask_token = 97 is outside"),
    ],
)
def test_a_drafter_of_another_target_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        engine(*shapes(**change))


@pytest.mark.parametrize("change", [{}, {"vocab_size": 104}, {"target_layer_ids": (-1, 3)}])
def test_a_drafter_with_more_rows_or_any_taps_fits(change):
    target, drafter = shapes(**change)
    check_pair(drafter, target.config)
