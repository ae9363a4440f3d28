"""Values pass between host and devices only in two modules, which know of arrays that span processes."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
SEAM = [ROOT / "specjax" / name for name in ("parallel/processes.py", "asynchronous/device_transfer.py")]
# Each fails, or is not what every process has, for an array that spans processes.
FORBIDDEN = {
    *("device_get", "device_put", "addressable_data", "addressable_shards"),
    *("make_array_from_process_local_data", "make_array_from_single_device_arrays"),
    *("process_allgather", "broadcast_one_to_all"),
}
FILES = sorted(path for package in ("specjax", "models", "launch") for path in (ROOT / package).rglob("*.py"))


def reaches_for_devices(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in FORBIDDEN or (node.attr == "asarray" and ast.unparse(node.value) == "np")
    return isinstance(node, ast.alias) and node.name in FORBIDDEN


def test_only_one_module_moves_values_between_host_and_devices() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path in FILES
        if path not in SEAM
        for node in ast.walk(ast.parse(path.read_text()))
        if reaches_for_devices(node)
    ]
    assert not found, f"must go through specjax.parallel.processes: {found}"
