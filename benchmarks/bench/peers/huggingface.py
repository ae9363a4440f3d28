"""Hugging Face `generate`: plain, with an assistant model that drafts, and with prompt lookup."""

import importlib
import os
from functools import partial
from typing import Any

import jax
import numpy as np

from benchmarks.bench.peers.protocol import PeerCheckpoint, PeerSampler

NAMES = ("Hugging Face", "Hugging Face, assistant", "Hugging Face, prompt lookup")
# Draft length.
DRAFTED = 3


def load(checkpoint: PeerCheckpoint) -> tuple[PeerSampler, ...]:
    """Return the samplers of NAMES. The assistant is the policy cut to its first layer; acceptance is not forced."""
    torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(os.cpu_count() or 1)
    on_gpu = jax.default_backend() == "gpu" and torch.cuda.is_available()

    def model(**options: Any) -> Any:
        options |= dict(dtype="auto", trust_remote_code=False)
        network = transformers.AutoModelForCausalLM.from_pretrained(checkpoint.directory, **options)
        return network.to("cuda" if on_gpu else "cpu").eval()

    policy, assistant = model(), model(num_hidden_layers=1)
    assistant.generation_config.num_assistant_tokens = DRAFTED
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    # Assisted generation and prompt lookup support only one row.
    return (
        PeerSampler(partial(_generate, torch, policy, {})),
        PeerSampler(partial(_generate, torch, policy, {"assistant_model": assistant}), most_rows=1),
        PeerSampler(partial(_generate, torch, policy, {"prompt_lookup_num_tokens": DRAFTED}), most_rows=1),
    )


def _generate(
    torch: Any, model: Any, options: dict[str, Any], prompts: np.ndarray, lengths: np.ndarray, greedy: bool
) -> np.ndarray:
    count = int(lengths.max())
    tokens = torch.from_numpy(prompts.astype(np.int64)).to(model.device)
    law: dict[str, Any] = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0}
    with torch.inference_mode():
        output = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=count,
            min_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
            **law,
            **options,
        )
    return output[:, prompts.shape[1] :].cpu().numpy()
