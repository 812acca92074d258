"""Text to tokens and back for one target: plain text, conversations, loss masks, streaming.

Two backends hold the same vocabulary. One reads the text of special tokens as ordinary text: it
encodes what users write. The other reads them as special, as Hugging Face does: it encodes what the
chat template writes, in which messages have stand-ins for such text (see `chat`).
"""

import copy
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import tokenizers

from dspark_jax.text.chat import Answer, Conversation, Message, Template

_Piece = tuple[int, int, int]  # a token, and the characters it stands for: from, to


@dataclass(frozen=True)
class Tokenizer:
    """Text to tokens and back, for one target.

    Attributes:
      backend: the tokenizer proper; its truncation, padding and special-token switches are set
        here once.
      stop_tokens: ids that end a generation; empty when the files name none.
      chat_template: jinja2 source, or None.
      bos_token, eos_token, pad_token, unknown_token: ids, or None.
    """

    backend: tokenizers.Tokenizer
    stop_tokens: tuple[int, ...] = ()
    chat_template: str | None = None
    bos_token: int | None = None
    eos_token: int | None = None
    pad_token: int | None = None
    unknown_token: int | None = None

    def __post_init__(self):
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True

    def __reduce__(self):
        # Data loaders send tokenizers to other processes. A backend forgets its switches on the
        # way, and a compiled template cannot travel: both are made anew.
        return Tokenizer, tuple(getattr(self, field.name) for field in fields(self))

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id; a target may have more rows."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """Of vocabulary and chat template: those of equal ones give a conversation the same ids."""
        vocabulary = sorted(self.backend.get_vocab(with_added_tokens=True).items())
        text = json.dumps([vocabulary, self.chat_template])
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Every special token's text and id."""
        added = self.backend.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    @cached_property
    def free_tokens(self) -> dict[str, int]:
        """Special tokens that no chat contains: a mask token can be chosen among them.

        They are neither stop, bos, eos, pad nor unknown, and the template does not write them.
        """
        taken = {self.bos_token, self.eos_token, self.pad_token, self.unknown_token}
        taken |= set(self.stop_tokens)
        template = self.chat_template or ""
        return {
            name: number
            for name, number in self.special_tokens.items()
            if number not in taken and name not in template
        }

    def encode(self, text: str) -> list[int]:
        """Tokens of ordinary text: special tokens written in it are text, and none is added."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_document(self, text: str) -> list[int]:
        """As `encode`, with what the tokenizer puts around a whole text, such as the bos token."""
        return self.backend.encode(text, add_special_tokens=True).ids

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens; special tokens and ids past the vocabulary leave no trace."""
        return self.backend.decode([int(token) for token in tokens], skip_special_tokens=True)

    def mode(self, thinking: bool | None) -> dict[str, bool]:
        """What the chat template is told of thinking; nothing if it shall do as it does by itself.

        Raises:
          ValueError: the template cannot switch it.
        """
        if thinking is None:
            return {}
        if "enable_thinking" not in (self.chat_template or ""):
            raise ValueError(
                f"thinking = {thinking}: this chat template has no enable_thinking; leave it out"
            )
        return {"enable_thinking": thinking}

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Tokens of a conversation, as the target's own chat template writes it.

        Args:
          messages: the turns so far.
          add_generation_prompt: whether to open the assistant's turn behind them.
          **variables: more names for the template (`tools=...`, `enable_thinking=False`).

        Raises:
          ValueError: there is no chat template, or it refuses the messages.
        """
        talk = self._template.open(messages, variables)
        text = talk.text(add_generation_prompt=add_generation_prompt)
        return [token for token, _, _ in self._pieces(talk, text)]

    def assistant_mask(
        self, messages: Sequence[Message], *, finished: bool = True, **variables: Any
    ) -> tuple[list[int], list[bool]]:
        """A conversation's tokens, and True on those the assistant wrote.

        That is each assistant's content, its tool calls, and the token which ends its turn. What
        the template writes of itself is False, such as an empty think block before the content.

        Args:
          messages: the whole conversation.
          finished: False when the last answer was cut short; its turn then stays open.
          **variables: more names for the template.

        Raises:
          ValueError: as `render`, or the template does not show an answer where it can be found.
        """
        talk = self._template.open(messages, variables)
        text, answers = talk.text(), talk.answers()
        if not finished:
            if not messages or messages[-1]["role"] != "assistant":
                raise ValueError("finished=False, but the last message is not the assistant's")
            text = text[: answers[-1].content_stop]
        pieces = self._pieces_as_served(talk, text, answers)
        written = [any(a < w.stop and b > w.start for w in answers) for _, a, b in pieces]
        return [token for token, _, _ in pieces], written

    @cached_property
    def _parsing(self) -> tokenizers.Tokenizer:
        backend = copy.deepcopy(self.backend)
        backend.encode_special_tokens = False
        return backend

    @cached_property
    def _template(self) -> Template:
        if self.chat_template is None:
            raise ValueError(
                "this tokenizer has no chat_template; put a chat_template.jinja beside "
                "tokenizer.json, or give plain text to `encode`"
            )
        names = {
            "bos_token": self._name(self.bos_token),
            "eos_token": self._name(self.eos_token),
            "pad_token": self._name(self.pad_token),
            "unk_token": self._name(self.unknown_token),
        }
        return Template(
            self.chat_template,
            specials=list(self.special_tokens),
            stops=[name for name in map(self._name, self.stop_tokens) if name],
            names={key: name for key, name in names.items() if name},
        )

    def _name(self, token: int | None) -> str | None:
        return None if token is None else self.backend.id_to_token(token)

    def _pieces(self, talk: Conversation, text: str, cuts: Iterable[int] = ()) -> list[_Piece]:
        """Tokens of a template's text; stand-ins give the ordinary text they stand for."""
        pieces, at = [], 0
        for start, stop in itertools.pairwise([0, *cuts, len(text)]):
            for part, literal in talk.parts(text[start:stop]):
                if literal is None:
                    coded = self._parsing.encode(part, add_special_tokens=False)
                    spans = zip(coded.ids, coded.offsets, strict=True)
                    pieces += [(token, at + a, at + b) for token, (a, b) in spans]
                else:
                    pieces += [(token, at, at + len(part)) for token in self.encode(literal)]
                at += len(part)
        return pieces

    def _pieces_as_served(
        self, talk: Conversation, text: str, answers: Iterable[Answer]
    ) -> list[_Piece]:
        """As `_pieces`, but no token reaches from a prompt into its answer.

        A line break that opens an answer could merge with the prompt's last one; the target, which
        was served the prompt's tokens, cannot have written that token.
        """
        cuts = []
        pieces = self._pieces(talk, text)
        for answer in answers:
            served = self._pieces(talk, answer.prompt, cuts)
            if pieces[: len(served)] != served:
                cuts.append(len(answer.prompt))
                pieces = self._pieces(talk, text, cuts)
        return pieces


