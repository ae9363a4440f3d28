"""Summary of a run before its first step: model, data, draft, devices and size of a step."""

from collections.abc import Iterator

import jax

from configs.schema import kind_of
from launch.distillation.trainer import PASSES
from launch.phases.progress import duration
from launch.predict.outlook import describe_memory
from launch.setup.experiment import Experiment
from specjax.parallel.mesh import batch_shards
from specjax.types import PyTree

LOOKED_UP = {"ngram": "sequence", "history": "prompt's other completions"}


def summarize(experiment: Experiment, continuing: bool) -> list[str]:
    """Return a line each about the model, the data, the draft, a teacher, the devices, a step and its memory.

    continuing: the run continues from a checkpoint, with the networks that it has trained.
    """
    config, data, rollout = experiment.config, experiment.config.data, experiment.config.rollout
    source = config.model.path or config.model.family or "random weights"
    origin = data.train or data.function or ""
    origin = origin if isinstance(origin, str) else ", ".join(origin)
    meshes = {"trains": experiment.mesh}
    if experiment.rollout_mesh is not experiment.mesh:
        meshes["generates"] = experiment.rollout_mesh
    return [
        f"model: {source}, {_describe_policy(experiment)}",
        f"data: {len(experiment.train_prompts.rows):,} prompts{f' of {origin}' if origin else ''} to train on, "
        f"{len(experiment.problems.held_out):,} held out",
        f"draft: {', '.join(_describe_draft(experiment, continuing))}; {_how_it_drafts(experiment, continuing)}",
        *_describe_teacher(experiment),
        "devices: " + "; ".join(f"{_devices(mesh)} {verb}" for verb, mesh in meshes.items()),
        f"step: {data.prompts} prompts x {rollout.group_size} samples = {experiment.sequences} sequences of up to "
        f"{experiment.prompt_width} + {rollout.max_new_tokens} tokens; {config.steps} step{'s' * (config.steps != 1)}; "
        f"learning rate {config.policy_optimizer.learning_rate:g}{' of the adapters' * config.lora.enabled}"
        f"{_describe_sharing(experiment)}",
        describe_memory(experiment),
    ]


def _describe_teacher(experiment: Experiment) -> Iterator[str]:
    """Yield a line about the teacher, if there is one."""
    options, teacher = experiment.config.teacher, experiment.teacher
    if teacher is None:
        return
    who = {"base": "the policy without its adapters", "self": "the policy itself"}.get(options.kind, options.path)
    dtype = options.weight_dtype or experiment.config.model.dtype
    size = "" if teacher.params is None else f", {_count(teacher.params)} in {dtype}"
    hint = {"none": "", "solution": "; it sees the worked solution", "group": "; it sees a correct answer of the group"}
    rewards = "with rewards" if options.rewards else "without rewards"
    yield (
        f"teacher: {who}{size}; {options.form} {options.divergence} divergence, weight {options.weight:g}, {rewards}"
        f"{hint[options.hint]}"
    )


def _describe_sharing(experiment: Experiment) -> str:
    """Return how many samples of a group share their prompt in the update, if any do."""
    config, shards = experiment.config, batch_shards(experiment.mesh)
    parts = shards * config.updates.minibatches * config.microbatches
    rows = config.trained_groups(config.data.prompts) * config.rollout.group_size // parts
    samples = config.sharing(experiment.networks.policy, rows, experiment.prompt_width)
    return f"; the update computes a prompt once for {samples} samples" if samples > 1 else ""


def _describe_policy(experiment: Experiment) -> str:
    """Return the size of the policy, its dtypes, and its adapters."""
    params, model, lora = experiment.networks.params, experiment.config.model, experiment.config.lora
    if not lora.enabled:
        return f"{_count(params.policy)}; computes in {model.dtype}, trained in {model.param_dtype}"
    size = f"rank {lora.rank}" if lora.path is None else lora.path
    merged = ", merged for rollouts" * lora.merged
    # The reference is the base. Fresh adapters begin there, adapters of files do not.
    pulls = lora.path is not None and experiment.config.loss.kl_coefficient > 0
    return (
        f"{_count(params.base)} frozen in {lora.base_dtype or model.dtype}; trains LoRA of {size}{merged}, "
        f"{_count(params.policy)} in float32"
        + "; KL is measured against the base without these adapters, and pulls back to it"
        * pulls
    )


