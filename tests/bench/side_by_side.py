r"""Our training step against the same drafter and loss in PyTorch, alternating in one run.

python tests/bench/side_by_side.py

First both take three steps from the same weights on the same blocks: losses and gradient norms must
agree to 1e-4. Then each takes `--repeats` timed steps in turns. The target's features are given;
a step is forward, backward, clipping by global norm and AdamW, on 2 threads each.
"""

import argparse
import functools
import statistics
import time

import drafter_torch
import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from dspark_jax.base import Batch
from dspark_jax.config import Geometry, Markov, Rotary, TargetConfig
from dspark_jax.config_training import DrafterRecipe, TrainConfig
from dspark_jax.nn.drafter import Drafter
from dspark_jax.nn.target import Target
from dspark_jax.train import anchors, initial, optimizer
from dspark_jax.train.step import TrainState, train_step

SMOLLM2 = TargetConfig(  # its shapes; five layers will do, since they never run
    family="llama",
    vocab_size=49152,
    num_layers=5,
    geometry=Geometry(
        width=576,
        mlp_width=1536,
        heads=9,
        kv_heads=3,
        head_dim=64,
        rotary=Rotary(theta=1e5),
        norm_eps=1e-5,
    ),
    max_length=8192,
)
CHECKED_STEPS = 3


def main() -> None:
    """Checks, times, prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--anchors", type=int, default=32)
    parser.add_argument("--length", type=int, default=384)
    parser.add_argument("--chunk", type=int, default=64, help="blocks whose logits exist at once")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(2)
    config = TrainConfig(
        data="",
        workdir="",
        drafter=DrafterRecipe(
            num_layers=2, mask_token=16, target_layer_ids=(0, 1, 2, 3, 4), head=Markov(rank=64)
        ),
        batch_size=args.batch_size,
        num_anchors=args.anchors,
        anchor_chunk=args.chunk,
    )
    target = Target(SMOLLM2, rngs=nnx.Rngs(0))
    drafter_config = initial.drafter_config(config.drafter, SMOLLM2)
    drafter = Drafter(drafter_config, rngs=nnx.Rngs(1))
    batch = random_batch(args.batch_size, args.length, drafter_config.feature_width)
    key = jax.random.key(0)
    theirs = Theirs(drafter, target, batch, config, key)
    ours = Ours(drafter, target, batch, config, key)
    for _ in range(CHECKED_STEPS):
        (here, norm), (there, their_norm) = ours.step(), theirs.step()
        print(f"loss {here:.6f}, PyTorch {there:.6f}; norm {norm:.6f}, PyTorch {their_norm:.6f}")
        np.testing.assert_allclose((here, norm), (there, their_norm), rtol=1e-4)
    taken = {"ours": [], "PyTorch": []}
    for _ in range(args.repeats):
        for name, side in (("ours", ours), ("PyTorch", theirs)):
            begun = time.perf_counter()
            side.step()
            taken[name].append(time.perf_counter() - begun)
    tokens = args.batch_size * args.anchors * drafter_config.block_size
    rates = {name: tokens / statistics.median(times) for name, times in taken.items()}
    for name, rate in rates.items():
        print(f"{name}: {rate:.0f} drafted tokens/s (median of {args.repeats} steps)")
    print(f"ours / PyTorch: {rates['ours'] / rates['PyTorch']:.2f}x")


def random_batch(rows: int, length: int, feature_width: int) -> Batch:
    """Random tokens and features; answers begin at token 64."""
    draws = np.random.default_rng(0)
    shape = rows, length
    hidden = 2 * draws.standard_normal((*shape, SMOLLM2.geometry.width), np.float32)
    return Batch(
        tokens=jnp.asarray(draws.integers(0, SMOLLM2.vocab_size, shape, np.int32)),
        loss_mask=jnp.broadcast_to(jnp.arange(length) >= 64, shape),
        features=jnp.asarray(draws.standard_normal((*shape, feature_width), np.float32)),
        hidden=jnp.asarray(hidden),
    )


class Ours:
    """The trainer's own step."""

    def __init__(self, drafter, target, batch, config, key):
        chain = optimizer.build(config.optimizer, config.steps)
        graphdef, params = nnx.split(drafter)
        zero = jnp.zeros((), jnp.int32)
        params = jax.tree.map(jnp.copy, params)
        self.state = TrainState(step=zero, params=params, optimizer=chain.init(params), key=key)
        target_graphdef, self.target = nnx.split(target)
        self.batch = batch

        @functools.partial(jax.jit, donate_argnums=0)
        def step(state, target, batch):
            model = nnx.merge(target_graphdef, target)
            return train_step(chain, graphdef, config, state, model, batch, None)

        self.run = step

    def step(self) -> tuple[float, float]:
        """Loss and gradient norm of one step, once they are there."""
        self.state, metrics = self.run(self.state, self.target, self.batch)
        jax.block_until_ready(self.state)
        return float(metrics["loss"]), float(metrics["gradient_norm"])


