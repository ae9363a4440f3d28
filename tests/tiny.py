"""Small policies for tests, one of them small enough to enumerate, with drafters of every quality."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.config import DecoderConfig
from models.decoder import init_decoder, make_policy
from models.drafts.block import BlockConfig, block_like, init_block, make_block
from models.drafts.eagle3 import Eagle3Config, init_eagle3, make_eagle3
from models.drafts.mtp import init_mtp, make_mtp, mtp_config
from specjax.drafters import (
    Drafter,
    EitherDrafter,
    HeadDrafter,
    HistoryDrafter,
    ModelDrafter,
    NGramDrafter,
    NoDrafter,
)
from specjax.keys import SeedStep
from specjax.rollout.plan import RolloutConfig, choose_lengths
from specjax.rollout.speculative import speculative_rollout
from specjax.rollout.stop_strings import StopStrings, Vocabulary
from specjax.sampling import SamplingLaw
from specjax.testing.drafters import PolicyDrafter, TableDrafter
from specjax.types import Params, Policy, PolicyOutput, Prompts, PyTree, Rollout
from specjax.verify import VERIFIERS, Noise, Verdict, Verifier


@dataclass(frozen=True)
class World:
    """A policy with its parameters, its prompts, and its drafters by name.

    The parameters are random. `scale` enlarges them, so that the policy's distributions depend on the context. The
    vocabulary of `eagle3 reduced` lacks every third token. Token t has the text `texts[t % len(texts)]`. Of
    `strings`, some begin and end inside tokens.
    """

    vocab: int
    layers: int
    hidden: int
    seed: int
    scale: float
    prompts: tuple[tuple[int, ...], ...]
    stops: tuple[int, ...]
    texts: tuple[str, ...] = ("",)
    strings: tuple[str, ...] = ()

    @functools.cached_property
    def config(self) -> DecoderConfig:
        return DecoderConfig(
            **self._layer,
            vocab_size=self.vocab,
            num_layers=self.layers,
            feature_layers=tuple(range(self.layers)),
            qk_norm=True,
        )

    @property
    def _layer(self) -> dict[str, int]:
        return dict(
            hidden_size=self.hidden, intermediate_size=8, num_heads=2, num_kv_heads=1, head_dim=self.hidden // 3
        )

    @functools.cached_property
    def stop_strings(self) -> StopStrings:
        return StopStrings(self.strings, Vocabulary([self.text([token]).encode() for token in range(self.vocab)]))

    def text(self, tokens: Sequence[int]) -> str:
        return "".join(self.texts[token % len(self.texts)] for token in tokens)

    def ends(self, tokens: Sequence[int]) -> bool:
        """Return whether the text of the tokens has a stop string."""
        return any(string in self.text(tokens) for string in self.strings)

    @functools.cached_property
    def policy(self) -> Policy:
        return make_policy(self.config)

    @functools.cached_property
    def drafters(self) -> dict[str, Drafter]:
        kept, blocks = self._kept, self._blocks
        return {
            "none": NoDrafter(),
            "eagle3": self._eagle3_drafter,
            "eagle3 reduced": make_eagle3(self._eagle3(len(kept)), self.policy, kept),
            "mtp": make_mtp(mtp_config(self.config, "mimo"), self.policy),
            "dflash": make_block(blocks["dflash"], self.policy),
            "dspark": make_block(blocks["dspark"], self.policy),
            "dspark reduced": make_block(blocks["dspark reduced"], self.policy, kept),
            "policy": PolicyDrafter(self.policy),
            "table": TableDrafter(tuple(-token % self.vocab for token in range(self.vocab))),
            "model": ModelDrafter(self.policy),
            "ngram": NGramDrafter(self.vocab, min_n=1, max_n=4),
            "history": HistoryDrafter(self.vocab, min_n=1, max_n=4, kept=2, siblings=3),
            "either": EitherDrafter(NGramDrafter(self.vocab, min_n=2, max_n=4), self._eagle3_drafter),
            "either history": EitherDrafter(
                HistoryDrafter(self.vocab, min_n=2, max_n=4, kept=2, siblings=3), self._eagle3_drafter
            ),
        }

    @functools.cached_property
    def _eagle3_drafter(self) -> HeadDrafter:
        return make_eagle3(self._eagle3(self.vocab), self.policy)

    @property
    def _kept(self) -> np.ndarray:
        """The tokens of a reduced draft vocabulary."""
        return np.flatnonzero(np.arange(self.vocab) % 3 != 2).astype(np.int32)

    @property
    def _blocks(self) -> dict[str, BlockConfig]:
        dspark = dict(markov_rank=3, enable_confidence_head=True, confidence_head_with_markov=True)
        shapes: dict[str, dict[str, Any]] = {
            "dflash": dict(sample_from_anchor=False, mask_token_id=0),
            "dspark": dspark,
            "dspark reduced": dspark | dict(draft_vocab_size=len(self._kept)),
        }
        return {name: block_like(self.config, 4, num_layers=1, **shape) for name, shape in shapes.items()}

    def _eagle3(self, draft_vocab: int) -> Eagle3Config:
        return Eagle3Config(
            **self._layer, feature_size=self.hidden * self.layers, vocab_size=self.vocab, draft_vocab_size=draft_vocab
        )

    @functools.cached_property
    def policy_params(self) -> PyTree:
        init = jax.jit(lambda key: nn.unbox(init_decoder(self.config, key)))
        return jax.tree.map(lambda x: self.scale * x, init(jax.random.key(self.seed)))

    @functools.cached_property
    def batch(self) -> Prompts:
        """The prompts, padded with arbitrary tokens. Their ids are neither ordered nor contiguous."""
        lengths = np.array([len(p) for p in self.prompts], np.int32)
        tokens = np.random.default_rng(1).integers(self.vocab, size=(len(lengths), lengths.max() + 1), dtype=np.int32)
        for row, prompt in zip(tokens, self.prompts, strict=True):
            row[: len(prompt)] = prompt
        ids = np.random.default_rng(2).permutation(1000)[: len(lengths)].astype(np.int32)
        return Prompts(jnp.asarray(tokens), jnp.asarray(lengths), jnp.asarray(ids))

    @functools.cache  # noqa: B019
    def draft(self, name: str, seed: int = 0) -> PyTree:
        """Return draft parameters by name.

        For heads: `random`, `random reduced`, `random mtp`, `random dflash`, `random dspark`, `random dspark reduced`,
        `identical`, `flat`, `adversarial`, and `trained` in place of `random`. For a model as the draft: `twin`, equal
        to the policy, and `stranger`. Without parameters: `none`, and `remembered`, which only fills a lookup's memory.
        """
        scales = {"identical": 1.0, "flat": 0.4, "adversarial": -1.0}
        if name in scales:
            return {"scale": jnp.float32(scales[name])}
        if name in ("none", "remembered"):
            return {}
        if name == "twin":
            return self.policy_params
        if name == "stranger":
            return nn.unbox(jax.jit(functools.partial(init_decoder, self.config))(jax.random.key(100 + seed)))
        kind = next((kind for kind in ("mtp", "dflash", "dspark reduced", "dspark") if kind in name), "eagle3")
        drafter: Drafter = self.drafters[kind]
        if kind in self._blocks:
            init = functools.partial(init_block, self._blocks[kind])
        elif kind == "mtp":
            init = functools.partial(init_mtp, mtp_config(self.config, "mimo"))
        else:
            size = len(self._kept) if "reduced" in name else self.vocab
            init = functools.partial(init_eagle3, self._eagle3(size))
        params = jax.jit(lambda key: nn.unbox(init(key)))(jax.random.key(100 + seed))
        return params if "random" in name else self._distil(drafter, params)

    def params(self, draft: str, seed: int = 0) -> Params:
        """Return the parameters of policy and draft, and a filled memory if the name includes `remembered`."""
        own = self.draft(draft.partition(" beside ")[0], seed)
        return Params(self.policy_params, own, self.memory if "remembered" in draft else ())

    @functools.cached_property
    def memory(self) -> jax.Array:
        """Return a memory of random completions, two or four tokens long, for every prompt id of the batch."""
        tokens = np.random.default_rng(4).integers(1, 1 + self.vocab, size=(1000, 2, 4), dtype=np.int32)
        tokens[:, 1, 2:] = 0
        return jnp.asarray(tokens)

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Return the logits of a teacher-forced forward without a cache."""
        return np.asarray(self._forward(self.policy_params, np.asarray(tokens, np.int32)))

    def completion_logits(self, prompt: int, completion: np.ndarray) -> np.ndarray:
        """Return the logits from which each token of a completion was drawn, [C, V]."""
        tokens = [*self.prompts[prompt], *completion]
        padding = [0] * (self.batch.tokens.shape[1] - len(self.prompts[prompt]))
        start = len(self.prompts[prompt]) - 1
        return self.logits(np.array([tokens + padding]))[0, start : start + len(completion)]

    @functools.cached_property
    def _forward(self) -> Callable[[PyTree, np.ndarray], jax.Array]:
        return jax.jit(
            lambda params, tokens: self.policy.apply(params, tokens, jnp.zeros(len(tokens), jnp.int32)).logits
        )

    def rollout(self, drafter: str, draft: str, config: RolloutConfig, run: SeedStep, seed: int = 0) -> Rollout:
        """Run `speculative_rollout` with a drafter and its parameters. Compiled once per drafter and config."""
        return self.program(drafter, config)(self.params(draft, seed), self.batch, run)

    @functools.cache  # noqa: B019
    def program(self, drafter: str, config: RolloutConfig) -> Callable[..., Rollout]:
        """Return one program for all choices of draft lengths; its last argument is an index for each phase."""

        def run(params: Params, prompts: Prompts, seed_step: SeedStep, chosen: jax.Array | None = None) -> Rollout:
            own = choose_lengths(config, chosen)
            return speculative_rollout(self.policy, self.drafters[drafter], params, prompts, seed_step, own)

        return jax.jit(run)

    def _distil(self, drafter: Drafter, draft: PyTree) -> PyTree:
        """Train the draft for 300 steps of Adam on random continuations of the first prompt."""
        prompt = np.tile(self.prompts[0], (64, 1))
        tokens = np.concatenate([prompt, np.random.default_rng(3).integers(self.vocab, size=(64, 6))], axis=1)
        tokens = jnp.asarray(tokens, jnp.int32)
        mask = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None] >= prompt.shape[1], tokens.shape)

        @jax.jit
        def train(params: Params) -> PyTree:
            output = jax.lax.stop_gradient(self.policy.apply(params.policy, tokens, jnp.zeros(64, jnp.int32)))
            return distilled(drafter, params, tokens, output, mask, SamplingLaw(), steps=300)

        return train(Params(self.policy_params, draft))


