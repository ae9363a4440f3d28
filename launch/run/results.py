"""Results of a run: held-out accuracy before and after RL, and the speed-up of steps with drafts."""

from launch.comparison.closing import compare_steps, without_moments
from launch.console import console, wide_console
from launch.evaluation.sampler import Evaluate
from launch.phases.run_clock import run_part
from launch.run.logs import RunLogs
from launch.run.start import Start
from launch.setup.experiment import Experiment
from specjax.parallel import processes
from specjax.rewards import RewardFn
from specjax.types import TrainState


def record_results(
    experiment: Experiment, reward_fn: RewardFn, start: Start, state: TrainState, evaluate: Evaluate, logs: RunLogs
) -> TrainState:
    """Report held-out accuracy before and after RL, and the speed-up of the run's steps, where the recipe asks.

    Returns the state, after a comparison without its moments. Raises Stopped at a signal.
    """
    config = experiment.config
    if start.accuracy_before is not None:
        after = logs.timer.logged.get("eval/accuracy")
        if after is None:
            after, truncated = evaluate(state)
            logs.cut.evaluated(config.steps, truncated)
        console.print(f"held-out accuracy: {start.accuracy_before:.1%} before RL, {after:.1%} after")
        logs.events.record_result(config.steps, accuracy_before=start.accuracy_before, accuracy_after=after)
    if config.speedup.steps:
        # Nothing is kept of it: a run that is stopped compares again when it is resumed.
        state = without_moments(state)

        def compare() -> dict[str, float]:
            drafted = compare_steps(experiment, reward_fn, state, wide_console)
            measured = {"generation_speedup": drafted.generation_speedup, "step_speedup": drafted.step_speedup}
            ends = {"": 0, "_low": 1, "_high": 2}
            return {f"{name}{end}": value[i] for name, value in measured.items() for end, i in ends.items()}

        with run_part("comparison"):
            logs.events.record_result(config.steps, **processes.within(experiment.mesh, compare))
    return state
