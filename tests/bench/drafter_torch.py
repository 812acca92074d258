"""The DSpark vanilla drafter and its training step as one writes them with PyTorch modules.

All blocks of a row are one sequence of queries; keys are [context ; all blocks], and a mask keeps
each block to the context before its anchor and to itself. Logits of all blocks exist at once.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Grouped-query attention with normed queries and keys."""

    def __init__(self, geometry):
        super().__init__()
        g = geometry
        self.q_proj = nn.Linear(g.width, g.heads * g.head_dim, bias=False)
        self.k_proj = nn.Linear(g.width, g.kv_heads * g.head_dim, bias=False)
        self.v_proj = nn.Linear(g.width, g.kv_heads * g.head_dim, bias=False)
        self.o_proj = nn.Linear(g.heads * g.head_dim, g.width, bias=False)
        self.q_norm = nn.RMSNorm(g.head_dim, g.norm_eps)
        self.k_norm = nn.RMSNorm(g.head_dim, g.norm_eps)
        self.head_dim = g.head_dim

    def heads(self, x):
        """[B, rows, heads * head_dim] -> [B, heads, rows, head_dim]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, x, context, mask, rotary):
        """Queries from the blocks, keys and values from context and blocks."""
        every = torch.cat([context, x], 1)
        cos, sin = rotary
        q = self.q_norm(self.heads(self.q_proj(x)))
        k = self.k_norm(self.heads(self.k_proj(every)))
        v = self.heads(self.v_proj(every))
        q = rotate(q, cos[:, :, context.shape[1] :], sin[:, :, context.shape[1] :])
        k = rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Gated MLP."""

    def __init__(self, geometry):
        super().__init__()
        self.gate_proj = nn.Linear(geometry.width, geometry.mlp_width, bias=False)
        self.up_proj = nn.Linear(geometry.width, geometry.mlp_width, bias=False)
        self.down_proj = nn.Linear(geometry.mlp_width, geometry.width, bias=False)

    def forward(self, x):
        """down(silu(gate x) * up x)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm layer."""

    def __init__(self, geometry):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(geometry.width, geometry.norm_eps)
        self.self_attn = Attention(geometry)
        self.post_attention_layernorm = nn.RMSNorm(geometry.width, geometry.norm_eps)
        self.mlp = MLP(geometry)

    def forward(self, x, context, mask, rotary):
        """Attention over [context ; blocks], then the MLP."""
        x = x + self.self_attn(self.input_layernorm(x), context, mask, rotary)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """Backbone, Markov head and confidence head; embedding and lm head are the target's, frozen."""

    def __init__(self, config, embedding, head):
        super().__init__()
        g = config.geometry
        self.backbone = nn.ModuleDict(
            {
                "fc": nn.Linear(config.feature_width, g.width, bias=False),
                "hidden_norm": nn.RMSNorm(g.width, g.norm_eps),
                "layers": nn.ModuleList(Layer(g) for _ in range(config.num_layers)),
                "norm": nn.RMSNorm(g.width, g.norm_eps),
            }
        )
        self.heads = nn.ModuleDict(
            {
                "head": nn.ModuleDict(
                    {
                        "w1": nn.Embedding(config.vocab_size, config.head.rank),
                        "w2": nn.Linear(config.head.rank, config.vocab_size, bias=False),
                    }
                ),
                "confidence_head": nn.Linear(g.width + config.head.rank, 1),
            }
        )
        self.register_buffer("embedding", embedding)
        self.register_buffer("lm_head", head)
        self.config = config

    def forward(self, features, anchors, anchor_tokens):
        """Hidden states of all block rows [B, A * K, D]."""
        c, batch, length = self.config, features.shape[0], features.shape[1]
        size = c.block_size
        inputs = torch.full((*anchors.shape, size), c.mask_token)
        inputs[..., 0] = anchor_tokens
        x = F.embedding(inputs.flatten(1), self.embedding)
        rows = (anchors[..., None] + torch.arange(size)).flatten(1)
        positions = torch.cat([torch.arange(length).expand(batch, -1), rows], 1)
        rotary = angles(positions, c.geometry)
        mask = visible(anchors, length, size)
        context = self.backbone["hidden_norm"](self.backbone["fc"](features))
        for layer in self.backbone["layers"]:
            x = layer(x, context, mask, rotary)
        return self.backbone["norm"](x)


def visible(anchors, length, size):
    """[B, 1, A * K, T + A * K]: the context before each anchor, and the block itself."""
    block = torch.arange(anchors.shape[1]).repeat_interleave(size)
    context = torch.arange(length) < anchors.repeat_interleave(size, 1)[..., None]
    own = (block[:, None] == block).expand(anchors.shape[0], -1, -1)
    return torch.cat([context, own], -1)[:, None]


def angles(positions, geometry):
    """Cosine and sine of each position [B, 1, rows, head_dim]."""
    exponents = torch.arange(0, geometry.head_dim, 2).float() / geometry.head_dim
    turns = positions[..., None].float() / geometry.rotary.theta**exponents
    turns = torch.cat([turns, turns], -1)[:, None]
    return turns.cos(), turns.sin()


def rotate(x, cos, sin):
    """Rotates the pairs (i, i + half) of each head."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def loss(drafter, batch, losses):
    """DSpark's three terms, weighted by position, over all blocks at once."""
    hidden = drafter(batch["features"], batch["anchors"], batch["prevs"][..., 0])
    prevs, labels = batch["prevs"].flatten(1), batch["labels"].flatten(1)
    weights = batch["weights"].flatten(1)
    heads = drafter.heads
    rows = heads["head"]["w1"](prevs)
    logits = F.linear(hidden, drafter.lm_head) + heads["head"]["w2"](rows)
    with torch.no_grad():
        target = F.linear(batch["target_hidden"].flatten(1, 2), drafter.lm_head).softmax(-1)
    log_probs = logits.log_softmax(-1)
    cross_entropy = -log_probs.gather(-1, labels[..., None])[..., 0]
    l1 = (log_probs.exp() - target).abs().sum(-1)
    accept = (1 - l1.detach() / 2).clamp(0, 1)
    confidence = heads["confidence_head"](torch.cat([hidden, rows], -1))[..., 0]
    confidence = F.binary_cross_entropy_with_logits(confidence, accept, reduction="none")
    terms = losses.cross_entropy * cross_entropy + losses.l1 * l1 + losses.confidence * confidence
    return (terms * weights).sum() / weights.sum()