def chosen(index: jax.Array) -> Verifier:
    """Return the verifier VERIFIERS[index]. The index is traced, so that one program holds all of them."""
    verifiers = list(VERIFIERS.values())

    def noise(keys: jax.Array, start: jax.Array, k: int, vocab: int) -> Noise:
        def of(verifier: Verifier) -> Noise:
            own = verifier.noise(keys, start, k, vocab)
            return own._replace(emit=jnp.pad(own.emit, ((0, 0), (0, k + 1 - own.emit.shape[1]), (0, 0))))

        return jax.lax.switch(index, [functools.partial(of, verifier) for verifier in verifiers])

    def verify(log_p: jax.Array, log_q: jax.Array, draft: jax.Array, length: jax.Array, noise: Noise) -> Verdict:
        branches = [verifier.verify for verifier in verifiers]
        return jax.lax.switch(index, branches, log_p, log_q, draft, length, noise)

    return Verifier(noise, verify)


def assert_same(rollout: Rollout, other: Rollout, *names: str) -> None:
    """Verify that both rollouts have the same tokens and fields `names`, and log-probs within 1e-4."""
    for name in ("tokens", "lengths", "stopped", *names):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(other, name), err_msg=name)
    for name in ("law", "full"):
        np.testing.assert_allclose(getattr(rollout, name), getattr(other, name), atol=1e-4, err_msg=name)


