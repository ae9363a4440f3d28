"""The roofline that follows from sheets: what makes it faster, its units, and that every figure has a source."""

from dataclasses import fields

import numpy as np
import pytest

from models.published import DECODERS, eagle3_config
from models.sheets import decoder_sheet, eagle3_sheet
from specjax.cost import (
    ENGINES,
    HARDWARE,
    CostModel,
    Deployment,
    Efficiency,
    EngineProfile,
    Hardware,
    cost_model,
    find_engine,
    find_hardware,
)
from tests.refusals import refuses

H100, IDEAL = HARDWARE["h100"], EngineProfile("ideal", "test", layer=0.0)
AS_STORED, ASSUMED = Deployment(), Efficiency()
ROWS = np.array([1.0, 16.0, 256.0, 2048.0])


def model_of(
    name: str = "qwen3-8b",
    hardware: Hardware = H100,
    deployment: Deployment = AS_STORED,
    efficiency: Efficiency = ASSUMED,
    engine: EngineProfile = ENGINES["specjax"],
) -> CostModel:
    draft = eagle3_sheet(eagle3_config(name))
    return cost_model(decoder_sheet(DECODERS[name]), draft, hardware, deployment, efficiency, engine)


@pytest.mark.parametrize("hardware", HARDWARE.values(), ids=HARDWARE)
def test_every_figure_has_a_source(hardware: Hardware):
    figures = {field.name for field in fields(Hardware)} - {"name", "sources"}
    assert {name for name in figures if getattr(hardware, name) is not None} <= hardware.sources.keys()
    assert all(hardware.sources.values())


def test_what_has_no_sheet_is_refused():
    with refuses("hardware = h999: no such sheet; must be one of a100, h20"):
        find_hardware("h999")
    with refuses("engine = sglang: no such profile; must be one of specjax"):
        find_engine("sglang")
    with refuses("weight_bytes = 1: NVIDIA A100-SXM4-80GB has no such products"):
        model_of(hardware=HARDWARE["a100"], deployment=Deployment(weight_bytes=1))
