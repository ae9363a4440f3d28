"""Answers of a policy to one prompt."""

import math
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from launch.data.batches import fixed_batches
from launch.data.problems import Problem
from launch.data.prompts import Prompt, read_prompt
from launch.data.tokenizers import Tokenizer
from launch.environments.parts import ENDINGS, conversation_text
from launch.errors import ConfigError
from launch.evaluation.sampler import Sampler
from launch.evaluation.streaming import stream_rounds
from launch.phases.compile_clock import CompileClock
from launch.phases.progress import Progress
from launch.predict.refusals import check_rollout
from launch.rewards.answers import before_stop
from launch.setup.experiment import Experiment
from specjax.keys import SeedStep
from specjax.parallel import processes
from specjax.parallel.mesh import batch_shards
from specjax.rollout.plan import RolloutConfig
from specjax.train.metrics import rollout_metrics
from specjax.types import Ending, Params, Prompts, Rollout


def given_problem(prompt: str) -> Problem:
    """Return the problem of a prompt: text, or the JSON of messages. Raises ConfigError if it is blank."""
    return Problem(prompt=read_prompt({"prompt": prompt}, "prompt", "--prompt"), answer="")


def as_asked(problem: Problem, tokenizer: Tokenizer) -> str:
    """Return the problem's prompt as the model is asked, with its special tokens, and the reference answer."""
    ids = tokenizer.chat(problem.prompt)
    text = tokenizer.with_special_tokens(ids)
    answer = f"\n\nreference answer: {problem.answer}" if problem.answer else ""
    return f"{problem.source or 'prompt'}, as the model is asked, in {len(ids)} tokens:\n\n{text}{answer}\n"


def answer_prompt(
    experiment: Experiment, params: Params, prompt: Prompt, samples: int, show: Callable[[str], None]
) -> str:
    """Show `samples` answers as text, without a stop string. Return one line on their speed and how they ended.

    A single answer is shown while it is generated, unless the run has its own rollout function or an environment.

    show: called with each piece of text.

    Raises ConfigError if the prompt is empty or too long.
    """
    config, sampler = experiment.config, Sampler(experiment, experiment.networks.drafter, samples, step=0)
    prompts = _asked(experiment, sampler, prompt, samples)
    if samples == 1 and config.rollout.function is None and experiment.environment_of is None:
        return _stream(experiment, params, prompts, sampler, show)
    with Progress("generation", samples, "answers", quiet=True) as progress:
        rollout, seconds = sampler.generate(params, prompts)
        progress.advance(samples)
    for text in _texts(experiment, rollout, samples):
        show(text + "\n\n")
    metrics, (stopped, endings) = rollout_metrics(rollout), processes.fetch((rollout.stopped, rollout.ending))
    cut = samples - int(np.sum(stopped[:samples]))
    ending = _ending(config.rollout, f"{cut} of {samples} answers " if cut else None)
    if experiment.environment_of is not None:
        counts = Counter(ENDINGS[Ending(each).name.lower()] for each in endings[:samples].tolist())
        ending = ", ".join(f"{text} ({count})" if samples > 1 else text for text, count in counts.items())
    return _summary(float(metrics["rollout/tokens"]), seconds, float(metrics["rollout/acceptance_length"]), ending)


