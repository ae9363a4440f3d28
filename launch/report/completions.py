"""Sample completions as HTML, each token shaded by who wrote it."""

from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any

from launch.report.scales import number
from specjax.types import Writer

WRITERS = {
    Writer.POLICY: "policy, nothing drafted (the first token, and all at draft length 0)",
    Writer.DRAFT: "draft, accepted",
    Writer.RECOVERED: "policy, in place of a refused draft",
    Writer.BONUS: "policy, after a draft accepted whole",
}
# Of a completion, tokens shown at its beginning and at its end.
HEAD, TAIL = 400, 100
# Steps whose completions are shown.
MOST = 8


def shown(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return steps that logged completions: the first, the last, and others evenly spaced between them."""
    full = [sample for sample in samples if sample["completions"]]
    if len(full) <= MOST:
        return full
    return [full[round(i * (len(full) - 1) / (MOST - 1))] for i in range(MOST)]


def completions(samples: Sequence[dict[str, Any]]) -> str:
    """Return a block for each step that can be opened, the last one open; empty if there are none."""
    picked = shown(samples)
    if not picked:
        return ""
    legend = "".join(f'<span><i class="w{writer}"></i>{text}</span>' for writer, text in WRITERS.items())
    blocks = [_block(sample, " open" if sample is picked[-1] else "") for sample in picked]
    return f'<div class="legend">{legend}</div>{"".join(reversed(blocks))}'


def _block(sample: dict[str, Any], state: str) -> str:
    written = Counter(writer for each in sample["completions"] for _, writer in each["pieces"])
    share = written[Writer.DRAFT] / max(sum(written.values()), 1)
    each = "".join(map(_completion, sample["completions"]))
    return (
        f"<details{state}><summary>step {sample['step']}<small>{share:.0%} of these tokens written by the draft</small>"
        f'</summary><div class="samples">{each}</div></details>'
    )


def _completion(each: dict[str, Any]) -> str:
    pieces = each["pieces"]
    facts = [f"{len(pieces)} tokens", f"expected {escape(each['answer'])}"]
    facts.append("not scored" if each["reward"] is None else f"reward {number(each['reward'])}")
    if each["stopped"] is False:
        facts.append("cut at the length budget")
    left_out = len(pieces) - HEAD - TAIL
    if left_out > 0:
        text = _tokens(pieces[:HEAD]) + f'<p class="soft">… {left_out} tokens …</p>' + _tokens(pieces[-TAIL:])
    else:
        text = _tokens(pieces)
    if each["stopped"] and pieces:
        text += f'<span class="end w{pieces[-1][1] or 0}">stop</span>'
    return (
        f'<div class="sample"><div class="text prompt">{escape(each["prompt"])}</div><div class="text">{text}</div>'
        f'<div class="facts">{"".join(f"<span>{fact}</span>" for fact in facts)}</div></div>'
    )


def _tokens(pieces: Sequence[tuple[str, int | None]]) -> str:
    """Show a line break as a sign, so that the shade of such a token is visible."""
    texts = ((escape(text).replace("\n", "\u21b5\n"), writer or 0) for text, writer in pieces if text)
    return "".join(f'<span class="w{writer}">{text}</span>' for text, writer in texts)
