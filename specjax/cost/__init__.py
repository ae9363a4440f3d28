"""Cost: seconds of a speculative round from sheets or from measurements, and the draft length that follows.

`CostModel` is the formula. `cost_model` takes its constants from the sheets of a network and of a device, `fit`
from measured rounds. docs/cost_model.md has the equations.
"""

from specjax.cost.choice import (
    Acceptance,
    BatchProgress,
    Drafting,
    Seconds,
    acceptance_length,
    batch_gain,
    choose,
    could_pay,
    expected_speedup,
    init_drafting,
    rates,
    unmeasured,
    update_drafting,
)
from specjax.cost.engines import ENGINES, EngineProfile, find_engine
from specjax.cost.forward import ExpertCounts, Forward
from specjax.cost.hardware import HARDWARE, Hardware, find_hardware
from specjax.cost.measured import Cell, corrected, fit, relative_errors, round_seconds
from specjax.cost.model import CostModel
from specjax.cost.sheets import Deployment, DraftSheet, Efficiency, NetworkSheet, cost_model

__all__ = [
    "Acceptance",
    "BatchProgress",
    "Cell",
    "CostModel",
    "Deployment",
    "DraftSheet",
    "Drafting",
    "ENGINES",
    "Efficiency",
    "EngineProfile",
    "ExpertCounts",
    "Forward",
    "HARDWARE",
    "Hardware",
    "NetworkSheet",
    "Seconds",
    "acceptance_length",
    "batch_gain",
    "choose",
    "corrected",
    "cost_model",
    "could_pay",
    "expected_speedup",
    "find_engine",
    "find_hardware",
    "fit",
    "init_drafting",
    "rates",
    "relative_errors",
    "round_seconds",
    "unmeasured",
    "update_drafting",
]