def distilled(
    drafter: Drafter,
    params: Params,
    tokens: jax.Array,
    output: PolicyOutput,
    mask: jax.Array,
    law: SamplingLaw,
    steps: int,
) -> PyTree:
    """Return the draft's parameters after `steps` steps of Adam on one batch. Call it inside jit."""
    optimiser = optax.adam(0.02)

    def step(carry: tuple[PyTree, PyTree], _: None) -> tuple[tuple[PyTree, PyTree], None]:
        draft, state = carry

        def loss(draft: PyTree) -> jax.Array:
            return drafter.loss(replace(params, draft=draft), tokens, output, mask, law).loss / mask.sum()

        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimiser.update(jax.grad(loss)(draft), state)
            return (optax.apply_updates(draft, updates), state), None

    return jax.lax.scan(step, (params.draft, optimiser.init(params.draft)), length=steps)[0][0]


ENUMERABLE = World(
    vocab=5,
    layers=1,
    hidden=6,
    seed=305,
    scale=1.2,
    prompts=((3, 1),),
    stops=(2, 3, 4),
    texts=("ab", "ca", "", "", ""),
    strings=("bc",),
)
WANDERING = World(
    vocab=23,
    layers=2,
    hidden=12,
    seed=0,
    scale=1.3,
    prompts=((4,), (7, 1, 19), (2, 2), (22, 0, 5, 9), (11, 3), (8, 16, 13)),
    stops=(3, 10, 17),
    texts=("a", "b", "ab", "ba", ""),
    strings=("bbab", "aaaba"),
)
