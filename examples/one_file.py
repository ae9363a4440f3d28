"""The whole method in one file: RL of a language model whose completions are drafted, then verified without loss.

`python examples/one_file.py` learns a toy task in a minute on a CPU and checks itself. It imports nothing from specjax,
whose tokens and gradients are the same (tests/test_one_file.py). A row is one sequence, prompt and completion: the
index of a token is its position. Functions are written for one row, and jax.vmap makes the batch. Shapes: S positions
of a row, T tokens of a forward, K draft length, V vocabulary, D residual stream, F features that the draft reads, N
heads of queries, M heads of keys and values, H size of a head, R rows of the batch.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.random import threefry_2x32


class Config(NamedTuple):
    draft_length: int = 3  # K; 0 is plain decoding
    coupled: bool = False  # verify by Gumbel coupling instead of rejection
    temperature: float = 1.0
    max_new_tokens: int = 10
    stop_tokens: tuple[int, ...] = (0,)
    group_size: int = 16  # completions of a prompt
    passes: int = 3  # of the draft's training-time test


VOCAB, OPTIMIZER = 10, optax.adam(1e-3)  # Adam updates each number separately: one optimiser does for both networks


@partial(jax.jit, static_argnums=0)
def train_step(config, key, params, moments, prompts):
    """Generate, score and update both networks in one program: the rollout reads the weights of the last update."""
    rows = generate(config, key, params, prompts)
    reward = jax.vmap(count_upwards)(rows).reshape(-1, config.group_size)
    # GRPO (arXiv 2402.03300): a reward is compared with those of the same prompt, so that no critic is needed.
    gap = reward - reward[:, :1]  # exactly 0 if all are equal; their mean may differ from them by rounding
    advantage = (gap - gap.mean(1, keepdims=True)) / (gap.std(1, keepdims=True) + 1e-6)
    # Neither loss has a gradient into the other's network, so that the gradient of their sum is that of both.
    gradients = jax.grad(loss, argnums=1)(config, params, rows, advantage.ravel())
    updates, moments = OPTIMIZER.update(gradients, moments)
    drawn = jnp.sum(rows.length - rows.prompt - 1)  # each first token comes from the prefill, not from a round
    return optax.apply_updates(params, updates), moments, (reward.mean(), drawn / jnp.maximum(rows.rounds.sum(), 1))


# ---- The rollout ----
class Row(NamedTuple):
    key: jax.Array  # uint32 [2], of all noise
    prompt: jax.Array  # int32, length of the prompt
    length: jax.Array  # int32, of prompt and completion so far
    tokens: jax.Array  # int32 [S], of which the first `length` count
    log_probs: jax.Array  # float32 [S], of each completion token when it was drawn
    done: jax.Array  # bool
    rounds: jax.Array  # int32
    caches: list  # (keys, values) [S, M, H] of the policy's layers, then the draft's; the last token is not in them yet
    draft_state: tuple  # at the last token: the draft's hidden [1, D], and its log_q [1, V] of the next token

    def counts(self, index):  # whether a completion token stands there
        return (index >= self.prompt) & (index < self.length)


def generate(config, key, params, prompts):
    """Complete prompts (tokens [R, P], lengths, ids, sample numbers) as plain sampling would; drafts only add speed."""

    def complete(prompt, length, prompt_id, sample):
        row_key = jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, prompt_id), sample))
        # The last verification may write up to K + 1 tokens past the budget: jax would clamp writes past the end.
        tokens = jnp.pad(prompt, (0, config.max_new_tokens + config.draft_length + 1))
        caches = [None] * (len(params["policy"]["layers"]) + 1)
        row = Row(row_key, length, length, tokens, jnp.zeros(len(tokens)), jnp.bool(False), jnp.int32(0), caches, ())
        row = advance(config, params, row, prompt, 0, prompt[:0], params["policy"]["head"][:0])  # prefill, K = 0
        return jax.lax.while_loop(lambda row: ~row.done, partial(speculative_round, config, params), row)

    # vmap makes one loop that runs until all rows are done. Each row advances at its own pace; a done row stands still.
    return jax.vmap(complete)(*prompts)


def speculative_round(config, params, row):
    """Draft K tokens and verify them: the row grows by 1 .. K + 1 tokens, for one forward of the policy."""
    # The draft may never look at later tokens. Verification makes a sample of p, the policy's distribution, from one
    # of q, the draft's. So q must depend on earlier tokens alone, and no token may be dropped for its own value.
    (hidden, next_log_q), cache, k = row.draft_state, row.caches[-1], config.draft_length
    if config.coupled:
        noise = gumbels(row.key, row.length + jnp.arange(k), COUPLED, next_log_q.shape[1])  # [K, V]
    else:  # keyed by the start of the round: the noise of a refused token must not be used again by the next round
        noise = gumbels(row.key, row.length, DRAFT, k * next_log_q.shape[1]).reshape(k, -1)
    draft, log_q = row.tokens[:0], next_log_q[:0]
    for i in range(k):
        if i:  # the policy has not read the drafted token yet, so that the head goes on from its own state
            view = causal(row.length + i - 2, 1, len(row.tokens))
            hidden, next_log_q, cache = draft_head(config, params, hidden, draft[-1:], view, cache)
        log_q = jnp.append(log_q, next_log_q, axis=0)
        draft = jnp.append(draft, jnp.argmax(next_log_q + noise[i], axis=1))
    # To read K + 1 tokens takes little longer than to read one: decoding waits for the weights to arrive from memory.
    last, row = row.length - 1, row._replace(rounds=row.rounds + 1)
    return advance(config, params, row, jnp.append(row.tokens[last], draft), last, draft, log_q)


def advance(config, params, row, tokens, start, draft, log_q):
    """Run both networks over tokens [T] from `start` on, the last K of them a draft, and append what is emitted."""
    # Refused tokens and padding stay in the caches. No token attends to them; later rounds write over them.
    view = causal(start, len(tokens), len(row.tokens))
    log_p, features, caches = decoder(config, params["policy"], tokens, view, row.caches[:-1])
    row = commit(config, row, take(log_p, row.length - 1 - start, len(draft) + 1), draft, log_q)
    # The head pairs each feature with the token after it. The last pair whose token is known predicts the next one.
    hidden, following = features @ params["draft"]["fc"], take(row.tokens, start + 1, len(tokens))
    hidden, next_log_q, cache = draft_head(config, params, hidden, following, view, row.caches[-1])
    last = row.length - 2 - start
    return row._replace(caches=[*caches, cache], draft_state=(take(hidden, last, 1), take(next_log_q, last, 1)))


def commit(config, row, log_p, draft, log_q):
    """Verify a draft [K] by the policy's log_p [K + 1, V] and append 1 .. K + 1 tokens. Nothing else emits tokens."""
    verify = verify_coupled if config.coupled else verify_rejection
    accepted, token = verify(row.key, row.length, log_p, log_q, draft)
    place = jnp.arange(len(log_p))
    tokens = jnp.where(place < accepted, jnp.append(draft, 0), token)
    # A row ends after a stop token or at its budget. The cut comes after the draw, so that it cannot bias the draw.
    stop = (place <= accepted) & jnp.isin(tokens, jnp.array(config.stop_tokens))
    end = row.prompt + config.max_new_tokens
    length = jnp.minimum(row.length + jnp.where(stop.any(), stop.argmax(), accepted) + 1, end)
    done = stop.any() | (length == end)
    # Log-probs come for free: verification needs log p of every token anyway. Training runs no forward to get them.
    log_probs = write(row.log_probs, pick(log_p, tokens), row.length)
    return row._replace(length=length, tokens=write(row.tokens, tokens, row.length), log_probs=log_probs, done=done)