class Theirs:
    """The PyTorch step, on the blocks that our steps draw."""

    def __init__(self, drafter, target, batch, config, key):
        c = drafter.config
        table = as_torch(target.embed_tokens[...])
        self.model = drafter_torch.Drafter(c, table, table)
        missing, unexpected = self.model.load_state_dict(weights(drafter), strict=False)
        assert set(missing) == {"embedding", "lm_head"} and not unexpected
        self.schedule = optimizer.schedule(config.optimizer, config.steps)
        self.adam = torch.optim.AdamW(self.model.parameters(), lr=1.0, weight_decay=0.0, fused=True)
        self.config, self.batch, self.key = config, batch, key
        self.blocks = [self.cut(number, c.block_size) for number in range(CHECKED_STEPS)]
        self.taken = 0

    def cut(self, number: int, block_size: int) -> dict[str, torch.Tensor]:
        """The batch as a step of ours cuts it."""
        key = jax.random.fold_in(self.key, number)
        count, is_contiguous = self.config.num_anchors, self.config.losses.is_contiguous
        blocks = anchors.blocks(key, self.batch, count, block_size, is_contiguous)
        rows = jnp.arange(self.batch.tokens.shape[0])[:, None, None]
        ahead = blocks.anchors[..., None] + jnp.arange(block_size)
        ahead = jnp.minimum(ahead, self.batch.tokens.shape[1] - 2)
        values = {
            "features": self.batch.features,
            "anchors": blocks.anchors,
            "prevs": blocks.prevs,
            "labels": blocks.labels,
            "weights": anchors.weights(blocks.counted, self.config.losses.decay),
            "target_hidden": self.batch.hidden[rows, ahead],
        }
        return {name: as_torch(value) for name, value in values.items()}

    def step(self) -> tuple[float, float]:
        """Loss and gradient norm of one step."""
        batch = self.blocks[min(self.taken, CHECKED_STEPS - 1)]
        self.adam.param_groups[0]["lr"] = float(self.schedule(self.taken))
        self.adam.zero_grad()
        loss = drafter_torch.loss(self.model, batch, self.config.losses)
        loss.backward()
        clip = self.config.optimizer.clip_norm
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.adam.step()
        self.taken += 1
        return loss.item(), norm.item()


def weights(drafter: Drafter) -> dict[str, torch.Tensor]:
    """Our parameters under PyTorch's names."""
    found = {}
    for path, value in jax.tree_util.tree_leaves_with_path(nnx.state(drafter)):
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        name = name.replace("confidence_head.proj", "confidence_head")
        tables = ("heads.head.w1", "heads.head.w2")
        found[f"{name}.weight" if name in tables else name] = as_torch(value)
    return found


def as_torch(value: jax.Array) -> torch.Tensor:
    """A copy, with indices as PyTorch wants them."""
    array = np.array(value)
    return torch.from_numpy(array.astype(np.int64) if array.dtype == np.int32 else array)


if __name__ == "__main__":
    main()
