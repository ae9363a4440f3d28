"""A small tokenizer in Hugging Face layout."""

import json
from pathlib import Path

import pytest

WORDS = ["<eos>", "<end>", "<user>", "<bot>", "<think>", "hello", "world", "box", "it", "?"]
TEMPLATE = (
    "{% for message in messages %}<user> {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}<bot> {% endif %}"
    "{% if enable_thinking is defined %}<think> {{ '?' if enable_thinking }}{% endif %}"
)


def write_word_tokenizer(directory: Path) -> Path:
    """Write a tokenizer of whole words in Hugging Face layout. "<eos>" is a special token, "<end>" is not."""
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.post_processor = processors.TemplateProcessing("<user> $A", special_tokens=[("<user>", 2)])  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(["<eos>", "<user>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 0]}))
    return directory


def change(path: Path, **fields: object) -> None:
    """Change fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