# ---- Verification: return how many tokens of the draft are accepted, 0 .. K, and the token after them. ----
def verify_rejection(key, start, log_p, log_q, draft):
    """Verify by speculative sampling (Leviathan et al. 2023, arXiv 2211.17192): the emitted tokens follow p exactly."""
    # A token is drafted with probability q and accepted with min(1, p / q), hence emitted with min(p, q). What is left
    # of p is the residual max(p - q, 0). It sums to the probability of a refusal, so a refusal draws from it.
    ratio = jnp.exp(jnp.minimum(pick(log_p[:-1], draft) - pick(log_q, draft), 0.0))
    # More than i tokens are accepted with the product of the first i + 1 ratios: one uniform decides on all tokens.
    accepted = jnp.sum(uniforms(key, start, ACCEPT, 1) < jnp.cumprod(ratio))
    # After K accepted tokens q is 0 and the residual is p, known from the same forward: it gives the bonus token.
    p, q = jnp.exp(log_p)[accepted], jnp.append(jnp.exp(log_q), jnp.zeros_like(log_p[:1]), axis=0)[accepted]
    residual = jnp.maximum(p - q, 0.0)
    residual = jnp.where(residual.any(), residual, p)  # rounding left nothing: p is q
    return accepted, jnp.argmax(jnp.log(residual) + gumbels(key, start, RESIDUAL, len(p)))


def verify_coupled(key, start, log_p, log_q, draft):
    """Verify by Gumbel coupling (Daliri et al. 2024, arXiv 2408.07978): the tokens are those of plain decoding."""
    # Draft and policy draw with the same noise at each position. A drafted token is accepted if both draws are equal.
    tokens = jnp.argmax(log_p + gumbels(key, start + jnp.arange(len(log_p)), COUPLED, log_p.shape[1]), axis=1)
    accepted = jnp.sum(jnp.cumprod(tokens[:-1] == draft))
    return accepted, tokens[accepted]


