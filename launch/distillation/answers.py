"""Generation of the policy's answers to training prompts, from which a draft learns."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from launch.data.responses import Answers, answers_of, join_answers
from launch.distillation.cost import Work
from launch.phases.long_phases import long_phase
from launch.setup.experiment import Experiment
from specjax.drafters import Drafter
from specjax.keys import seed_step
from specjax.rollout.host_turns import HostTurns
from specjax.rollout.make_generate import GenerateProgram, make_generate
from specjax.types import Params

# First step number for the noise of answers. Training steps count up from 0, measurements down from -1.
FIRST_STEP = -(2**30)

Keep = Callable[[Answers], None]


class AnswerGenerator:
    """Generator of the policy's answers to training prompts, at the run's longest draft length.

    count: total number of answers to generate. Each batch of prompts gives `experiment.sequences` of them.
    keep:  called with the answers of each batch.
    """

    def __init__(self, experiment: Experiment, count: int, keep: Keep | None = None) -> None:
        self._experiment, self._keep = experiment, keep
        # By whether they draft: all answers that are drafted are drafted by one drafter.
        self._programs: dict[bool, GenerateProgram | HostTurns] = {}
        self._phase = long_phase("answers", count // experiment.sequences, "batches")
        self._batches = experiment.train_batches()
        for _ in range(self._phase.done):
            next(self._batches)
        saved = self._phase.restore("answers")
        self._parts = [] if saved is None else [Answers(**saved)]
        self.work = Work(self._phase)
        if keep is not None and self._parts:
            keep(self._parts[0])

    def start_compiling(self, params: Params, drafter: Drafter) -> None:
        """Start to compile what generates answers with this drafter, if any are missing (`Program.start_compiling`)."""
        if self._phase.done < self._phase.total:
            prompts = self._experiment.abstract_prompts(self._experiment.config.data.prompts)
            self._program(drafter).start_compiling(params, prompts)

    def _program(self, drafter: Drafter) -> GenerateProgram | HostTurns:
        drafts, options = drafter.proposes, self._experiment.config.rollout
        if drafts not in self._programs:
            length = max(options.lengths) if drafts else 0
            config = replace(options, draft_length=length, draft_lengths=())
            # Draw from the policy that is trained, not from an 8-bit copy of it for rollouts.
            policy = replace(self._experiment.networks.policy, eight_bit=None, merged=False)
            functions = policy, drafter, config, self._experiment.mesh, self._experiment.rollout_fn
            self._programs[drafts] = make_generate(*functions)
        return self._programs[drafts]

    def generate(self, params: Params, drafter: Drafter, until: int) -> Answers:
        """Return the first `until` answers, including those of earlier processes. A batch's number keys its noise."""
        seed, per_batch = self._experiment.config.seed, self._experiment.sequences
        if self._phase.done * per_batch < until:
            generate = self._program(drafter)
            verified = rounds = 0
            with self._phase:
                while self._phase.done * per_batch < until:
                    with self.work.timed():
                        prompts = next(self._batches)
                        rollout = generate(params, prompts, seed_step(seed, FIRST_STEP + self._phase.done))
                        self._parts.append(answers_of(prompts, rollout))
                    if self._keep is not None:
                        self._keep(self._parts[-1])
                    generated = int(np.sum(rollout.lengths))
                    # The first token of each answer comes from the prefill, not from a verification.
                    verified, rounds = verified + generated - per_batch, rounds + int(np.sum(rollout.verifications))
                    self._phase.finish(
                        {"answers": vars(join_answers(self._parts)), "work": self.work.state},
                        tokens=generated,
                        note=f"acceptance length {verified / max(rounds, 1):.2f}",
                        program=drafter.__class__,
                        save=(self._phase.done + 1) * per_batch >= until,
                    )
        return join_answers(self._parts).first(until)
