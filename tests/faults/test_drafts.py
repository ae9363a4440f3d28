"""Faults in the checkpoints of drafts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from models.hf.eagle3_dialects import Dialect
from models.hf.eagle3_files import load_eagle3
from tests.models.eagle3_checkpoints import ONE, VOCAB, Public
from tests.refusals import refuses


@pytest.mark.parametrize("size", [1, VOCAB - 1])
@pytest.mark.parametrize("dialect", ["specforge", "speculators"])
def test_row_04_a_reduced_vocabulary_without_its_map_is_refused(tmp_path: Path, dialect: Dialect, size: int) -> None:
    public = Public(dialect=dialect, ids=tuple(range(size)))
    public.write(tmp_path / "whole")
    np.testing.assert_array_equal(load_eagle3(tmp_path / "whole", ONE).target_ids, np.arange(size))
    public.write(tmp_path / "none", d2t=None, t2d=None)
    with refuses(f"none: d2t: ...{size} of {VOCAB}"):
        load_eagle3(tmp_path / "none", ONE)
    public.write(tmp_path / "flags", d2t=None)
    with refuses("flags: t2d: "):
        load_eagle3(tmp_path / "flags", ONE)
    replace(public, ids=None).write(tmp_path / "all")
    assert load_eagle3(tmp_path / "all", ONE).target_ids is None
