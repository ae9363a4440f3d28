"""A published model of 135M parameters and a Python calculator: products of two numbers with two digits.

    python -m launch.train benchmarks/calculator.py --model.path DIR --out OUT --log.samples 32 --log.samples-every 1
    python -m benchmarks.calculator OUT

DIR holds SmolLM2-135M-Instruct (`benchmarks.smollm2`), whose own chat template shows no tools: TEMPLATE takes its
place. The second command prints a table from OUT/samples.jsonl.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from configs.schema import (
    CheckpointConfig,
    DataConfig,
    DraftConfig,
    EnvironmentConfig,
    EvalConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutOptions,
    RunConfig,
)
from launch.data.problems import Problem
from launch.environments.calls import find_calls

# ChatML with calls in Hermes' format. An example shows a call and what to do with its result.
TEMPLATE = (
    "<|im_start|>system\n"
    "You answer with numbers. First call the tool.{% for tool in tools %}\n{{ tool.function | tojson }}{% endfor %}"
    "<|im_end|>\n<|im_start|>user\nHow much is 13 times 25?<|im_end|>\n<|im_start|>assistant\n"
    '<tool_call>{"name": "calculate", "arguments": {"expression": "13 * 25"}}</tool_call><|im_end|>\n'
    "<|im_start|>user\n<tool_response>325</tool_response><|im_end|>\n<|im_start|>assistant\n325<|im_end|>\n"
    "{% for message in messages %}<|im_start|>"
    "{% if message.role == 'tool' %}user\n<tool_response>{{ message.content }}</tool_response>"
    "{% else %}{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    """<tool_call>{"name": "{{ call.function.name }}", "arguments": """
    "{{ call.function.arguments | tojson }}}</tool_call>"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """Return 500 problems to train on, and 100 held-out ones."""
    draw, found = random.Random(seed), dict[str, Problem]()
    while len(found) < 600:
        first, second = draw.randrange(11, 100), draw.randrange(11, 100)
        prompt = f"How much is {first} times {second}?"
        found[prompt] = Problem(prompt=prompt, answer=str(first * second))
    listed = [*found.values()]
    return listed[:500], listed[500:]


def right(completion: str, answer: str) -> float:
    """Return 1.0 if the last number of what the policy wrote is the answer, else 0.0."""
    numbers = re.findall(r"\d+", completion.replace(",", ""))
    return float(bool(numbers) and numbers[-1] == answer)


def table(run: Path) -> Iterator[str]:
    """Yield a line for each step in samples.jsonl: how many of its completions do what."""
    for line in (run / "samples.jsonl").read_text(encoding="utf-8").splitlines():
        step = json.loads(line)
        rows = [facts(each["parts"], each["reward"]) for each in step["completions"]]
        if step["step"] == 1:
            yield f"{'step':>4}{'rows':>6}" + "".join(f"{name:>16}" for name in rows[0])
        yield f"{step['step']:>4}{len(rows):>6}" + "".join(f"{sum(row[name] for row in rows):>16}" for name in rows[0])


def facts(parts: list[tuple[str, str]], reward: float | None) -> dict[str, bool]:
    """Return what is true of a completion. parts: in order, ("sampled", text) or ("observed", text)."""
    first = parts[0][1]
    calls = bool(find_calls(first, "hermes"))
    results = [text for kind, text in parts if kind == "observed" and "error" not in text]
    return {
        "calls": calls,
        "gets a number": bool(results),
        "right after it": bool(results) and reward == 1.0,
        "right without": not calls and reward == 1.0,
        "invents": not calls and "<tool_response>" in first,
        "multiplies": not calls and "<tool_response>" not in first and bool(re.search(r"\d ?[*x] ?\d", first)),
    }


config = RunConfig(
    name="calculator",
    microbatches=8,
    steps=12,
    probe_every=0,
    draft=DraftConfig(kind="none"),
    data=DataConfig(
        function="benchmarks.calculator:problems",
        prompts=8,
        max_prompt_tokens=256,
        chat_template_kwargs={"chat_template": TEMPLATE},
    ),
    environment=EnvironmentConfig(tools=("examples.tool_user:calculate",), answer_tokens=48),
    reward=RewardConfig(scorer="benchmarks.calculator:right"),
    rollout=RolloutOptions(group_size=4, max_new_tokens=80, turns=2, turn_tokens=40, draft_length=0),
    policy_optimizer=OptimizerConfig(learning_rate=2e-5, warmup_steps=2),
    eval=EvalConfig(every=0),
    checkpoint=CheckpointConfig(every=0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="directory of the run")
    print("\n".join(table(parser.parse_args().run)))


if __name__ == "__main__":
    main()
