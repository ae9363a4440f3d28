"""vLLM, the inference engine: plain, and with prompt lookup, which drafts without a trained head."""

import importlib
from functools import partial
from typing import Any

import numpy as np

from benchmarks.bench.peers.protocol import PeerCheckpoint, PeerSampler, Unsupported

NAMES = ("vLLM", "vLLM, prompt lookup")
# Draft length.
DRAFTED = 3
# Fraction of GPU memory for each of the two engines. JAX preallocates too: lower XLA_PYTHON_CLIENT_MEM_FRACTION.
MEMORY_SHARE = 0.25


def load(checkpoint: PeerCheckpoint) -> tuple[PeerSampler, ...]:
    """Start both engines of NAMES on the checkpoint, without a tokenizer."""
    vllm = importlib.import_module("vllm")
    options: dict[str, Any] = dict(
        model=str(checkpoint.directory),
        skip_tokenizer_init=True,
        gpu_memory_utilization=MEMORY_SHARE,
        # Every turn repeats the same prompts, and their prefill must be timed.
        enable_prefix_caching=False,
    )
    lookup = {"method": "ngram", "num_speculative_tokens": DRAFTED, "prompt_lookup_max": 4}
    try:
        engines = vllm.LLM(**options), vllm.LLM(**options, speculative_config=lookup)
    except (RuntimeError, ValueError) as error:
        raise Unsupported((str(error) or "it does not start").splitlines()[0]) from error
    return tuple(PeerSampler(partial(_generate, vllm, engine)) for engine in engines)


def _generate(vllm: Any, engine: Any, prompts: np.ndarray, lengths: np.ndarray, greedy: bool) -> np.ndarray:
    """Generate with one length per row, so that finished rows free their slots.

    No seeds are set, because with per-row seeds vLLM samples row by row.
    """
    temperature = 0.0 if greedy else 1.0
    laws = [
        vllm.SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True, detokenize=False)
        for count in lengths.tolist()
    ]
    inputs = [{"prompt_token_ids": row} for row in prompts.tolist()]
    outputs = engine.generate(inputs, laws, use_tqdm=False)
    tokens = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, output in zip(tokens, outputs, strict=True):
        row[: len(output.outputs[0].token_ids)] = output.outputs[0].token_ids
    return tokens
