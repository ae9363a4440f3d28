"""`smollm2_extraction` with adapters in place of full training: `make real ARGS='--recipe smollm2_extraction_lora'`."""

from dataclasses import replace

from configs.schema import LoraConfig
from configs.smollm2_extraction import config as full

config = replace(
    full,
    name="smollm2_extraction_lora",
    lora=LoraConfig(rank=16),
    policy_optimizer=replace(full.policy_optimizer, learning_rate=10 * full.policy_optimizer.learning_rate),
)
