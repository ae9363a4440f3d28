"""Distillation of a draft from the policy's answers. Answers are generated in chunks; each chunk is then trained on."""

from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from launch.data.responses import Answers
from launch.distillation.answers import AnswerGenerator, Keep
from launch.distillation.cost import DistillationCost, Work
from launch.distillation.teacher_outputs import TeacherOutputCache, picks_of_step
from launch.errors import ConfigError
from launch.phases.long_phases import long_phase
from launch.predict.refusals import check_rollout
from launch.setup.checks import check_distillation_batch
from launch.setup.draft_vocabulary import most_frequent
from launch.setup.experiment import Experiment
from specjax.adapters import joined
from specjax.drafters import Drafter, NoDrafter
from specjax.parallel.mesh import batch_shards
from specjax.train.draft.distill import init_distill_state, make_distill_step
from specjax.train.optimizer import make_optimizer
from specjax.types import Params, PyTree

# Number of passes over the answers if the recipe does not set distill.steps.
PASSES = 4


@dataclass(frozen=True)
class Distillation:
    """Result of a distillation.

    Attributes:
        drafter: the run's drafter, or one with a reduced vocabulary chosen from the answers.
        draft:   its distilled parameters.
        answers: answers that the draft was trained on.
        cost:    seconds and amount of work.
    """

    drafter: Drafter
    draft: PyTree
    answers: Answers
    cost: DistillationCost


def check_distillation(experiment: Experiment, given: Answers | None = None) -> None:
    """Raise ConfigError if this run cannot distil a draft. given: answers to train on instead of generated ones."""
    config, options = experiment.config, experiment.config.distill
    if not experiment.networks.draft.has_params:
        raise ConfigError(f"draft.kind = {config.draft.kind}: has no parameters to distil; distill.steps must be 0")
    prompts, rows = config.data.prompts, {"rollout.group_size": config.rollout.group_size}
    check_rollout(experiment, config.rollout, (prompts, experiment.prompt_width), {"data.prompts": prompts, **rows})
    experiment.train_batches()
    check_distillation_batch(config, batch_shards(experiment.mesh))
    available = _chunks(experiment)[0] * experiment.sequences if given is None else len(given)
    if options.batch_size > available:
        source = "the answers of distill.answers, in whole rollouts" if given is None else "the number of given answers"
        raise ConfigError(f"distill.batch_size = {options.batch_size}: must be at most {available}, {source}")


