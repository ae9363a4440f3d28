"""Faults in numbers: values out of range, and sizes that no machine can hold."""

import importlib
import inspect
import math
import pkgutil
import random
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import benchmarks.bench
import benchmarks.simulation
import configs.schema
import launch
import models
import specjax
from configs.schema import RolloutOptions
from launch.cli import paths
from launch.errors import ConfigError
from specjax.options import Options, alternatives
from specjax.parallel.memory import check_memory, device_memory, growing, peak_gib
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.quantization import project, quantize
from specjax.rollout.plan import ChosenConfig
from specjax.sampling import SamplingLaw, process_logits
from specjax.types import EightBit
from tests.faults import fuzz_numbers
from tests.faults.fuzz_numbers import Case
from tests.refusals import assert_refused, refuses

NAMES = ("Config", "Args", "Options", "Scaling", "Law", "Preset")


def every_class() -> set[type]:
    """Return all classes that the packages define."""
    modules = set()
    for package in (specjax, models, configs.schema, launch, benchmarks.bench, benchmarks.simulation):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.startswith("benchmarks.bench.peers."):
                modules.add(importlib.import_module(found.name))
    classes = {kind for module in modules for _, kind in inspect.getmembers(module, inspect.isclass)}
    return {kind for kind in classes if kind.__module__ in {module.__name__ for module in modules}}


OPTIONS = [kind for kind in every_class() if is_dataclass(kind) and issubclass(kind, Options)]
OPTIONS = sorted(OPTIONS, key=lambda kind: kind.__name__)


def numbers(hint: Any) -> list[Any]:
    """Return the annotations of all numbers in a field's annotation."""
    if get_origin(hint) is Annotated or hint in (int, float):
        return [hint]
    nested = alternatives(hint) if len(alternatives(hint)) > 1 else get_args(hint) if get_origin(hint) is tuple else ()
    return [found for each in nested for found in numbers(each)]


# (class, field, annotation of a number), for every number in every field of every class of options.
NUMBERS = [
    (kind, field.name, hint)
    for kind in OPTIONS
    if kind is not ChosenConfig  # made by the rollout itself, with one traced field more than its base
    for field in fields(kind)
    for hint in numbers(get_type_hints(kind, include_extras=True)[field.name])
]


# Values of fields without a default, if 2 is not valid for them.
APART = {"high_freq_factor": 4.0, "draft_lengths": (1,)}


def valid(kind: type) -> Any:
    """Return an instance with default values, and 2 or a similar value for fields without a default."""
    hints = get_type_hints(kind, include_extras=True)
    required = [field for field in fields(kind) if MISSING is field.default is field.default_factory]
    return kind(**{field.name: APART.get(field.name) or some(hints[field.name]) for field in required})


def some(hint: Any) -> Any:
    """Return a value that the annotation accepts."""
    if get_origin(hint) is tuple:
        return (some(get_args(hint)[0]),)
    if numbers(hint):
        return get_args(hint)[0](2)
    return valid(hint) if is_dataclass(hint) else Path("x") if hint is Path else "x"


def nested(own: Any, hint: Any, value: object) -> object:
    """Return the value nested in as many tuples as the field's annotation has."""
    if own is hint:
        return value
    if own is str:
        return "x"
    if get_origin(own) is tuple:
        return tuple(nested(each, hint, value) for each in get_args(own) if each is not Ellipsis)
    return next(nested(each, hint, value) for each in alternatives(own) if hint in numbers(each))


def wrong(hint: Any) -> list[object]:
    """Return values that no field with this annotation accepts."""
    kind, lower, upper = get_args(hint)
    beyond = [lower.limit - 1, 2 * upper.limit + 1, *([lower.limit] * (lower.relation == "above"))]
    beyond += [upper.limit] * (upper.relation == "below")
    large = [math.nan, math.inf, -math.inf, 1e31, 2**63, -(2**63), 10**5000]
    return [*beyond, *large, True, "2", [2], *([2.5] if kind is int else [])]


def test_row_20_every_number_has_a_range() -> None:
    lower, upper = {"at least", "above", "0 or at least"}, {"at most", "below"}
    for kind, name, hint in NUMBERS:
        relations = [bound.relation for bound in get_args(hint)[1:]]
        assert len(relations) == 2 and relations[0] in lower and relations[1] in upper, f"{kind.__name__}.{name}"
        assert all(math.isfinite(bound.limit) for bound in get_args(hint)[1:])


def test_row_20_every_class_with_numbers_checks_them() -> None:
    kinds = (kind for kind in every_class() if is_dataclass(kind) and kind.__name__.endswith(NAMES))
    unchecked = {kind.__name__ for kind in kinds if not issubclass(kind, Options)}
    assert unchecked == {"NoOptions", "ReportArgs"} and len(OPTIONS) > 30 and len(NUMBERS) > 200