class Answers:
    """Answers of an experiment's networks to one prompt at a time. Keeps its compiled programs.

    Prompts are padded, and numbers of samples rounded up, to powers of two, so that few programs compile.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._experiment, self._samplers = experiment, dict[int, Sampler]()

    def __call__(self, prompt: Prompt, samples: int, noise: SeedStep) -> list[str]:
        """Return `samples` answers. They depend only on the prompt and the noise, and not on how many are asked for.

        Raises ConfigError if the prompt is empty or too long, or the devices cannot hold so many samples.
        """
        experiment, rows = self._experiment, 1 << (samples - 1).bit_length()
        if rows not in self._samplers:
            self._samplers[rows] = Sampler(experiment, experiment.networks.drafter, rows)
        sampler = self._samplers[rows]
        prompts = _asked(experiment, sampler, prompt, samples)
        rollout, _ = sampler.generate(experiment.networks.params, prompts, noise)
        return _texts(experiment, rollout, samples)


def answer_text(experiment: Experiment, ids: list[int]) -> str:
    """Return the text of a completion before a stop string."""
    return before_stop(experiment.tokenizer.decode(ids), experiment.config.rollout.stop_strings)


def _texts(experiment: Experiment, rollout: Rollout, samples: int) -> list[str]:
    """Return the texts of the first `samples` completions; observed lines begin with "> "."""
    # Later rows belong to filler prompts, which pad the batch to a multiple of the data shards.
    tokens, lengths, sampled = processes.fetch((rollout.tokens, rollout.lengths, rollout.sampled))
    rows = [(tokens[row, :length].tolist(), sampled[row, :length]) for row, length in enumerate(lengths[:samples])]
    if experiment.environment_of is None:
        return [answer_text(experiment, ids) for ids, _ in rows]
    stop_strings = experiment.config.rollout.stop_strings
    return [conversation_text(experiment.tokenizer, ids, drawn.tolist(), stop_strings) for ids, drawn in rows]


def _asked(experiment: Experiment, sampler: Sampler, prompt: Prompt, samples: int) -> Prompts:
    """Return the prompt, padded to a power of two, or to data.max_prompt_tokens, with filler for other data shards.

    Raises ConfigError as `answer_prompt`.
    """
    problems = [Problem(prompt=prompt, answer="")]
    sampler.answer_on(problems)
    table = experiment.encode_prompts(problems)
    if table.dropped:
        raise ConfigError(f"prompt: must have 1 .. {table.max_length} tokens (data.max_prompt_tokens)")
    table = replace(table, width=min(1 << (table.width - 1).bit_length(), table.max_length))
    shards = batch_shards(experiment.mesh)
    check_rollout(experiment, sampler.rollout, (shards, table.width), {"samples": samples})
    (prompts,) = fixed_batches(table, shards)
    return prompts


def _stream(
    experiment: Experiment, params: Params, prompts: Prompts, sampler: Sampler, show: Callable[[str], None]
) -> str:
    """Show one answer piece by piece. Return its summary."""
    clock, start, shown, state = CompileClock(), time.perf_counter(), "", None
    held = max(map(len, experiment.tokenizer.stop_strings), default=1) - 1
    for state in stream_rounds(experiment, params, prompts, sampler.noise, sampler.rollout):
        text = answer_text(experiment, processes.fetch(state.tokens[0])[: int(state.emitted[0])].tolist())
        done = bool(state.done[0])
        # Hold back an incomplete character, trailing space and what may begin a stop string: the next tokens may change
        # them.
        settled = text if done else text.rstrip("\N{REPLACEMENT CHARACTER}")[: -held or None].rstrip()
        if done or settled.startswith(shown):
            show(settled[len(os.path.commonprefix([shown, settled])) :])
            shown = settled
    show("\n\n")
    assert state is not None
    seconds, tokens, rounds = time.perf_counter() - start - clock.lap(), int(state.emitted[0]), int(state.row_rounds[0])
    ending = _ending(sampler.rollout, None if bool(state.stopped[0]) else "")
    # The first token comes from the prefill of the prompt.
    return _summary(tokens, seconds, (tokens - 1) / rounds if rounds else math.nan, ending)


def _ending(rollout: RolloutConfig, cut: str | None) -> str:
    """Return how answers ended. cut: which of them were cut off; None if none was."""
    if cut is not None:
        return f"{cut}cut off at rollout.max_new_tokens = {rollout.max_new_tokens}"
    return "ended by a stop token" + " or a stop string" * bool(rollout.stop_strings)


def _summary(tokens: float, seconds: float, acceptance_length: float, ending: str) -> str:
    parts = [f"{tokens:.0f} tokens in {seconds:.2f} s ({tokens / seconds:.0f} tokens/s)"]
    if not math.isnan(acceptance_length):  # NaN for a completion of one token, which needs no verification
        parts.append(f"acceptance length {acceptance_length:.2f}")
    return ", ".join([*parts, ending])