def _describe_draft(experiment: Experiment, continuing: bool) -> Iterator[str]:
    """Yield what drafts, its size and where its weights come from."""
    options, draft = experiment.config.draft, experiment.networks.draft
    lookup = [] if options.lookup.kind == "none" else [f"lookup in the {LOOKED_UP[options.lookup.kind]}"]
    kind = [] if options.kind == "none" else [kind_of(options.kind).title]
    yield " and ".join([*kind, *lookup]) or "none"
    if draft.has_params:
        yield _count(draft.params)
        if continuing:
            yield "as the run has trained it"
        elif experiment.config.distill.steps:
            answers = experiment.config.distill.answers
            batches = -(-answers // experiment.sequences)
            # Nothing is timed yet.
            yield f"distilled before RL on {answers:,} answers ({batches:,} batches; minutes follow after the second)"
        else:
            yield "untrained" if draft.read_from is None else f"from {options.path or experiment.config.model.path}"


def _how_it_drafts(experiment: Experiment, continuing: bool) -> str:
    """Return when rollouts draft, and for an untrained draft what would help."""
    lengths, untrained = experiment.config.rollout.lengths, is_untrained(experiment) and not continuing
    several = ", ".join(map(str, lengths))
    advice = f"distill.steps = {offered_steps(experiment)} distils it first"
    if not any(lengths):
        return "drafting is off (rollout.draft_length = 0)"
    if len(lengths) == 1:
        in_vain = (
            f", most in vain at first: {advice}; or rollout.draft_lengths = (0, {several}) drafts only where it pays"
        )
        return f"every round drafts {several} tokens{in_vain if untrained else ''}"
    begins = ""
    if lengths[0] == 0 and not continuing:
        given, later = experiment.config.cost_table is not None, measures_costs_later(experiment)
        begins = "; begins without, while the first step measures acceptance"
        if not given:
            begins += ", and measures costs once drafts may pay" if later else "; measures costs before it"
    advice = f"; {advice} (minutes follow after the second step)" if untrained else ""
    return f"drafts one of {several} tokens, whichever is fastest by measured costs and acceptance{begins}{advice}"


def is_untrained(experiment: Experiment) -> bool:
    """Return whether the draft has random weights, and nothing trains them before the first step."""
    draft = experiment.networks.draft
    return draft.has_params and draft.read_from is None and not experiment.config.distill.steps


def measures_costs_later(experiment: Experiment) -> bool:
    """Return whether a new run takes its first steps without drafts, and costs of rounds are measured or read later.

    The first step has no acceptance to weigh costs with. An asynchronous run measures at its start: later, rollouts are
    under way on the devices that are timed.
    """
    config = experiment.config
    return config.rollout.lengths[0] == 0 and config.asynchronous.lag is None


def offered_steps(experiment: Experiment) -> int:
    """Return the steps of a distillation that passes over its answers as often as launch.distill."""
    distill = experiment.config.distill
    return max(PASSES * distill.answers // distill.batch_size, 1)


def next_look(experiment: Experiment, step_s: float) -> str:
    """Return when a draft that is not used is looked at again, and what distilling it before RL would take.

    step_s: seconds of a step. Generating answers and learning from them took as long as two steps with as many
            sequences, within a third (`make real`).
    """
    draft, schedule, distill = experiment.networks.draft, experiment.config.draft_training, experiment.config.distill
    if not draft.has_params:
        return "Each rollout is examined for what it would have drafted"
    if schedule.mode == "frozen":
        return f"The draft is measured again, at least once in {schedule.max_every} steps"
    seconds = 2 * distill.answers / experiment.sequences * step_s
    text = f"The draft is trained and measured again, at least once in {schedule.max_every} steps"
    if is_untrained(experiment):
        text += f". A run that distils it first with distill.steps = {offered_steps(experiment)} needs about "
        text += f"{duration(seconds)} for that; fewer answers (distill.answers = {distill.answers:,}) need less"
    return text


def _count(params: PyTree) -> str:
    count = sum(x.size for x in jax.tree.leaves(params))
    number = f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M" if count >= 1e6 else f"{count:,}"
    return f"{number} parameters"


def _devices(mesh: jax.sharding.Mesh) -> str:
    axes = " ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
    return f"{mesh.size} x {mesh.devices.flat[0].device_kind}{f' ({axes})' if axes else ''}"
