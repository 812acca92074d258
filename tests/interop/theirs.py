"""What the reference packages make of a block: hidden states, logits and greedy drafts, in fp32."""

from pathlib import Path

import numpy as np
import torch
from dflash.model import (
    DFlash2DraftModel,
    DFlashDraftModel,
    _draft_value,
    _raw_input_embeddings,
)
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.models.dflash import core
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

TARGET = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "tie_word_embeddings": False,
}


def target(folder: Path) -> Qwen3ForCausalLM:
    """A random target, saved where speculators will look for its embedding and head."""
    torch.manual_seed(0)
    model = _louder(Qwen3ForCausalLM(Qwen3Config(**TARGET)).float().eval())
    model.save_pretrained(folder)
    return model


def _louder(model: nn.Module) -> nn.Module:
    """Larger weights, so that laws are far from uniform and greedy choices are not near ties."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.copy_(torch.randn_like(weight) / 6)
            elif "norm" in name:
                weight.copy_(1 + torch.randn_like(weight) / 8)
    return model


def random_zlab(folder: Path, fields: dict, nested: dict) -> nn.Module:
    """A random drafter of theirs, saved as they save it."""
    torch.manual_seed(1)
    kind = DFlash2DraftModel if "selector_rank" in nested else DFlashDraftModel
    config = Qwen3Config(**{**TARGET, "num_hidden_layers": 2, **fields})
    config.dflash_config, config.num_target_layers = nested, TARGET["num_hidden_layers"]
    model = _louder(kind(config).float().eval())
    model.save_pretrained(folder)
    return model


def open_zlab(folder: Path, is_second: bool) -> nn.Module:
    """Our export in their class; no key may be missing or left over."""
    kind = DFlash2DraftModel if is_second else DFlashDraftModel
    model, said = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"], said
    return model.eval()


@torch.inference_mode()
def zlab(model: nn.Module, target: nn.Module, features, anchor: int) -> dict[str, np.ndarray]:
    """One round behind the features' last token."""
    rows = model.block_size
    block = torch.full((1, rows), model.mask_token_id)
    block[0, 0] = anchor
    scale = float(_draft_value(model.config, "input_embedding_scale", 1.0))
    hidden = model(
        target_hidden=torch.tensor(features),
        noise_embedding=_raw_input_embeddings(target, block, scale),
        position_ids=torch.arange(features.shape[1] + rows)[None],
    )[:, 1:]
    logits = model.compute_logits(hidden, target.lm_head)
    if isinstance(model, DFlash2DraftModel):
        tokens = model.propose(hidden, block[:, 0], target.lm_head, 0.0)[0]
    else:
        tokens = logits.argmax(-1)
    return {"hidden": hidden.numpy(), "base": logits.numpy(), "tokens": tokens.numpy()}


def random_speculator(folder: Path, target_folder: Path, kind: str, **fields) -> nn.Module:
    """A random drafter of theirs, saved as they save it."""
    torch.manual_seed(2)
    config = SpeculatorModelConfig.registry[kind](
        transformer_layer_config=Qwen3Config(**{**TARGET, "num_hidden_layers": 2}),
        speculators_config=_proposal(kind, target_folder, fields),
        aux_hidden_state_layer_ids=[2, 4, 7],
        mask_token_id=96,
        **{"draft_vocab_size": 97, **fields},
    )
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.registered_model_class_from_config(config)(config)
    model = _louder(model.float().eval())
    if config.draft_vocab_size < 97:
        held = torch.zeros(97, dtype=torch.bool)
        held[torch.randperm(97)[: config.draft_vocab_size]] = True
        offsets = torch.nonzero(held)[:, 0] - torch.arange(config.draft_vocab_size)
        model.load_vocab_mappings(held, offsets)
    model.load_verifier_weights()
    model.save_pretrained(folder)
    return model


def _proposal(kind: str, target_folder: Path, fields: dict):
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    rows, from_anchor = fields["block_size"], fields.get("sample_from_anchor", kind == "dspark")
    method = GreedyTokenProposalConfig(speculative_tokens=rows - (not from_anchor))
    return SpeculatorsConfig(
        algorithm=kind,
        proposal_methods=[method],
        default_proposal_method="greedy",
        verifier=VerifierConfig.from_pretrained(str(target_folder)),
    )


def open_speculator(folder: Path) -> nn.Module:
    """Our export in their class, with the target's weights from where our config says."""
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model, said = SpeculatorModel.from_pretrained(
        folder, config=config, dtype=torch.float32, output_loading_info=True
    )
    assert not said["missing_keys"] and not said["unexpected_keys"], said
    model.load_verifier_weights()  # which from_pretrained leaves out when asked for the keys
    return model.eval()


@torch.inference_mode()
def speculator(model: nn.Module, features, tokens, anchors) -> dict[str, np.ndarray]:
    """Training forward behind given anchors, teacher forced, and greedy drafts."""
    core.select_anchors = lambda *_: (torch.tensor(anchors), torch.ones(len(anchors)).bool())
    rows, count = model.block_size, len(anchors)
    tokens, features = torch.tensor(tokens)[None], torch.tensor(features)
    model._create_mask_fn = lambda *args, **how: core.create_float_mask(
        *args, dtype=torch.float32, **how
    )
    hidden, base, *_, where = model._backbone_forward(
        features,
        tokens,
        torch.ones_like(tokens).float(),
        torch.zeros(1, tokens.shape[1], features.shape[-1] // 3),
        torch.zeros_like(tokens),
        max_anchors=count,
    )
    first = 0 if model.config.sample_from_anchor else 1
    hidden = hidden.view(count, rows, -1)[:, first:]
    base = base.view(count, rows, -1)[:, first:]
    prevs = tokens[0, where].view(count, rows)[:, : rows - first]
    out = {
        "hidden": hidden,
        "base": base,
        "draft": base,
        "tokens": _greedy(model, hidden, base, prevs),
    }
    if getattr(model, "markov_head", None) is not None:
        out["draft"] = base + model.markov_head.block_bias(
            prev_token_ids=prevs, hidden_states=hidden
        )
    if getattr(model, "confidence_head", None) is not None:
        seen = [hidden]
        if model.config.confidence_head_with_markov:
            seen.append(model.markov_head.prev_embeddings(prevs))
        out["confidence"] = model.confidence_head(torch.cat(seen, -1)).reshape(prevs.shape)
    return {name: value.numpy() for name, value in out.items()}


def _greedy(model, hidden, base, prevs):
    """Drafts in the target's ids, each fed on."""
    path = prevs[:, :1]
    for k in range(base.shape[1]):
        scores = base[:, k]
        ids = torch.arange(scores.shape[-1])
        if getattr(model, "candidate_selector", None) is not None:
            ids, scores = model.candidate_selector.select(base[:, k], hidden[:, k], path[:, -1])
        elif getattr(model, "markov_head", None) is not None:
            bias = model.markov_head.block_bias(
                prev_token_ids=path, hidden_states=hidden[:, : k + 1]
            )
            scores = scores + bias[:, -1]
        place = scores.argmax(-1, keepdim=True)
        token = ids.gather(-1, place) if ids.ndim > 1 else ids[place]
        if model.use_draft_vocab:
            token = token + model.d2t[token]
        path = torch.cat([path, token], 1)
    return path[:, 1:]