@pytest.mark.parametrize("kind", OPTIONS, ids=lambda kind: kind.__name__)
def test_row_20_numbers_out_of_range_are_refused(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind is ChosenConfig:
        return
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    monkeypatch.setattr(paths, "saved_steps", lambda directory: [2])
    made, hints = valid(kind), get_type_hints(kind, include_extras=True)
    for name, hint in ((name, hint) for each, name, hint in NUMBERS if each is kind):
        takes_text = "str" in str(hints[name])
        for value in (value for value in wrong(hint) if not (takes_text and isinstance(value, str))):
            with refuses(f"{name} = ...must be "):
                replace(made, **{name: nested(hints[name], hint, value)})


def test_row_22_temperatures_that_overflow_are_refused() -> None:
    for temperature in (1e-38, 1e-300, 9e-5, -0.1, 1e5):
        with refuses(f"temperature = {temperature}: ...0...0.0001...10000"):
            SamplingLaw(temperature=temperature)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "law", [{"temperature": 1e-4}, {"top_p": 1e-6}, {"min_p": 1.0}, {"top_k": 1}, {"temperature": 1e4}]
)
def test_row_22_laws_at_their_bounds_are_distributions(law: dict[str, Any], dtype: str) -> None:
    logits = jnp.linspace(-3e4, 3e4, 64, dtype=dtype).reshape(2, 32)
    log_p = process_logits(logits, SamplingLaw(**law))
    assert not jnp.any(jnp.isnan(log_p))
    assert jnp.allclose(jnp.sum(jnp.exp(log_p), axis=-1), 1.0, atol=1e-5)


@pytest.mark.parametrize("case", random.Random(5).sample([*fuzz_numbers.cases()], 60), ids=lambda case: str(case)[:80])
def test_row_20_hostile_numbers_are_accepted_or_refused(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with fuzz_numbers.stubbed():
        assert not fuzz_numbers.failed(result := fuzz_numbers.outcome(case)), result


LARGE = 2**30


@pytest.mark.parametrize(
    ("program", "path", "said"),
    [
        ("train", "rollout.group_size", "caches"),
        ("train", "rollout.max_new_tokens", "the memory of the history lookup"),
        ("train", "eval.samples", "caches"),
        ("train", "draft_training.replay", "lookup and replay"),
        ("train", "draft.lookup.kept", "the memory of the history lookup"),
        ("train", "model.architecture.hidden_size", "parameters"),
        ("train", "model.architecture.intermediate_size", "parameters"),
        ("train", "model.architecture.vocab_size", "parameters"),
        ("train", "draft.intermediate_size", "parameters"),
        ("distill", "rollout.group_size", "caches"),
        ("compare", "rollout.max_new_tokens", "the memory of the history lookup"),
        ("diagnose", "rollout.max_new_tokens", "caches"),
        ("evaluate", "samples", "caches"),
        ("generate", "samples", "caches"),
        ("bench", "contexts", "caches"),
    ],
)
def test_row_20_sizes_that_no_machine_holds_are_refused(program: str, path: str, said: str) -> None:
    own = "." not in path
    case = Case(program, path, str(LARGE), in_recipe=not own)
    field = path.rpartition(".")[2] if said == "parameters" else path
    with fuzz_numbers.stubbed(), pytest.raises(ConfigError) as caught:
        fuzz_numbers.run(case)
    # Others say what else such a size would break.
    assert_refused(caught.value.args[0], f"{field} = {LARGE}: ...GiB...GiB...{said}")


def test_row_20_the_part_and_the_option_that_reduces_it_are_named() -> None:
    mesh = make_mesh(MeshConfig(data=2))
    present = device_memory(mesh)
    check_memory([growing("small", present // 2, {"one": 1}), growing("large", present // 2, {"two": 2})], mesh)
    parts = growing("small", present // 3, {"one": 5}), growing("large", present, {"two": 2, "three": 3}, "four more")
    with refuses("three = 3: ...GiB...GiB...large...less...four more"):
        check_memory(parts, mesh)


def test_row_20_a_draft_longer_than_the_completion_is_refused() -> None:
    for name, value in {"draft_length": 41, "draft_lengths": (0, 41)}.items():
        with refuses(f"{name} = ...41...max_new_tokens = 40"):
            RolloutOptions(max_new_tokens=40, **{name: value})


def test_row_20_a_batch_larger_than_the_prompts_is_refused_before_it_is_timed() -> None:
    with fuzz_numbers.stubbed(), refuses("data.prompts = 1000: ...84", ConfigError):
        fuzz_numbers.run(Case("compare", "data.prompts", "1000", in_recipe=False))


@pytest.mark.parametrize("to", get_args(EightBit))
def test_row_44_a_copy_in_eight_bits_is_finite_whatever_its_largest_weight(to: EightBit) -> None:
    largest = [0.0, 1e-45, 1e-40, 1.2e-38, 1e-37, 1e-36, 1e-35, 1e-30, 1e-6, 1.0, 1e30, 3.4e38]
    kernel = jnp.array([largest, [-0.3 * x for x in largest]], jnp.float32)
    for made in (quantize(kernel, 1, to), jax.jit(lambda kernel: quantize(kernel, 1, to))(kernel)):
        values = made.values.astype(jnp.float32)
        assert np.isfinite(values).all() and np.isfinite(made.scale).all()
        assert np.isfinite(project(jnp.ones((1, 2)), made)).all()
        np.testing.assert_allclose(values[0, 5:] * made.scale[5:], largest[5:], rtol=0.3)


def test_the_peak_of_memory_is_the_fullest_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [SimpleNamespace(memory_stats=lambda peak=peak: {"peak_bytes_in_use": peak * 2**30}) for peak in (2, 3)]
    mesh = make_mesh(MeshConfig())
    assert peak_gib(mesh) is None  # CPUs do not count
    # Kept by the mesh after the first use.
    monkeypatch.setitem(vars(mesh), "local_devices", [*devices, SimpleNamespace(memory_stats=lambda: None)])
    assert peak_gib(mesh) == 3.0
