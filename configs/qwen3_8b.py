r"""Six drafters for Qwen/Qwen3-8B on a TPU v5p-64 slice (32 chips).

dspark prepare prompts.jsonl data/qwen3_8b --target Qwen3-8B --endpoint http://server:8000 \
    --temperature 0.7 --top-p 0.8 --top-k 20 --max-new-tokens 4096 --thinking False
dspark train configs/qwen3_8b.py:dspark --distributed auto  # on every host

Runs: dflash, dspark, dspark-gated, dspark-rnn, domino, dflash2. `Qwen3-8B` is the folder of
Hugging Face's Qwen/Qwen3-8B, which the server (vLLM, SGLang, sglang-jax) serves too; data,
work folder and target lie on a disk that all hosts see.

`prompts.jsonl` should hold what will be served: its languages and domains, in about their shares. A
drafter is accepted less on what it has not seen: measure each alone (`dspark evaluate FILE`).

Budget of each: 10 passes over 1.24 G tokens (1.3 M conversations, answered by the target), 24,000
steps of 128 rows of 4,096 packed tokens. Hours, estimated and not measured: 35 for each, from
242 TFLOP a row (target 57, backbone 111, attention 14, lm head 57, rest 3)
at 40% of the chips' 459 TFLOP/s. Disk: 3 GB of samples, 41 GB of checkpoints; features are
computed in the step (61 TB if kept).

Accepted length: not measured. Their authors report, at temperature 1 over nine sets of prompts,
4.07 for DFlash and 4.81 for DSpark.
The curve of a run is in its metrics: held-out conversations are walked every 1,000 steps.
The recipe is `recipes.pod`.
"""

from dspark_jax.recipes import pod, six

# The mask token is the first row behind Qwen3's tokens.
configs = six(pod("qwen3_8b", "Qwen3-8B", mask_token=151669, mesh="fsdp=32"))
