"""Sample completions as HTML, each token shaded by its writer (`specjax.types.Writer`)."""

from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any

from launch.report.scales import number
from specjax.types import Writer

WRITERS = {
    Writer.POLICY: "policy, without a draft (the first token, and all at draft length 0)",
    Writer.DRAFT: "draft, accepted",
    Writer.RECOVERED: "policy, instead of a rejected token",
    Writer.BONUS: "policy, bonus token after a fully accepted proposal",
}
# Tokens shown at the start and at the end of a long completion.
HEAD, TAIL = 400, 100
# Largest number of steps whose completions are shown.
MOST = 8


def shown(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return at most MOST of the steps that logged completions: the first, the last, and evenly spaced ones between."""
    logged = [sample for sample in samples if sample["completions"]]
    if len(logged) <= MOST:
        return logged
    return [logged[round(i * (len(logged) - 1) / (MOST - 1))] for i in range(MOST)]


def completions(samples: Sequence[dict[str, Any]]) -> str:
    """Return one foldable block per step, the newest first and open. Empty if no step logged completions."""
    steps = shown(samples)
    if not steps:
        return ""
    legend = "".join(f'<span><i class="w{writer}"></i>{text}</span>' for writer, text in WRITERS.items())
    blocks = [_block(sample, is_open=sample is steps[-1]) for sample in steps]
    return f'<div class="legend">{legend}</div>{"".join(reversed(blocks))}'


def _block(sample: dict[str, Any], is_open: bool) -> str:
    writers = Counter(writer for completion in sample["completions"] for _, writer in completion["pieces"])
    from_draft = writers[Writer.DRAFT] / max(sum(writers.values()), 1)
    body = "".join(map(_completion, sample["completions"]))
    return (
        f"<details{' open' if is_open else ''}><summary>step {sample['step']}"
        f"<small>{from_draft:.0%} of these tokens written by the draft</small>"
        f'</summary><div class="samples">{body}</div></details>'
    )


def _completion(completion: dict[str, Any]) -> str:
    pieces = completion["pieces"]
    facts = [f"{len(pieces)} tokens", f"expected {escape(completion['answer'])}"]
    facts.append("not scored" if completion["reward"] is None else f"reward {number(completion['reward'])}")
    if completion["stopped"] is False:
        facts.append("cut off at the length budget")
    hidden = len(pieces) - HEAD - TAIL
    if hidden > 0:
        text = _tokens(pieces[:HEAD]) + f'<p class="soft">… {hidden} tokens …</p>' + _tokens(pieces[-TAIL:])
    else:
        text = _tokens(pieces)
    if completion["stopped"] and pieces:
        text += f'<span class="end w{pieces[-1][1] or 0}">stop</span>'
    prompt = escape(completion["prompt"])
    return (
        f'<div class="sample"><div class="text prompt">{prompt}</div><div class="text">{text}</div>'
        f'<div class="facts">{"".join(f"<span>{fact}</span>" for fact in facts)}</div></div>'
    )


def _tokens(pieces: Sequence[tuple[str, int | None]]) -> str:
    """Return the tokens as shaded spans. Line breaks get a visible sign, so that their shade can be seen."""
    texts = ((escape(text).replace("\n", "\u21b5\n"), writer or 0) for text, writer in pieces if text)
    return "".join(f'<span class="w{writer}">{text}</span>' for text, writer in texts)
