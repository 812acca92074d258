r"""Six drafters for SmolLM2-135M-Instruct on one GPU.

dspark prepare prompts.jsonl data/smollm2 --batch-size 128 --temperature 0.7
dspark train configs/smollm2_gpu.py:dspark

Runs: dflash, dspark, dspark-gated, dspark-rnn, domino, dflash2. The target comes with the package.

`prompts.jsonl` should hold what will be served: its languages and domains, in about their shares. A
drafter is accepted less on what it has not seen: measure each alone (`dspark evaluate FILE`).

Budget of each: 10 passes over 50 M tokens (about 200,000 conversations, answered by the target),
30,000 steps of 8 rows of 2,048 packed tokens. Hours, estimated and not measured: 2.5 for each on an
A100, from 13 TFLOP a step (target 4, backbone 1, attention 1, lm head 7) at 30% of the 156 TFLOP/s
of its TF32. Memory: 8 GB, estimated. Disk: 0.3 GB of samples, 1.2 GB of checkpoints; features are
computed in the step (690 GB if kept).

Accepted length: not measured. The curve of a run is in its metrics: held-out conversations are
walked every 1,000 steps.
"""

from dspark_jax.config_training import DrafterRecipe, Losses, Optimizer, TrainConfig
from dspark_jax.recipes import six

configs = six(
    TrainConfig(
        data="data/smollm2",
        workdir="runs/smollm2_gpu",
        drafter=DrafterRecipe(
            num_layers=2,
            block_size=7,
            mask_token=16,  # <empty_output>, which no chat contains
            start="target_last",
            scale_features=True,
        ),
        losses=Losses(cross_entropy=0.1, l1=0.9, confidence=1.0, decay=4.0),
        optimizer=Optimizer(learning_rate=6e-4, weight_decay=0.01),
        steps=30_000,
        batch_size=8,
        num_anchors=512,
        anchor_chunk=64,
        max_length=2048,
        pack=True,
        holdout=256,
        evaluate_every=1000,
    ),
    rank=256,
    gru_width=512,
)
