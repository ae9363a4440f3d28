"""Random EAGLE-3 heads in the layouts of SpecForge and speculators, with tensor names and fields written by hand."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from models.checkpoints.draft import SavedDraft
from models.hf.drafts.dialects import Dialect
from models.hf.drafts.reader import load_public_draft
from specjax.parallel.mesh import MeshConfig, make_mesh
from tests.models.eagle3_reference import Shape, Weights

VOCAB, WIDTH, INNER, HEADS, KV_HEADS, HEAD_DIM = 17, 12, 16, 4, 2, 6
LAYERS = (2, 3, 4)
REDUCED = (0, 1, 4, 5, 6, 9, 12, 13, 16)
ONE = make_mesh(MeshConfig())


@dataclass(frozen=True)
class Public:
    """Contents of a checkpoint to write. ids: the draft vocabulary; None: the policy's whole vocabulary."""

    dialect: Dialect = "specforge"
    ids: tuple[int, ...] | None = REDUCED
    layers: tuple[int, ...] = LAYERS
    num_layers: int = 1
    qk_norm: bool = False
    window: int | None = None
    use_aux_hidden_state: bool = True
    flags: tuple[str, ...] = ()
    theta: float = 50.0
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> Shape:
        flags = {name: name in self.flags for name in ("norm_before_residual", "norm_output")}
        return Shape(HEADS, KV_HEADS, HEAD_DIM, rope_theta=self.theta, eps=1e-3, window=self.window, **flags)

    @property
    def target_ids(self) -> np.ndarray:
        return np.arange(VOCAB) if self.ids is None else np.array(self.ids)

    def fields(self) -> dict[str, Any]:
        size = len(self.target_ids)
        layer: dict[str, Any] = dict(model_type="qwen3" if self.qk_norm else "llama", hidden_act="silu", use_cache=True)
        layer |= dict(hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=self.num_layers, vocab_size=VOCAB)
        layer |= dict(num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, attention_bias=False)
        layer |= dict(max_position_embeddings=64, rms_norm_eps=1e-3, initializer_range=0.02, torch_dtype="float32")
        if self.window is not None:
            layer |= {"sliding_window": self.window, "layer_types": ["sliding_attention"] * self.num_layers}
        beside: dict[str, Any] = dict(draft_vocab_size=size, tie_word_embeddings=False)
        beside |= dict.fromkeys(self.flags, True)
        if self.dialect == "speculators":
            layer["rope_parameters"] = {"rope_type": "default", "rope_theta": self.theta}
            verifier = {"architectures": ["LlamaForCausalLM"], "name_or_path": "someone/tiny"}
            proposals = {
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            }
            beside |= dict(architectures=["Eagle3Speculator"], auto_map={"": "config.Eagle3SpeculatorConfig"})
            beside |= dict(speculators_config={"algorithm": "eagle3", **proposals, "verifier": verifier})
            beside |= dict(speculators_model_type="eagle3", speculators_version="0.3.0", transformers_version="4.57.1")
            beside |= dict(eagle_aux_hidden_state_layer_ids=list(self.layers), transformer_layer_config=layer)
            beside |= dict(embed_requires_grad=False, has_no_defaults_at_init=False, target_hidden_size=None)
            return {**beside, **self.config}
        eagle: dict[str, Any] = {"use_aux_hidden_state": self.use_aux_hidden_state}
        if self.use_aux_hidden_state:
            eagle["eagle_aux_hidden_state_layer_ids"] = [i - 1 for i in self.layers]
        beside |= dict(architectures=["LlamaForCausalLMEagle3"], bos_token_id=1, eagle_config=eagle)
        beside |= dict(rope_scaling=None, rope_theta=self.theta)
        beside |= dict(transformers_version="4.53.2", use_sliding_window=False)
        return {**layer, **beside, **self.config}

    def tensors(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Return random tensors: linear layers three times as large as usual, norms from 0.5 to 1.5."""
        generator = np.random.default_rng(seed)

        def linear(out: int, inputs: int) -> np.ndarray:
            return (3 * inputs**-0.5 * generator.normal(size=(out, inputs))).astype(np.float32)

        def norm(width: int) -> np.ndarray:
            return generator.uniform(0.5, 1.5, width).astype(np.float32)

        tensors = {"norm.weight": norm(WIDTH), "lm_head.weight": linear(len(self.target_ids), WIDTH)}
        for i in range(self.num_layers):
            prefix, wide = f"layers.{i}.", WIDTH * (2 if i == 0 else 1)
            if self.dialect == "specforge":
                prefix = "midlayer."
            layer = {f"{name}_layernorm.weight": norm(WIDTH) for name in ("input", "post_attention")}
            heads = dict(q=HEADS, k=KV_HEADS, v=KV_HEADS)
            layer |= {f"self_attn.{x}_proj.weight": linear(n * HEAD_DIM, wide) for x, n in heads.items()}
            layer["self_attn.o_proj.weight"] = linear(WIDTH, HEADS * HEAD_DIM)
            layer |= {f"mlp.{name}_proj.weight": linear(INNER, WIDTH) for name in ("gate", "up")}
            layer["mlp.down_proj.weight"] = linear(WIDTH, INNER)
            if i == 0:
                layer["hidden_norm.weight"] = norm(WIDTH)
            if self.qk_norm:
                layer |= {f"self_attn.{x}_norm.weight": norm(HEAD_DIM) for x in "qk"}
            tensors |= {prefix + name: x for name, x in layer.items()}
        if self.use_aux_hidden_state:
            tensors["fc.weight"] = linear(WIDTH, len(self.layers) * WIDTH)
        if "norm_before_fc" in self.flags:
            tensors["input_norm.weight"] = norm(len(self.layers) * WIDTH)
        if "fc_norm" in self.flags:
            tensors |= {f"fc_norm.{i}.weight": norm(WIDTH) for i in range(len(self.layers))}
        if self.ids is not None:
            tensors["d2t"] = np.array(self.ids, np.int64) - np.arange(len(self.ids))
            tensors["t2d"] = np.isin(np.arange(VOCAB), self.ids)
        return tensors

    def write(self, directory: Path, **changes: np.ndarray | None) -> Weights:
        """Write the head, with some tensors replaced, added or (None) left out. Return its weights in float64."""
        from safetensors.numpy import save_file

        tensors = {name: x for name, x in {**self.tensors(), **changes}.items() if x is not None}
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.fields()))
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return {name: x.astype(np.float64) for name, x in tensors.items() if name not in ("d2t", "t2d")}


def loaded(tmp_path: Path, public: Public, **changes: np.ndarray | None) -> SavedDraft:
    """Write a head with these tensors changed, and load it."""
    public.write(tmp_path / "head", **changes)
    return load_public_draft(tmp_path / "head", ONE)