# ---- The losses: GRPO for the policy, distillation for the draft ----
def loss(config, params, rows, advantage):
    """Return the sum of both losses, each a mean over the completion tokens of all rows."""

    def of_row(row, advantage):
        index, policy = jnp.arange(len(row.tokens)), params["policy"]
        view, counts = causal(0, len(index), len(index)), row.counts(index[1:])
        log_p, features, _ = decoder(config, policy, row.tokens, view, [None] * len(policy["layers"]))
        # A token is emitted with probability p, whoever proposed it: old log-probs are those of p, not of q.
        ratio = jnp.exp(jnp.where(counts, pick(log_p[:-1], row.tokens[1:]) - row.log_probs[1:], 0.0))
        objective = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.28) * advantage)  # as DAPO clips
        # The draft's loss has no gradient into the policy: the policy must not become easier to predict for its sake.
        policy, log_p, features = jax.lax.stop_gradient((policy, log_p, features))
        draft_loss = distillation_loss(config, params | {"policy": policy}, log_p, features, row)
        return draft_loss - jnp.sum(objective, where=counts)

    return jax.vmap(of_row)(rows, advantage).sum() / (rows.length - rows.prompt).sum()


def distillation_loss(config, params, log_p, features, row):
    """Return the cross-entropy of draft and policy over a row, by EAGLE-3's training-time test (arXiv 2503.01840)."""
    # Pass 0 reads features; pass i reads the state that pass i - 1 returned, as drafting does. In pass i, index t reads
    # token t + 1 + i and predicts token t + 2 + i. The cache holds one pass after the other. Index t attends to pass 0
    # up to t and to later passes at t alone: drafting from t, the head has seen nothing else.
    size, total, hidden, cache = len(row.tokens), 0.0, features @ params["draft"]["fc"], None
    index, (cached_pass, cached_index) = jnp.arange(size), jnp.divmod(jnp.arange(config.passes * size), size)
    for i in range(config.passes):
        same, earlier = cached_index == index[:, None], (cached_pass == 0) & (cached_index < index[:, None])
        view = (index + i, i * size, (same & (cached_pass <= i)) | earlier)
        following, target = jnp.roll(row.tokens, -1 - i), jnp.exp(jnp.roll(log_p, -1 - i, axis=0))
        hidden, log_q, cache = draft_head(config, params, hidden, following, view, cache)
        # Later passes weigh less, because a token drafted late is used only if those before it were accepted.
        total -= 0.8**i * jnp.sum(target * log_q, where=(row.counts(index + 2) & row.counts(index + 2 + i))[:, None])
    return total


# ---- The networks: a decoder like Qwen3, and EAGLE-3's head. A view: positions [T], where to write, mask [T, S]. ----
def causal(start, count, size):
    """View tokens at start .. start + count - 1, each of which attends to the positions up to its own."""
    positions = start + jnp.arange(count)
    return positions, start, jnp.arange(size) <= positions[:, None]


def decoder(config, policy, tokens, view, caches):
    """Return log_p [T, V], features [T, F] (what enters each layer), and the caches with the tokens written."""
    x, features, written = policy["embed"][tokens], [], []
    for layer, cache in zip(policy["layers"], caches, strict=True):
        features.append(x)
        x, cache = block(layer, x, rms_norm(x, layer["attention_norm"]), view, cache)
        written.append(cache)
    logits = rms_norm(x, policy["norm"]) @ policy["head"]
    return jax.nn.log_softmax(logits / config.temperature), jnp.concatenate(features, axis=1), written


def draft_head(config, params, hidden, tokens, view, cache):
    """Pair states [T, D] of t with tokens at t + 1; return states of t + 1, log_q [T, V] of token t + 2, the cache."""
    draft, embedded = params["draft"], params["policy"]["embed"][tokens]
    pair = [rms_norm(embedded, draft["input_norm"]), rms_norm(hidden, draft["hidden_norm"])]
    hidden, cache = block(draft, hidden, jnp.concatenate(pair, axis=1), view, cache)
    logits = rms_norm(hidden, draft["norm"]) @ draft["head"]
    return hidden, jax.nn.log_softmax(logits / config.temperature), cache


def block(p, x, read, view, cache):
    """Add attention over `read` to the residual stream x [T, D], then an MLP (SwiGLU); return the cache too."""
    attention, mlp, (positions, at, mask) = p["attention"], p["mlp"], view
    q, k, v = (jnp.einsum("td,dnh->tnh", read, attention[name]) for name in "qkv")
    if "q_norm" in attention:  # as in Qwen3; the draft has none
        q, k = rms_norm(q, attention["q_norm"]), rms_norm(k, attention["k_norm"])
    k_cache, v_cache = cache or 2 * [jnp.zeros((mask.shape[1], *k.shape[1:]))]
    cache = write(k_cache, rope(k, positions), at), write(v_cache, v, at)
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in cache)  # [S, N, H]; N / M heads share one
    scores = jnp.einsum("tnh,snh->nts", rope(q, positions), k) * q.shape[-1] ** -0.5
    y = jnp.einsum("nts,snh->tnh", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)), v)
    x = x + jnp.einsum("tnh,nhd->td", y, attention["o"])
    y = rms_norm(x, p["mlp_norm"])
    return x + (jax.nn.silu(y @ mlp["gate"]) * (y @ mlp["up"])) @ mlp["down"], cache


