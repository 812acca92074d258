"""Text on one side, tokens on the other: tokenizer, chat template, stop tokens."""

from dspark_jax.text.files import Vocabulary, from_hf, from_vocabulary
from dspark_jax.text.tokenizer import Detokenizer, Tokenizer

__all__ = ["Detokenizer", "Tokenizer", "Vocabulary", "from_hf", "from_vocabulary"]