def distill(
    experiment: Experiment,
    params: Params,
    *,
    given: Answers | None = None,
    choose_vocabulary: bool = False,
    trained: bool = False,
    keep: Keep | None = None,
    generator: AnswerGenerator | None = None,
) -> Distillation:
    """Train the draft of `params` on answers of the policy of `params`. The policy does not change.

    The first chunk of answers is generated without the draft if the draft is random, later chunks with the draft as
    trained so far. Both have the same distribution. Raises Stopped at a signal.

    Args:
        experiment:        the run.
        params:            parameters of policy and draft.
        given:             answers to train on. None: generate them.
        choose_vocabulary: choose a reduced draft vocabulary from the most frequent tokens of the first answers. The
                           draft must be untrained.
        trained:           the draft of `params` is trained, even if the recipe starts from random weights.
        keep:              called with the answers of each batch of prompts.
        generator:         `answer_generator`, which may be compiling. None: make it.
    """
    rows = experiment.config.distill.batch_size
    drafter, trainer, answers = experiment.networks.drafter, None, given
    # Numbers of answers, given or generated so far, at the end of each chunk.
    counts = [n * experiment.sequences for n in accumulate(_chunks(experiment))] if given is None else [len(given)]
    steps = experiment.config.distill.steps or -(-PASSES * counts[-1] // rows)
    if given is None and generator is None:
        generator = answer_generator(experiment, keep)
    for number, count in enumerate(counts, start=1):
        if generator is not None:
            generating_drafter = first_drafter(experiment, trained) if trainer is None else drafter
            draft = params.draft if trainer is None else trainer.draft
            answers = generator.generate(replace(params, draft=draft), generating_drafter, count)
        assert answers is not None
        if trainer is None:
            if choose_vocabulary:
                drafter = with_vocabulary(experiment, answers)
            trainer = DraftTrainer(experiment, drafter, params, steps)
            if generator is not None and count < counts[-1]:
                generator.start_compiling(params, drafter)
        trainer.train(answers, steps * number // len(counts))
    assert trainer is not None and answers is not None
    generating, training = Work() if generator is None else generator.work, trainer.work
    cost = DistillationCost(
        generation_s=generating.seconds,
        training_s=training.seconds,
        compile_s=generating.compile_s + training.compile_s,
        answers=len(answers),
        answer_tokens=len(answers.completions),
        steps=steps,
        trained_tokens=training.tokens,
    )
    return Distillation(drafter, trainer.draft, answers, cost)


def answer_generator(experiment: Experiment, keep: Keep | None = None) -> AnswerGenerator:
    """Return the generator of all answers that a distillation learns from."""
    return AnswerGenerator(experiment, sum(_chunks(experiment)) * experiment.sequences, keep)


def first_drafter(experiment: Experiment, trained: bool = False) -> Drafter:
    """Return what drafts the first answers: nothing if the draft is random. trained: as in `distill`."""
    drafts = trained or experiment.networks.draft.read_from is not None
    return experiment.networks.drafter if drafts else NoDrafter()


def with_vocabulary(experiment: Experiment, answers: Answers) -> Drafter:
    """Return the run's drafter with a reduced vocabulary chosen from the answers: stop tokens and most frequent tokens.

    A drafter with the policy's full vocabulary is returned unchanged.
    """
    networks = experiment.networks
    if networks.draft.target_ids is None:
        return networks.drafter
    counts = np.bincount(answers.completions, minlength=networks.policy.vocab_size)
    ids = most_frequent(counts, experiment.tokenizer.stop_tokens, len(networks.draft.target_ids))
    return networks.draft.with_target_ids(ids).drafter


class DraftTrainer:
    """Trainer of the draft of `params`. steps: total number of steps, for the learning-rate schedule."""

    def __init__(self, experiment: Experiment, drafter: Drafter, params: Params, steps: int) -> None:
        config, policy, mesh = experiment.config, experiment.networks.policy, experiment.mesh
        rows, microbatches = config.distill.batch_size, config.distill.microbatches
        optimizer = make_optimizer(config.draft_optimizer, steps)
        self._weights, self._seed, self._rows = joined(params).policy, config.seed, rows
        self._phase = long_phase("distillation", steps, "steps")
        self.work = Work(self._phase)
        self._stride, self._started = drafter.stride, set[tuple[int, int]]()
        self._state = self._phase.restore("trainer", init_distill_state(params.draft, optimizer, mesh))
        budget, ladder = config.rollout.max_new_tokens, config.ladder
        self._teacher = TeacherOutputCache(
            policy, mesh, self._weights, rows, budget, microbatches=microbatches, ladder=ladder
        )
        options = {"microbatches": microbatches, "logit_chunk": config.logit_chunk}
        self._step = make_distill_step(policy, drafter, config.rollout.law, optimizer, mesh, **options)

    @property
    def draft(self) -> PyTree:
        """The draft's parameters, valid until the next step, which donates them."""
        return self._state.draft

    def train(self, answers: Answers, until: int) -> None:
        """Train on batches drawn from `answers` until step `until`, counted over all calls and processes.

        `answers` must begin with the answers of earlier calls.
        """
        if self._phase.done >= self._phase.total:
            return
        # Include chunks that earlier processes trained on: the same batches give bit-identical outputs.
        with self.work.timed():
            self._teacher.extend(answers)
        if self._phase.done >= until:
            return
        with self._phase:
            with self.work.timed():
                self._start_compiling(answers, until)
            for number in range(self._phase.done, until):
                with self.work.timed():
                    picks = picks_of_step(answers.lengths, self._rows, self._seed, number)
                    batch = self._teacher.batch(answers, picks, self._stride, number // (len(answers) // self._rows))
                    self._state, metrics = self._step(self._state, self._weights, batch)
                    loss, acceptance = float(metrics["loss/draft"]), float(metrics["draft/predicted_acceptance"])
                tokens = int(np.sum(batch.sequences.completion))
                self.work.tokens += tokens
                note = f"loss {loss:.3f}, predicted acceptance {acceptance:.3f}"
                state = {"trainer": self._state, "work": self.work.state}
                sizes = self._teacher.sizes(answers, picks)
                self._phase.finish(state, tokens=tokens, note=note, program=sizes, save=number + 1 == until)

    def _start_compiling(self, answers: Answers, until: int) -> None:
        """Start to compile the step for the sizes of the batches of a pass, in the order in which they come."""
        for number in range(self._phase.done, min(until, self._phase.done + len(answers) // self._rows)):
            picks = picks_of_step(answers.lengths, self._rows, self._seed, number)
            if (sizes := self._teacher.sizes(answers, picks)) not in self._started:
                self._started.add(sizes)
                self._step.start_compiling(
                    self._state, self._weights, self._teacher.batch(answers, picks, self._stride)
                )


def _chunks(experiment: Experiment) -> list[int]:
    """Return the number of rollouts in each chunk. The first has the fewest, but enough for a batch."""
    options, sequences = experiment.config.distill, experiment.sequences
    rollouts, rollouts_of_batch = -(-options.answers // sequences), -(-options.batch_size // sequences)
    chunks = min(options.chunks, max(rollouts // rollouts_of_batch, 1))
    return [rollouts * (i + 1) // chunks - rollouts * i // chunks for i in range(chunks)]