def rope(x, positions):
    half = x.shape[-1] // 2
    angle = positions[:, None, None] / 10_000.0 ** (jnp.arange(half) / half)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], axis=-1)


def rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


take, write = jax.lax.dynamic_slice_in_dim, partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
pick = jax.vmap(lambda log_p, token: log_p[token])

# ---- The noise: a function of the row's key and of what is drawn, whatever the batch and the number of rounds ----
COUPLED, DRAFT, ACCEPT, RESIDUAL = range(4)


def uniforms(key, positions, purpose, count):
    """Hash (position, purpose, index) to numbers in (0, 1), [*positions, count]. Those near 0 have 48 random bits."""
    index = jnp.arange(count, dtype=jnp.uint32) | jnp.uint32(purpose << 30)
    counters = jnp.broadcast_arrays(jnp.asarray(positions, jnp.uint32)[..., None], index)
    high, low = (threefry_2x32(key, jnp.stack(counters)) >> 8).astype(jnp.float32)
    return jnp.minimum((high + (low + 0.5) * 2.0**-24) * 2.0**-24, 1 - 2.0**-24)


def gumbels(key, positions, purpose, count):  # argmax(log p + noise) is a sample of p: the Gumbel-max trick
    return -jnp.log(-jnp.log1p(-uniforms(key, positions, purpose, count)))


# ---- A toy task, learned from nothing: count up from the last token of the prompt to 9, then stop with 0. ----
def count_upwards(row):
    """Return how much of the right completion a row has before its first mistake, 0 .. 1."""
    last, index = row.tokens[row.prompt - 1], jnp.arange(len(row.tokens))
    right = row.tokens == (last + 1 + index - row.prompt) % VOCAB
    return jnp.sum(jnp.cumprod(right | (index < row.prompt)), where=row.counts(index)) / (VOCAB - last)


def init_params(seed, D=48, N=4, M=2, H=16, layers=2):
    matrix, scale = partial(np.random.default_rng(seed).normal, 0.0, D**-0.5), np.ones(D)

    def layer(inputs):
        attention = {"q": matrix((inputs, N, H)), "k": matrix((inputs, M, H)), "v": matrix((inputs, M, H))}
        mlp = {"gate": matrix((D, 2 * D)), "up": matrix((D, 2 * D)), "down": matrix((2 * D, D))}
        return {"attention": attention | {"o": matrix((N, H, D))}, "mlp": mlp, "mlp_norm": scale}

    last = {"norm": scale, "head": matrix((D, VOCAB))}
    policy = {"embed": matrix((VOCAB, D)), "layers": [layer(D) | {"attention_norm": scale} for _ in range(layers)]}
    draft = layer(2 * D) | {"fc": matrix((layers * D, D)), "input_norm": scale, "hidden_norm": scale}
    return jax.tree.map(jnp.float32, {"policy": policy | last, "draft": draft | last})


if __name__ == "__main__":
    config, params, table = Config(), init_params(seed=0), []
    moments, (prompt, sample) = OPTIMIZER.init(params), jnp.divmod(jnp.arange(256), config.group_size)
    for step in range(201):
        prompt_key, key = jax.random.split(jax.random.fold_in(jax.random.key(0), step))
        prompts = jax.random.randint(prompt_key, (16, 4), 1, 5)[prompt], 1 + prompt % 4, prompt, sample
        params, moments, results = train_step(config, key, params, moments, prompts)
        table.append(results)
        if step % 50 == 0:
            print("step {:3}: reward {:.2f}, acceptance length {:.2f}".format(step, *results))
    # A reward of 0.86 is every token but the stop, which is learned last.
    assert table[-1][0] > 0.8 and table[-1][1] > table[0][1] + 0.5, "the task was not learned"
    drafted, plain = (jax.jit(generate, static_argnums=0)(Config(k, True, 2.0), key, params, prompts) for k in (3, 0))
    same = drafted.tokens[:, : plain.tokens.shape[1]] == plain.tokens
    counts = jax.vmap(Row.counts, (0, None))(plain, jnp.arange(same.shape[1]))
    assert (drafted.length == plain.length).all() and same.all(where=counts), "drafting changed a token"
    print("all checks passed: the task is learned, and coupled drafting changes no token")
