r"""Six drafters for SmolLM2-135M-Instruct on a laptop's CPU.

dspark train configs/smollm2_cpu.py:dspark --data answers.jsonl
dspark bench heads configs/smollm2_cpu.py gsm8k.jsonl:14 mbpp.jsonl:13 --data answers.jsonl

Runs: dflash, dspark, dspark-gated, dspark-rnn, domino, dflash2; the second command trains them all
and compares their accepted lengths (add `--steps 300` for a quick look). `answers.jsonl` holds
conversations the target has answered (`tokens` and `reply_start`, or `messages`); a folder that
`dspark prepare` wrote does as well.

Budget of each: 2,400 steps of 4 conversations of up to 384 tokens, 16 blocks of each. Hours: about
0.4 on 2 CPU cores, as half of the 45 minutes that 4,800 such steps of DSpark vanilla took; and once
for all six, 20 minutes for the target's features of 730,000 tokens. Disk: 10 GB of features, shared
by the six, and 0.5 GB of checkpoints each.

Accepted length: not measured; after 400 steps 1.27 (dflash) to 1.45 (dflash2), see README.
`configs/smollm2.py`, DSpark vanilla with four times the steps, reaches 2.01.
On the batch at hand, walked, after 40, 200 and 400 steps: dspark 1.07, 1.31, 1.49; dflash2 1.06,
1.35, 1.56; dflash 1.04, 1.22, 1.31. The curve still rises.
"""

from dspark_jax.config_training import DrafterRecipe, Losses, Optimizer, TrainConfig
from dspark_jax.recipes import six

configs = six(
    TrainConfig(
        data="answers.jsonl",
        workdir="runs/smollm2_cpu",
        drafter=DrafterRecipe(
            num_layers=2,
            block_size=7,
            mask_token=16,  # <empty_output>, which no chat contains
            start="target_last",
            scale_features=True,
        ),
        losses=Losses(cross_entropy=1.0, l1=0.9, confidence=0.3, decay=2.0),
        optimizer=Optimizer(learning_rate=1.2e-3, warmup=0.05, weight_decay=0.05),
        steps=2400,
        batch_size=4,
        num_anchors=16,
        frequent_tokens=6144,
        drawn_tokens=2048,
        max_length=384,
        length_multiple=64,
        max_cache_bytes=12_000_000_000,
        cache="runs/smollm2_cpu/features",
        save_every=200,
    ),
    rank=64,
    gru_width=128,
)
