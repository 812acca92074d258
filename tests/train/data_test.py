"""Conversations: what is kept, what is refused, and in which order they come."""

import json

import numpy as np
import pytest

from dspark_jax.train import data
from dspark_jax.train.data import Conversation


def write(folder, lines):
    """A file of JSON lines."""
    path = folder / "data.jsonl"
    text = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


def read(path, render=None, max_length=64, min_supervised=1):
    return data.read(path, render, 97, max_length, min_supervised)


def answered(supervised: int, prompt: int = 2) -> dict:
    """A conversation with some answer tokens."""
    return {"tokens": list(range(1, prompt + supervised + 1)), "reply_start": prompt}


def test_tokens_of_the_answer_are_supervised(tmp_path):
    (kept,) = read(write(tmp_path, [answered(3), "  "])).conversations
    assert kept.tokens.tolist() == [1, 2, 3, 4, 5]
    assert kept.loss_mask.tolist() == [False, False, True, True, True]
    assert kept.tokens.dtype == np.int32


def test_messages_are_rendered_and_masked_by_the_callers_template(tmp_path):
    messages = [{"role": "user", "content": "é"}, {"role": "assistant", "content": "ok"}]
    seen = []

    def render(given, finished):
        seen.append((given, finished))
        return [5, 6, 7, 8], [0, 0, 1, 1]

    rows = [{"messages": messages}, {"messages": messages, "finished": False}]
    kept = read(write(tmp_path, rows), render).conversations[0]
    assert seen == [(messages, True), (messages, False)]
    assert kept.tokens.tolist() == [5, 6, 7, 8]
    assert kept.loss_mask.tolist() == [False, False, True, True]


def test_samples_without_an_anchor_are_dropped_and_counted(tmp_path):
    """T05: an anchor and a label are two supervised tokens in a row."""
    corpus = read(write(tmp_path, [answered(n) for n in (0, 1, 2, 3)]))
    assert [int(c.loss_mask.sum()) for c in corpus.conversations] == [2, 3]
    assert corpus.dropped == 2


def test_supervised_tokens_that_do_not_touch_give_no_anchor(tmp_path):
    def render(messages, finished):
        return [1, 2, 3, 4, 5], messages[0]["mask"]

    rows = [{"messages": [{"mask": mask}]} for mask in ([0, 1, 0, 1, 0], [0, 1, 1, 0, 0])]
    corpus = read(write(tmp_path, rows), render)
    assert (len(corpus.conversations), corpus.dropped) == (1, 1)


def test_what_is_cut_off_does_not_count(tmp_path):
    path = write(tmp_path, [answered(10), answered(10, prompt=6)])
    corpus = read(path, max_length=8, min_supervised=3)
    assert [len(c.tokens) for c in corpus.conversations] == [8]
    assert corpus.dropped == 1


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2: "),
        ("3", "line 2: holds a int, expected an object"),
        ({"text": "hello"}, "line 2: has neither `tokens` with `reply_start` nor `messages`"),
        ({"messages": []}, "line 2: has neither"),  # there is no template to render with
        ({"tokens": [], "reply_start": 0}, "line 2: `tokens` must be a non-empty list"),
        ({"tokens": [[1]], "reply_start": 0}, "line 2: `tokens` must be a non-empty list"),
        ({"tokens": [1.5, 2], "reply_start": 0}, "line 2: `tokens` .* of whole numbers"),
        ({"tokens": "abc", "reply_start": 0}, "line 2: `tokens` .* of whole numbers"),
        ({"tokens": [1, 97], "reply_start": 0}, "line 2: token ids 1..97 are outside .* 0..96"),
        ({"tokens": [-1, 3], "reply_start": 0}, "line 2: token ids -1..3 are outside"),
        ({"tokens": [1, 2], "reply_start": "a"}, "line 2: `reply_start` = 'a'"),
        ({"tokens": [1, 2], "reply_start": -1}, "line 2: `reply_start` = -1"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, complaint):
    with pytest.raises(ValueError, match=complaint):
        read(write(tmp_path, [answered(4), line]))


def test_a_missing_or_useless_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"data = .*nowhere.jsonl: no such file"):
        read(tmp_path / "nowhere.jsonl")
    with pytest.raises(ValueError, match="none of 2 conversations has 14 supervised tokens"):
        read(write(tmp_path, [answered(3), answered(13)]), min_supervised=14)


def test_batches_are_padded_with_zeros_to_the_next_multiple():
    rows = [
        Conversation(
            tokens=np.arange(1, n + 1, dtype=np.int32),
            loss_mask=np.ones(n, bool),
            features=np.ones((n, 2), np.float32),
            hidden=np.ones((n, 1), np.float32),
        )
        for n in (3, 5)
    ]
    batch = data.collate(rows, 4)
    assert batch.tokens.tolist() == [[1, 2, 3, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 0, 0, 0]]
    assert batch.loss_mask.sum(1).tolist() == [3, 5]
    assert batch.features[..., 0].sum(1).tolist() == [3, 5]
    assert batch.hidden.shape == (2, 8, 1)
    assert data.collate(rows[:1], 3).tokens.shape == (1, 3)
    without = data.collate([row.replace(features=None, hidden=None) for row in rows], 4)
    assert without.features is None and without.hidden is None


def names(batches, count: int) -> list[int]:
    """Which conversations the next batches hold, in order."""
    return [int(token) for _ in range(count) for token in next(batches).tokens[:, 0]]


def endless(corpus, seed=0, batch_size=2, **options):
    return data.batches(corpus.conversations, batch_size, 4, seed, **options)


def test_every_epoch_is_another_permutation(corpus):
    """T23: batches straddle epochs, so that nothing is left out."""
    order = np.reshape(names(endless(corpus), 14), (4, 7))
    assert (np.sort(order, 1) == np.arange(7)).all()
    assert len({tuple(epoch) for epoch in order}) == 4


def test_the_order_depends_on_the_seed_alone(corpus):
    order = names(endless(corpus), 14)
    assert names(endless(corpus), 14) == order
    assert names(endless(corpus, batch_size=4), 7) == order
    assert names(endless(corpus, seed=1), 14) != order


@pytest.mark.parametrize("stop", [0, 1, 3, 4, 9])
def test_a_restored_position_continues_the_same_order(corpus, stop):
    """T22: three epochs with a stop anywhere are three epochs."""
    whole = names(endless(corpus), 11)
    first = endless(corpus)
    before = names(first, stop)
    position = json.loads(json.dumps(first.get_state()))
    second = endless(corpus)
    names(second, 2)
    second.set_state(position)
    assert before + names(second, 11 - stop) == whole


def test_what_is_attached_belongs_to_its_conversation(corpus):
    def attach(index, conversation):
        features = np.full((len(conversation.tokens), 1), index, np.float32)
        return conversation.replace(features=features, hidden=features)

    batches = endless(corpus, attach=attach)
    for _ in range(7):
        batch = next(batches)
        for row in range(2):
            length = 9 + batch.tokens[row, 0]
            assert (batch.features[row, :length] == batch.tokens[row, 0]).all()
            assert not batch.features[row, length:].any()
