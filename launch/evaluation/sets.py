"""Evaluation of sets of problems: load, sample, score and report them one after the other."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from rich.console import Console

from configs.schema import RunConfig
from launch.data.batches import PromptTable, fixed_batches, prompts_per_batch
from launch.data.json_lines import JsonLinesWriter
from launch.data.problems import Problem
from launch.data.tokenizers import Tokenizer
from launch.environments.parts import conversation_record
from launch.errors import ConfigError
from launch.evaluation.options import EvaluateArgs
from launch.evaluation.report import print_set, set_report
from launch.evaluation.sampler import Sampled, Sampler, join_sampled
from launch.evaluation.statistics import INTERVAL
from launch.phases.long_phases import long_phase
from launch.predict.refusals import check_rollout
from launch.rewards.reward_fn import final_answers, make_pool, scoring_of
from launch.rewards.thinking import describe_thinking
from launch.setup.experiment import Experiment
from launch.setup.problems import build_problems, load_problems
from specjax.rewards import compiled_reward
from specjax.types import Ending, Params

HELD_OUT = "held-out"


def load_sets(config: RunConfig, files: Sequence[str]) -> dict[str, list[Problem]]:
    """Return the problems of each file, by path. Without files, return the recipe's held-out problems."""
    if files:
        return {path: load_problems(path, config, "files") for path in files}
    held_out = config.data.held_out
    if held_out is None:
        return {HELD_OUT: build_problems(config).held_out}
    return {HELD_OUT: load_problems(held_out, config, "data.held_out")}


def prompt_tables(
    experiment: Experiment, sets: dict[str, list[Problem]], count: int | None, console: Console
) -> dict[str, PromptTable]:
    """Return the first `count` usable prompts of each set (None: all). Raise ConfigError if a set has none."""
    tables = {}
    for name, problems in sets.items():
        table = experiment.encode_prompts(problems)
        if not table.rows:
            raise ConfigError(
                f"{name}: must have a prompt of 1 .. {table.max_length} tokens (data.max_prompt_tokens); has none"
            )
        if table.dropped:
            console.print(f"{name}: {table.dropped} prompts dropped: empty or over {table.max_length} tokens")
        tables[name] = table if count is None else table.first(count)
    # One width, so that all sets share a program.
    width = max(table.width for table in tables.values())
    return {name: replace(table, width=width) for name, table in tables.items()}


def evaluate_sets(
    experiment: Experiment,
    params: Params,
    sets: dict[str, list[Problem]],
    args: EvaluateArgs,
    console: Console,
) -> dict[str, Any]:
    """Sample, score, save and print each set. Return the results for the JSON file. Raises Stopped at a signal."""
    config, tables = experiment.config, prompt_tables(experiment, sets, args.prompts, console)
    sample = Sampler(experiment, experiment.networks.drafter, args.samples)
    completions = None if args.save is None else JsonLinesWriter("save", args.save)
    largest = max(len(table.rows) for table in tables.values())
    batch_size = prompts_per_batch(experiment.sequences, args.samples, largest, experiment.mesh)
    shape = batch_size, next(iter(tables.values())).width
    check_rollout(experiment, sample.rollout, shape, {"samples": args.samples, "data.prompts": batch_size})
    if (thinking := describe_thinking(config, experiment.tokenizer, next(iter(sets.values())))) is not None:
        console.print(thinking)
    reports = []
    pool = make_pool(config)
    with pool or nullcontext():
        for number, (name, table) in enumerate(tables.items(), start=1):
            score = compiled_reward(scoring_of(config.reward, pool)(sets[name], experiment.tokenizer))
            sample.answer_on(sets[name])
            batches = fixed_batches(table, batch_size)
            with long_phase(f"evaluation of set {number}", len(batches), "batches") as phase:
                saved = phase.restore("sampled")
                sampled = [] if saved is None else [Sampled(**saved)]
                for prompts in batches[phase.done :]:
                    sampled.append(sample(params, score, prompts))
                    state = {"sampled": join_sampled(sampled)._asdict()}
                    phase.finish(state, tokens=int(np.sum(sampled[-1].lengths)))
            final_answer = final_answers(config, experiment.tokenizer, sets[name])
            if completions is not None:
                for part in sampled:
                    completions.append(completion_records(name, part, experiment.tokenizer, final_answer))
            if final_answer is None and args.larger_k:
                console.print(f"no majority@k: reward.scorer = {config.reward.scorer} has no function final_answer")
            report = set_report(name, sets[name], sampled, args.samples, args.larger_k, final_answer)
            reports.append(report)
            print_set(report, sample.draft_length, console)
    return {
        "draft_length": sample.draft_length,
        "law": asdict(config.rollout.law),
        "scorer": config.reward.scorer,
        "intervals": INTERVAL,
        "sets": [report.to_json() for report in reports],
    }


def completion_records(
    name: str, sampled: Sampled, tokenizer: Tokenizer, final_answer: Callable[[Sequence[int], int], str | None] | None
) -> Iterator[dict[str, Any]]:
    """Yield one JSON object per completion, in the format of `--save`.

    `completion` is what the policy wrote, as scorers get it. With an environment there are the fields of
    `conversation_record` too.
    """
    drawn = sampled.drawn()
    for row, value in enumerate(sampled.value.tolist()):
        ids, problem, scored = sampled.tokens[row, drawn[row]].tolist(), int(sampled.ids[row]), math.isfinite(value)
        # The extraction has no time limit: only completions that were scored within it.
        extracted = final_answer(ids, problem) if final_answer is not None and scored else None
        record = {
            "set": name,
            "id": problem,
            "completion": tokenizer.decode(ids),
            "extracted": None if extracted is None else str(extracted),
            "reward": value if scored else None,
        }
        if (ending := int(sampled.ending[row])) != Ending.GOING:
            whole, length = sampled.tokens[row], int(sampled.lengths[row])
            parts = whole[:length].tolist(), sampled.sampled[row, :length].tolist()
            result = ending, int(sampled.turns[row]), float(sampled.returns[row])
            record |= conversation_record(tokenizer, *parts, *result)
        yield record
