"""Distil a draft from the policy's own answers, which are generated in chunks, with training between them."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice

import jax
import numpy as np

from launch.build.draft_vocabulary import most_frequent
from launch.build.experiment import Experiment
from launch.cli.compilation import CompileClock
from launch.cli.errors import ConfigError
from launch.data.responses import Answers, answers_of, join_answers
from specjax.drafters import Drafter, NoDrafter
from specjax.keys import seed_step
from specjax.parallel.mesh import batch_shards
from specjax.rollout.generate import make_generate
from specjax.train.distill import init_distill_state, make_distill_step
from specjax.train.optimizer import make_optimizer
from specjax.types import Params, Prompts, PyTree

# Times that launch.distill goes over the answers where the recipe names no steps.
PASSES = 4
# Of the noise of answers: steps of training count up from 0, measurements down from -1.
FIRST_STEP = -(2**30)

Report = Callable[[str], None]
Keep = Callable[[Answers], None]


@dataclass
class DistillationCost:
    """Wall-clock seconds of a distillation, compiling included, and the work done in them.

    compile_s:      the part of both that was compiling, or reading what was compiled before.
    answer_tokens:  tokens of all answers. trained_tokens: the same, as often as they were trained on.
    """

    generation_s: float = 0.0
    training_s: float = 0.0
    compile_s: float = 0.0
    answers: int = 0
    answer_tokens: int = 0
    steps: int = 0
    trained_tokens: int = 0


@dataclass(frozen=True)
class Distillation:
    """The distilled draft's parameters, the drafter they belong to, and the answers it learnt from.

    drafter: the run's own, or one of the vocabulary that the answers gave it.
    """

    drafter: Drafter
    draft: PyTree
    answers: Answers
    cost: DistillationCost


def check_distillation(experiment: Experiment, given: Answers | None = None) -> None:
    """Raise ConfigError where this run cannot distil a draft, before anything has been done."""
    config, options = experiment.config, experiment.config.distill
    if not experiment.networks.draft.has_params:
        raise ConfigError(f"draft.kind = {config.draft.kind}: has no parameters to distil, so distill.steps must be 0")
    experiment.train_batches()
    parts = batch_shards(experiment.mesh) * options.microbatches
    if options.batch_size % parts:
        raise ConfigError(
            f"distill.batch_size = {options.batch_size}: must be a multiple of distill.microbatches x mesh.data x "
            f"mesh.fsdp = {parts}"
        )
    fewest = _chunks(experiment)[0] * experiment.sequences if given is None else len(given)
    if options.batch_size > fewest:
        where = "of the first of distill.chunks" if given is None else "given"
        raise ConfigError(f"distill.batch_size = {options.batch_size}: must be at most {fewest}, the answers {where}")


def distill(
    experiment: Experiment,
    params: Params,
    report: Report,
    *,
    given: Answers | None = None,
    own_vocabulary: bool = False,
    trained: bool = False,
    keep: Keep | None = None,
) -> Distillation:
    """Train the draft of `params` on answers of the policy of `params`, which stays as it is.

    given:          answers to learn from instead of generating any.
    own_vocabulary: a reduced draft vocabulary becomes that of the most frequent tokens of the first answers; the draft
                    must be untrained.
    trained:        the draft of `params` has learnt already, though the recipe begins with random weights.
    keep:           called with each chunk of answers that has been generated, before anything is learnt from it.

    The first answers are generated without the draft where it is random, the others with it as it is by then; their law
    is the same.
    """
    config, cost, clock = experiment.config, DistillationCost(), CompileClock()
    answers, drafter, chunks = given, experiment.networks.drafter, _chunks(experiment) if given is None else []
    batches = enumerate(experiment.train_batches())
    known = trained or experiment.networks.draft.read_from is not None
    generator = _AnswerGenerator(experiment, drafter if known else NoDrafter(), report, cost, keep)
    if answers is None:
        answers = generator.answers(params, islice(batches, chunks[0]))
    if own_vocabulary:
        drafter = with_vocabulary(experiment, answers)
    planned = sum(chunks) * experiment.sequences if given is None else len(given)
    steps = config.distill.steps or -(-PASSES * planned // config.distill.batch_size)
    trainer = _DraftTrainer(experiment, drafter, params, steps, report, cost)
    if not known:
        generator = _AnswerGenerator(experiment, drafter, report, cost, keep)
    for number, rollouts in enumerate(chunks[1:], start=1):
        trainer.train(answers, steps * number // len(chunks))
        new = generator.answers(replace(params, draft=trainer.draft), islice(batches, rollouts))
        answers = join_answers([answers, new])
    trainer.train(answers, steps)
    cost.compile_s, cost.answers, cost.answer_tokens = clock.lap(), len(answers), len(answers.completions)
    return Distillation(drafter, trainer.draft, answers, cost)


def with_vocabulary(experiment: Experiment, answers: Answers) -> Drafter:
    """Return the run's drafter with a reduced vocabulary of the stop tokens and the most frequent of the answers'."""
    networks = experiment.networks
    if networks.draft.target_ids is None:
        return networks.drafter
    counts = np.bincount(answers.completions, minlength=networks.policy.vocab_size)
    ids = most_frequent(counts, experiment.config.rollout.stop_tokens, len(networks.draft.target_ids))
    return networks.draft.with_target_ids(ids).drafter


class _AnswerGenerator:
    """Generates the policy's answers to training prompts, with the drafter at the run's longest draft length."""

    def __init__(
        self, experiment: Experiment, drafter: Drafter, report: Report, cost: DistillationCost, keep: Keep | None
    ) -> None:
        self._seed, self._report, self._cost, self._keep = experiment.config.seed, report, cost, keep
        rollout = experiment.config.rollout
        length = 0 if isinstance(drafter, NoDrafter) else max(rollout.lengths)
        config = replace(rollout, draft_length=length, draft_lengths=())
        self._generate = make_generate(
            experiment.networks.policy, drafter, config, experiment.mesh, experiment.rollout_fn
        )

    def answers(self, params: Params, batches: Iterable[tuple[int, Prompts]]) -> Answers:
        """Answer batches of prompts; each comes with its number, which keys its noise."""
        start, parts, rounds = time.perf_counter(), [], 0
        for number, prompts in batches:
            rollout = self._generate(params, prompts, seed_step(self._seed, FIRST_STEP + number))
            parts.append(answers_of(prompts, rollout))
            rounds += int(np.sum(rollout.verifications))
        answers, seconds = join_answers(parts), time.perf_counter() - start
        self._cost.generation_s += seconds
        tokens = len(answers.completions)
        alpha = (tokens - len(answers)) / max(rounds, 1)
        if self._keep is not None:
            self._keep(answers)
        self._report(f"{len(answers)} answers of {tokens} tokens in {seconds:.1f} s, {alpha:.2f} tokens a round")
        return answers


class _DraftTrainer:
    """Trains the draft of `params` for up to `steps` steps."""

    def __init__(
        self,
        experiment: Experiment,
        drafter: Drafter,
        params: Params,
        steps: int,
        report: Report,
        cost: DistillationCost,
    ) -> None:
        config = experiment.config
        optimizer = make_optimizer(config.draft_optimizer, steps)
        self._policy, self._seed, self._rows = params.policy, config.seed, config.distill.batch_size
        self._report, self._cost = report, cost
        self._state = init_distill_state(params.draft, optimizer, experiment.mesh)
        self._step = make_distill_step(
            experiment.networks.policy,
            drafter,
            experiment.config.rollout.law,
            optimizer,
            experiment.mesh,
            microbatches=config.distill.microbatches,
            ladder=config.ladder,
            logit_chunk=config.logit_chunk,
        )

    @property
    def draft(self) -> PyTree:
        """Return the draft's parameters; the next step donates them."""
        return self._state.draft

    def train(self, answers: Answers, until: int) -> None:
        """Train on rows of `answers` up to step `until`, counted over all calls."""
        start, metrics = time.perf_counter(), None
        for number in range(self._cost.steps, until):
            batch = answers.draw(self._rows, self._seed, number)
            self._state, metrics = self._step(self._state, self._policy, batch)
            self._cost.trained_tokens += int(np.sum(batch.completion))
        self._cost.steps = until
        if metrics is not None:
            seen = {name: float(value) for name, value in metrics.items()}
            self._report(
                f"distillation step {until}: loss {seen['loss/draft']:.3f}, predicted acceptance "
                f"{seen['draft/predicted_acceptance']:.3f}"
            )
        jax.block_until_ready(self._state)
        self._cost.training_s += time.perf_counter() - start


def _chunks(experiment: Experiment) -> list[int]:
    """Return the number of rollouts in each chunk, the fewest in the first."""
    options = experiment.config.distill
    rollouts = -(-options.answers // experiment.sequences)
    chunks = min(options.chunks, rollouts)
    return [rollouts * (i + 1) // chunks - rollouts * i // chunks for i in range(chunks)]
