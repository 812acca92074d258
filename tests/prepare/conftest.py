"""A target that writes characters, with a template that ends its turns by `~`."""

import dataclasses
import json

import pytest
import tokenizers
from flax import nnx
from tokenizers import decoders, models

from dspark_jax.config import Options
from dspark_jax.decode.engine import engine
from dspark_jax.nn.target import Target
from dspark_jax.prepare.sample import Recipe
from dspark_jax.prepare.session import Settings, Subject
from dspark_jax.text import Tokenizer

from ..conftest import TARGET, sharpened

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% if m.role == 'assistant' %}~{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% if enable_thinking is defined %}"
    "{{ '!' if enable_thinking else '?' }}{% endif %}{% endif %}"
)
STOPS = tuple(range(5, 96, 10))  # `~` is the last; so many that answers of a random target end
OPTIONS = Options(max_new_tokens=12, temperature=1.0, seed=7)


@pytest.fixture(scope="session")
def characters() -> Tokenizer:
    """One token a printable character; `~` is special."""
    vocabulary = {c: i for i, c in enumerate(["\n", *map(chr, range(32, 127))])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["~"])
    return Tokenizer(backend, stop_tokens=STOPS, chat_template=TEMPLATE)


@pytest.fixture(scope="session")
def recipe(characters) -> Recipe:
    """Samples of two supervised tokens and more, as long as the tiny target's context."""
    return Recipe(tokenizer=characters, variables={}, max_length=64, min_supervised=2)


@pytest.fixture(scope="session")
def plain(characters):
    """An engine without a drafter; one bucket, as long as the context."""
    target = sharpened(Target(dataclasses.replace(TARGET, num_layers=1), rngs=nnx.Rngs(0)))
    return engine(target, None, characters.stop_tokens, chunk=32, smallest_bucket=64)


@pytest.fixture
def subject(characters, plain) -> Subject:
    """The target as `prepare` takes it."""
    return Subject(
        name="tiny",
        tokenizer=characters,
        vocab_size=97,
        max_length=64,
        decoding={"drafter": "none"},
        engine=lambda: plain,
    )


@pytest.fixture
def settings() -> Settings:
    """Small shards."""
    return Settings(batch_size=3, shard_size=4, min_supervised=2)


@pytest.fixture
def write(tmp_path):
    """Writes rows as a prompt file."""

    def call(*rows: dict, name: str = "prompts.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(map(json.dumps, rows)) + "\n")
        return path

    return call
