"""Distillation of a draft from the policy's answers. Answers are generated in chunks; the draft trains after each."""

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

# Passes over the answers if the recipe does not set distill.steps.
PASSES = 4
# First step that keys the noise of answers. Training steps count up from 0, measurements down from -1.
FIRST_STEP = -(2**30)

Report = Callable[[str], None]
Keep = Callable[[Answers], None]


@dataclass
class DistillationCost:
    """Wall time of a distillation and the work done in it.

    Attributes:
        generation_s:   seconds of generating answers, including compiling.
        training_s:     seconds of training, including compiling.
        compile_s:      seconds of both spent compiling or reading the compile cache.
        answers:        number of answers.
        answer_tokens:  tokens of all answers.
        steps:          training steps.
        trained_tokens: answer tokens trained on, counted once per use.
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
    """Result of a distillation.

    Attributes:
        drafter: the run's drafter, or one with a reduced vocabulary chosen from the answers.
        draft:   its distilled parameters.
        answers: answers that it was trained on.
        cost:    seconds and amounts of work.
    """

    drafter: Drafter
    draft: PyTree
    answers: Answers
    cost: DistillationCost


def check_distillation(experiment: Experiment, given: Answers | None = None) -> None:
    """Raise ConfigError if this run cannot distil a draft. given: answers to train on instead of generated ones."""
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
    available = _chunks(experiment)[0] * experiment.sequences if given is None else len(given)
    if options.batch_size > available:
        source = "answers in the first of distill.chunks" if given is None else "given answers"
        raise ConfigError(
            f"distill.batch_size = {options.batch_size}: must be at most {available}, the number of {source}"
        )


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
    """Train the draft of `params` on answers of the policy of `params`; the policy does not change.

    A random draft is not used for the first chunk of answers. Later chunks are generated with the draft as trained so
    far. The distribution of the answers is the same either way.

    Args:
        experiment:     the run.
        params:         parameters of policy and draft.
        report:         called with each line of progress.
        given:          answers to train on. None: generate them.
        own_vocabulary: choose a reduced draft vocabulary from the most frequent tokens of the first answers. The draft
                        must be untrained.
        trained:        the draft of `params` is trained, though the recipe starts from random weights.
        keep:           called with each chunk of generated answers, before training on it.
    """
    config, cost, clock = experiment.config, DistillationCost(), CompileClock()
    answers, drafter, chunks = given, experiment.networks.drafter, _chunks(experiment) if given is None else []
    batches = enumerate(experiment.train_batches())
    can_draft = trained or experiment.networks.draft.read_from is not None
    generator = _AnswerGenerator(experiment, drafter if can_draft else NoDrafter(), report, cost, keep)
    if answers is None:
        answers = generator.answers(params, islice(batches, chunks[0]))
    if own_vocabulary:
        drafter = with_vocabulary(experiment, answers)
    total_answers = sum(chunks) * experiment.sequences if given is None else len(given)
    steps = config.distill.steps or -(-PASSES * total_answers // config.distill.batch_size)
    trainer = _DraftTrainer(experiment, drafter, params, steps, report, cost)
    if not can_draft:
        generator = _AnswerGenerator(experiment, drafter, report, cost, keep)
    for number, rollouts in enumerate(chunks[1:], start=1):
        trainer.train(answers, steps * number // len(chunks))
        new_answers = generator.answers(replace(params, draft=trainer.draft), islice(batches, rollouts))
        answers = join_answers([answers, new_answers])
    trainer.train(answers, steps)
    cost.compile_s, cost.answers, cost.answer_tokens = clock.lap(), len(answers), len(answers.completions)
    return Distillation(drafter, trainer.draft, answers, cost)


def with_vocabulary(experiment: Experiment, answers: Answers) -> Drafter:
    """Return the run's drafter with its reduced vocabulary chosen again: stop tokens and the answers' most frequent.

    A drafter with the policy's vocabulary is returned unchanged.
    """
    networks = experiment.networks
    if networks.draft.target_ids is None:
        return networks.drafter
    counts = np.bincount(answers.completions, minlength=networks.policy.vocab_size)
    ids = most_frequent(counts, experiment.config.rollout.stop_tokens, len(networks.draft.target_ids))
    return networks.draft.with_target_ids(ids).drafter


class _AnswerGenerator:
    """Generator of the policy's answers to training prompts, at the run's longest draft length."""

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
        """Return answers to numbered batches of prompts. The number of a batch keys its noise."""
        start, parts, rounds = time.perf_counter(), [], 0
        for number, prompts in batches:
            rollout = self._generate(params, prompts, seed_step(self._seed, FIRST_STEP + number))
            parts.append(answers_of(prompts, rollout))
            rounds += int(np.sum(rollout.verifications))
        answers, seconds = join_answers(parts), time.perf_counter() - start
        self._cost.generation_s += seconds
        tokens = len(answers.completions)
        acceptance_length = (tokens - len(answers)) / max(rounds, 1)
        if self._keep is not None:
            self._keep(answers)
        self._report(
            f"generated {len(answers)} answers ({tokens} tokens) in {seconds:.1f} s, "
            f"acceptance length {acceptance_length:.2f}"
        )
        return answers


class _DraftTrainer:
    """Trainer of the draft of `params`. steps: total number of steps, for the learning-rate schedule."""

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
        """Return the draft's parameters. They are valid until the next step, which donates them."""
        return self._state.draft

    def train(self, answers: Answers, until: int) -> None:
        """Train on batches drawn from `answers` until step `until`, counted over all calls."""
        start, metrics = time.perf_counter(), None
        for number in range(self._cost.steps, until):
            batch = answers.draw(self._rows, self._seed, number)
            self._state, metrics = self._step(self._state, self._policy, batch)
            self._cost.trained_tokens += int(np.sum(batch.completion))
        self._cost.steps = until
        if metrics is not None:
            loss, acceptance = float(metrics["loss/draft"]), float(metrics["draft/predicted_acceptance"])
            self._report(f"distillation step {until}: loss {loss:.3f}, predicted acceptance {acceptance:.3f}")
        jax.block_until_ready(self._state)
        self._cost.training_s += time.perf_counter() - start


def _chunks(experiment: Experiment) -> list[int]:
    """Return the number of rollouts in each chunk; the first chunk has the fewest."""
    options = experiment.config.distill
    rollouts = -(-options.answers // experiment.sequences)
    chunks = min(options.chunks, rollouts)
    return [rollouts * (i + 1) // chunks - rollouts * i // chunks for i in range(chunks)]
