r"""The bundled drafter: DSpark vanilla for SmolLM2-135M-Instruct.

dspark train configs/smollm2.py --data answers.jsonl
dspark train configs/smollm2.py --data more.jsonl --workdir runs/second \
    --drafter.start runs/smollm2/drafter

`answers.jsonl` holds conversations the target has answered (`tokens` and `reply_start`, or
`messages`). Hardware: 2 CPU cores; 20 minutes for the target's features of 730,000 tokens (10 GB on
disk), then 45 minutes a run. Accepted length on 40 unseen prompts: 2.01 after both runs; the first
had 1,560 conversations, blocks of 5 and no weight decay (1.79), the second 3,528.
"""

from dspark_jax.config import Markov
from dspark_jax.config_training import DrafterRecipe, Losses, Optimizer, TrainConfig

config = TrainConfig(
    data="answers.jsonl",
    workdir="runs/smollm2",
    drafter=DrafterRecipe(
        num_layers=2,
        block_size=7,
        mask_token=16,  # <empty_output>, which no chat contains
        head=Markov(rank=64),
        start="target_last",
        scale_features=True,
    ),
    losses=Losses(cross_entropy=1.0, l1=0.9, confidence=0.3, decay=2.0),
    optimizer=Optimizer(learning_rate=1.2e-3, warmup=0.05, weight_decay=0.05),
    steps=4800,
    batch_size=4,
    num_anchors=16,
    anchor_chunk=64,
    frequent_tokens=6144,
    drawn_tokens=2048,
    max_length=384,
    length_multiple=64,
    max_cache_bytes=12_000_000_000,
    save_every=250,
)
