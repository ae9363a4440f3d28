"""Steps of TRL's GRPOTrainer, for `benchmarks.beside_trl`. Runs in an environment with trl, without this project.

    python trl_steps.py JSON    # {"model", "prompts", "group_size", "groups", "max_new_tokens", "temperature", "steps"}

Prints a line of JSON with the seconds and the mean completion length of each step, and the peak of its memory in GiB.
"""

import json
import resource
import sys
import time
from typing import Any


def main(options: dict[str, Any]) -> None:
    """Train on the prompts in their order, without a reference policy, in bfloat16 autocast."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    seconds, lengths = list[float](), list[float]()

    class Clock(TrainerCallback):
        began = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seconds.append(time.perf_counter() - self.began)

    def reward(completions: list[Any], **kwargs: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        lengths.append(sum(map(len, kwargs["completion_ids"])) / len(texts))
        return [len(text) % 7 / 7 for text in texts]

    rows = options["groups"] * options["group_size"]
    config = GRPOConfig(
        output_dir=options["out"],
        per_device_train_batch_size=rows,
        num_generations=options["group_size"],
        max_completion_length=options["max_new_tokens"],
        temperature=options["temperature"],
        max_steps=options["steps"],
        learning_rate=1e-6,
        beta=0.0,
        bf16=True,
        use_cpu=True,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(options["model"])
    prompts = Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in options["prompts"]])
    trainer = GRPOTrainer(
        model=options["model"],
        args=config,
        train_dataset=prompts,
        reward_funcs=reward,
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"seconds": seconds, "lengths": lengths, "peak_gib": peak}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
