"""A minute on a CPU: shows the whole path, not a useful drafter.

dspark train configs/tiny.py

From the repository root; `tiny.jsonl` beside this file holds eight answers. Hardware:
2 CPU cores, about a minute once the target is there. Accepted length: just above 1.
"""

from dspark_jax.config import Markov
from dspark_jax.config_training import DrafterRecipe, TrainConfig

config = TrainConfig(
    data="configs/tiny.jsonl",
    workdir="runs/tiny",
    drafter=DrafterRecipe(num_layers=1, block_size=4, mask_token=16, head=Markov(rank=16)),
    steps=20,
    batch_size=1,
    num_anchors=8,
    anchor_chunk=8,
    max_length=128,
    log_every=5,
)
