"""A tiny random policy and tokenizer in Hugging Face layout, and a few problems in the format of GSM8K."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import pytest

from models.config import DecoderConfig
from models.decoder import init_decoder
from models.hf.save import save_policy
from models.params import init_params
from specjax.parallel.mesh import MeshConfig, make_mesh

# Answers are 1, 2 or 3, so that an untrained policy is right now and then.
WORDS = ("<eos>", "<user>", "<bot>", "<unk>", "and", "?", "1", "2", "3")
TEMPLATE = (
    "{% for message in messages %}<user> {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}<bot> {% endif %}"
)


def write_checkpoint(directory: Path, words: Sequence[str] = WORDS, num_layers: int = 2) -> None:
    """Write a Qwen3 policy and a tokenizer of whole `words`. Skips the test if a package for that is missing."""
    pytest.importorskip("safetensors")
    pytest.importorskip("transformers")
    shape = dict(hidden_size=16, intermediate_size=16, num_heads=2, num_kv_heads=1, head_dim=8)
    kinds = dict(vocab_size=len(words), num_layers=num_layers, qk_norm=True, tie_embeddings=True)
    config = DecoderConfig(**shape, **kinds)
    params = init_params(partial(init_decoder, config), jax.random.key(0), make_mesh(MeshConfig()))
    save_policy(directory, params, config)
    write_tokenizer(directory, words)


def write_tokenizer(directory: Path, words: Sequence[str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(["<eos>", "<user>", "<bot>", "<unk>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def write_problems(path: Path, answers: Sequence[str]) -> None:
    """Write one problem per answer, all different."""
    lines = [
        {
            "question": " and ".join("123"[(i // 3**place) % 3] for place in range(4)) + " ?",
            "answer": f"So\n#### {answer}",
        }
        for i, answer in enumerate(answers)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
