r"""Six drafters for google/gemma-3-12b-it on a TPU v5p-128 slice (64 chips).

dspark prepare prompts.jsonl data/gemma3_12b --target gemma-3-12b-it --endpoint http://server:8000 \
    --temperature 0.7 --top-p 0.8 --top-k 20 --max-new-tokens 4096
dspark train configs/gemma3_12b.py:dspark --distributed auto  # on every host

Runs: dflash, dspark, dspark-gated, dspark-rnn, domino, dflash2. `gemma-3-12b-it` is the folder of
Hugging Face's google/gemma-3-12b-it, which the server (vLLM, SGLang, sglang-jax) serves too; data,
work folder and target lie on a disk that all hosts see. Its config.json leaves some of
`text_config` to defaults, which must be written out: vocab_size 262208, head_dim 256,
query_pre_attn_scalar 256, max_position_embeddings 131072, rms_norm_eps 1e-6, rope_theta 1e6,
rope_local_base_freq 1e4.

`prompts.jsonl` should hold what will be served: its languages and domains, in about their shares. A
drafter is accepted less on what it has not seen: measure each alone (`dspark evaluate FILE`).

Budget of each: 10 passes over 1.24 G tokens (1.3 M conversations, answered by the target), 24,000
steps of 128 rows of 4,096 packed tokens. Hours, estimated and not measured: 24 for each, from
327 TFLOP a row (target 88, backbone 128, attention 14, lm head 92, rest 4)
at 40% of the chips' 459 TFLOP/s. Disk: 3 GB of samples, 48 GB of checkpoints; features are
computed in the step (57 TB if kept).

Accepted length: not measured.
The curve of a run is in its metrics: held-out conversations are walked every 1,000 steps.
The recipe is `recipes.pod`.
"""

from dspark_jax.recipes import pod, six

# The mask token is <mask>, which no text holds.
configs = six(pod("gemma3_12b", "gemma-3-12b-it", mask_token=4, mesh="fsdp=64"))
