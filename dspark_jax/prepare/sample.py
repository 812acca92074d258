"""An answered conversation -> the sample to train on, or the reason why there is none.

Tokens are those that serving would see. Where the target answered here they are its very own;
conversations in text are rendered by the target's chat template, which also says what is masked.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

from dspark_jax.decode.answer import Message
from dspark_jax.prepare.rows import Answered
from dspark_jax.shards import Sample
from dspark_jax.text import Tokenizer
from dspark_jax.train.sources import why_not

Outcome = Sample | str  # a sample, or why the row gives none

TOO_LONG = "longer than max_length"
REFUSED = "the chat template cannot render it"


@dataclasses.dataclass(frozen=True)
class Talk:
    """What came of asking a prompt's turns, one after the other."""

    messages: tuple[Message, ...]  # the conversation, its last message the last answer
    given: int  # messages that came with the prompt: answers among them are not the target's own
    finished: bool  # False = the last answer was cut short
    turns_left: int  # turns that were not asked, since an answer was cut or no room was left
    prompt: tuple[int, ...] = ()  # ids the last answer followed; () = only the text is known
    reply: tuple[int, ...] = ()  # ids of the last answer, the stop token included


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How samples are made of conversations."""

    tokenizer: Tokenizer  # the target's
    variables: Mapping[str, Any]  # more names for the chat template
    max_length: int  # tokens a sample, at most
    min_supervised: int  # supervised tokens a sample, at least

    def of_talk(self, talk: Talk, provenance: Mapping[str, Any]) -> Outcome:
        """The sample of a prompt that was asked."""
        count = sum(message.get("role") == "assistant" for message in talk.messages[talk.given :])
        said = {"finished": talk.finished, "answers": count, "turns_left": talk.turns_left}
        if talk.reply:
            return self._of_tokens(talk, {**provenance, **said})
        try:
            tokens, mask = self._rendered(talk.messages, talk.finished)
            mask = own_answers(mask, talk.messages, talk.given)
        except ValueError:
            return REFUSED
        return self._checked(tokens, mask, {**provenance, **said, "tokens": "rendered"})

    def of_answered(self, row: Answered, provenance: Mapping[str, Any]) -> Outcome:
        """The sample of a conversation that came with its answers."""
        said = {**provenance, "finished": row.finished}
        if row.tokens:
            mask = np.arange(len(row.tokens)) >= row.reply_start
            return self._checked(row.tokens, mask, {**said, "tokens": "given"})
        try:
            tokens, mask = self._rendered(row.messages, row.finished)
        except ValueError:
            return REFUSED
        return self._checked(tokens, mask, {**said, "tokens": "rendered"})

    def _of_tokens(self, talk: Talk, provenance: Mapping[str, Any]) -> Outcome:
        """The last answer's own tokens behind the prompt it was served.

        Earlier answers count as far as the prompt holds them whole: templates may drop thinking
        from all turns but the last.
        """
        earlier = np.zeros(len(talk.prompt), bool)
        if provenance["answers"] > 1:
            before = talk.messages[:-1]
            try:
                tokens, mask = self._rendered(before, finished=True)
                if tuple(tokens) == talk.prompt[: len(tokens)]:
                    earlier[: len(tokens)] = own_answers(mask, before, talk.given)
            except ValueError:
                pass
        mask = np.concatenate([earlier, np.ones(len(talk.reply), bool)])
        supervised = "every answer" if earlier.any() else "the last answer"
        said = {**provenance, "tokens": "the target's own", "supervised": supervised}
        return self._checked(talk.prompt + talk.reply, mask, said)

    def _rendered(self, messages: Sequence[Message], finished: bool) -> tuple[list[int], Any]:
        tokens, mask = self.tokenizer.assistant_mask(messages, finished=finished, **self.variables)
        return tokens, np.asarray(mask, bool)

    def _checked(
        self, tokens: Sequence[int], mask: Bool[np.ndarray, "T"], provenance: Mapping[str, Any]
    ) -> Outcome:
        if len(tokens) > self.max_length:
            return TOO_LONG
        if reason := why_not(mask, self.max_length, self.min_supervised):
            return reason
        ids = np.asarray(tokens, np.int32)
        return Sample(tokens=ids, loss_mask=mask, provenance=provenance)


def own_answers(
    mask: Bool[np.ndarray, "T"], messages: Sequence[Message], given: int
) -> Bool[np.ndarray, "T"]:
    """The mask without the answers among the first messages, which the target did not write.

    Raises:
      ValueError: the runs of the mask are not the assistant's messages.
    """
    is_answer = [message.get("role") == "assistant" for message in messages]
    if not any(is_answer[:given]):
        return mask
    starts = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0) == 1)
    if len(starts) != sum(is_answer):
        raise ValueError(f"{len(starts)} masked runs for {sum(is_answer)} answers")
    first = sum(is_answer[:given])
    cut = starts[first] if first < len(starts) else len(mask)
    return mask & (np.arange(len(mask)) >= cut)
