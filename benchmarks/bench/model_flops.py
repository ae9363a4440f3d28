"""Model FLOPs of a gradient: what its matrix products need, without what is computed again to save memory."""

from itertools import product

from models.config import DecoderConfig
from models.params import by_path
from models.sheets import decoder_sheet
from specjax.adapters import KERNEL, A
from specjax.cost import HARDWARE, Hardware
from specjax.types import Params, PyTree


def policy_flops(decoder: DecoderConfig, params: Params, rows: int, length: int) -> int:
    """Return the FLOPs of the gradient of the policy over rows of `length` tokens.

    6 for each matrix parameter and token: 2 forward, 4 backward. The vocabulary head is such a matrix, an embedding
    that is only looked up is none. For attention 12 x layers x width of all query heads for each pair of a query and a
    key that it sees: two products forward, four backward. Raises ValueError for experts and windows.

    Beside adapters, whose matrices count 6, a frozen matrix counts 4. In the first layer the input of the queries, keys
    and values needs no gradient then, which saves 2 for each parameter that multiplies it.
    """
    if decoder.experts is not None or any(decoder.windows):
        raise ValueError("model FLOPs are counted for networks without experts and windows")
    matrices = decoder_sheet(decoder).parameters
    products = 6 * matrices
    if params.base:
        adapters = {path: x.size for path, x in by_path(params.policy).items()}
        first = {**_matrices(params.base), **adapters}
        products = 4 * matrices + 6 * sum(adapters.values())
        products -= 2 * sum(first.get(("layer_0", "attention", *name), 0) for name in product("qkv", (KERNEL, A)))
    attention = 12 * decoder.num_layers * decoder.num_heads * decoder.head_dim * causal_pairs(length)
    return rows * (products * length + attention)


def draft_flops(decoder: DecoderConfig, params: Params, rows: int, length: int, passes: int, anchors: int) -> int:
    """Return the FLOPs of the gradient of an EAGLE-3 head with the policy's sizes, over rows of `length` tokens.

    With anchors, every pass runs over so many tokens of a row, except that the first computes the keys and values of
    all. 0: all tokens. The anchors are drawn anywhere: each sees half of the row in the mean. The projection of the
    policy's features counts 4 for each parameter and token, because its input has no gradient. The policy's vocabulary
    head counts 2, because it is not trained here, at each position whose law a pass reads: the positions of
    neighbouring passes over all tokens are the same but for one.
    """
    indices = length - 2
    queries = min(anchors or indices, indices)
    matrices = _matrices(params.draft)
    features = matrices.pop(("fc", "kernel"))
    keys = sum(matrices.pop(("attention", name, "kernel")) for name in "kv")
    products = 4 * features * indices + 6 * keys * (indices + (passes - 1) * queries)
    products += passes * queries * 6 * sum(matrices.values())
    laws = passes * queries if anchors else indices + passes - 1
    products += 2 * decoder.hidden_size * decoder.vocab_size * laws
    # Pass d sees the keys of its own index in passes 1 .. d too.
    pairs = passes * queries * (indices + 1) // 2 + queries * sum(range(passes))
    return rows * (products + 12 * decoder.num_heads * decoder.head_dim * pairs)


def causal_pairs(length: int) -> int:
    """Return the number of pairs of a query and a key at or before it."""
    return length * (length + 1) // 2


def device_sheet(platform: str, kind: str) -> Hardware | None:
    """Return the sheet of a device of JAX's platform and kind; None if there is none."""
    if platform == "cpu":
        return HARDWARE["cpu"]
    # Drivers leave out the last words of some names.
    sheets = (sheet for sheet in HARDWARE.values() if f"{sheet.name} ".startswith(f"{kind} "))
    return next(sheets, None)


def _matrices(params: PyTree) -> dict[tuple[str, ...], int]:
    """Return the sizes of the matrices that every token is multiplied by."""
    return {path: x.size for path, x in by_path(params).items() if path[-1] == "kernel"}
