"""Samples hold what serving would see; only what the target wrote counts; drops have reasons."""

import dataclasses

import pytest

from dspark_jax.prepare import sample
from dspark_jax.prepare.rows import Answered
from dspark_jax.prepare.sample import Talk


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def supervised(recipe, outcome) -> str:
    """Characters that count."""
    tokens = outcome.tokens[outcome.loss_mask].tolist()
    return recipe.tokenizer.backend.decode(tokens, skip_special_tokens=False)


def talk(recipe, messages, answer, *, given=0, stop="~", **changes) -> Talk:
    """A talk whose last answer was written here."""
    backend = recipe.tokenizer.backend
    reply = [backend.token_to_id(c) for c in answer + stop]
    fields = {"finished": True, "turns_left": 0, **changes}
    return Talk(
        messages=(*messages, assistant(answer)),
        given=given,
        prompt=tuple(recipe.tokenizer.render(messages)),
        reply=tuple(reply),
        **fields,
    )


CONVERSATIONS = {
    "one turn": ([user("hi")], "yes"),
    "system": ([{"role": "system", "content": "be kind"}, user("hi")], "yes"),
    "two turns": ([user("hi"), assistant("yes"), user("so")], "no"),
    "empty answer": ([user("hi"), assistant("yes"), user("so")], ""),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_own_tokens_and_rendered_text_make_one_sample(recipe, name):
    messages, answer = CONVERSATIONS[name]
    own = talk(recipe, messages, answer)
    text = dataclasses.replace(own, prompt=(), reply=())
    exact, rendered = recipe.of_talk(own, {}), recipe.of_talk(text, {})
    count = len(exact.tokens)  # the template goes on with a line break of its own
    assert rendered.tokens.tolist()[:count] == exact.tokens.tolist()
    assert rendered.loss_mask.tolist() == [*exact.loss_mask.tolist(), False]


def test_an_answer_that_was_cut_has_no_end(recipe):
    own = talk(recipe, [user("hi")], "yes", stop="", finished=False)
    text = dataclasses.replace(own, prompt=(), reply=())
    for one in (own, text):
        outcome = recipe.of_talk(one, {})
        assert supervised(recipe, outcome) == "yes"
        assert outcome.provenance["finished"] is False
    assert recipe.of_talk(own, {}).tokens.tolist() == recipe.of_talk(text, {}).tokens.tolist()


@pytest.mark.parametrize("is_own", [True, False])
def test_answers_that_came_with_the_prompt_do_not_count(recipe, is_own):
    messages = [user("a"), assistant("theirs"), user("b"), assistant("mine"), user("c")]
    one = talk(recipe, messages, "last", given=2)
    one = one if is_own else dataclasses.replace(one, prompt=(), reply=())
    outcome = recipe.of_talk(one, {})
    assert supervised(recipe, outcome) == "mine~last~"
    assert outcome.provenance["answers"] == 2


def test_earlier_answers_that_the_prompt_lost_do_not_count(recipe):
    one = talk(recipe, [user("a"), assistant("mine"), user("b")], "last")
    lost = dataclasses.replace(one, prompt=one.prompt[5:])
    outcome = recipe.of_talk(lost, {})
    assert supervised(recipe, outcome) == "last~"
    assert outcome.provenance["supervised"] == "the last answer"
    assert recipe.of_talk(one, {}).provenance["supervised"] == "every answer"


def test_answered_conversations_count_as_they_are(recipe):
    row = Answered(messages=(user("a"), assistant("one"), user("b"), assistant("two")))
    assert supervised(recipe, recipe.of_answered(row, {})) == "one~two~"
    tokens = recipe.of_answered(Answered(tokens=(9, 8, 7, 6), reply_start=2), {"row": 3})
    assert tokens.loss_mask.tolist() == [False, False, True, True]
    assert tokens.provenance == {"row": 3, "finished": True, "tokens": "given"}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (Answered(tokens=(1,) * 65, reply_start=0), sample.TOO_LONG),
        (Answered(tokens=(1, 2), reply_start=1), "fewer than 2 supervised tokens"),
        (Answered(messages=({"role": "assistant", "content": [1]},)), sample.REFUSED),
        (
            Answered(messages=(user("a"), assistant(""), user("b"), assistant(""))),
            "no two supervised tokens in a row",
        ),
    ],
)
def test_what_cannot_be_trained_on_has_a_reason(recipe, row, reason):
    assert recipe.of_answered(row, {}) == reason