class Detokenizer:
    """Text of a growing list of tokens, piece by piece.

    The pieces, `flush`'s included, join to `tokenizer.decode` of all tokens. Characters whose bytes
    have not all arrived are held back.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._skipped = frozenset(tokenizer.special_tokens.values())
        # Byte tokens of SentencePiece vocabularies are read as runs: a later one can alter the
        # reading of those before it.
        self._has_byte_runs = "ByteFallback" in repr(tokenizer.backend.decoder)
        self._window: list[int] = []  # the tokens not settled yet, behind one that is
        self._given = 0  # characters of the window's text that were handed out

    def feed(self, tokens: Iterable[int]) -> str:
        """Takes the next tokens; returns the characters that are now certain."""
        self._window += [int(token) for token in tokens if int(token) not in self._skipped]
        settled = len(self._window) - self._trailing_bytes()
        text = self._tokenizer.decode(self._window[:settled])
        # A replacement character at the end may be the beginning of a character to come.
        end = max(self._given, len(text) - text.endswith("\ufffd"))
        piece, self._given = text[self._given : end], end
        if settled == len(self._window) and end == len(text):
            # One token stays, since decoders may treat the first of all tokens differently.
            self._window = self._window[-1:]
            self._given = len(self._tokenizer.decode(self._window))
        return piece

    def flush(self) -> str:
        """The characters still held back; the next `feed` begins a new text."""
        piece = self._tokenizer.decode(self._window)[self._given :]
        self._window, self._given = [], 0
        return piece

    def _trailing_bytes(self) -> int:
        if not self._has_byte_runs:
            return 0
        symbols = map(self._tokenizer.backend.id_to_token, reversed(self._window))
        is_byte = (bool(re.fullmatch("<0x[0-9A-F]{2}>", symbol or "")) for symbol in symbols)
        return sum(1 for _ in itertools.takewhile(bool, is_byte))
