"""The gated delta rule and the short causal convolution, both restarting at every segment.

One head keeps a state S [E, F], an associative memory from keys to values. A token with query q,
key k, value v, log decay g <= 0 and write strength beta does

    S <- exp(g) S;   S <- S + k (beta (v - k^T S))^T;   o = q^T S

(Yang, Kautz, Hatamizadeh, Gated Delta Networks, 2024, equation 10). `recurrent_gated_delta_rule`
does just that and is the reference. `chunked_gated_delta_rule` computes the same from chunks of 64
tokens: everything inside a chunk is a batched matrix product, and only the states at the borders
of chunks depend on each other (section 3.3 there, and Yang et al. 2024, Parallelizing Linear
Transformers with the Delta Rule, section 3).

`lazyjax.models.delta_states` has that part.

Decays, the inverse inside a chunk, sums and the state from chunk to chunk are float32; the operands and
results of products over whole chunks have the dtype of queries, keys and values. Exponentials are taken
of sums of log decays between two tokens, which are never positive, and are masked before they are
taken. Axes: see the legend in `lazyjax.models.layers`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from lazyjax.models.delta_states import float32_product, product, states_through_chunks

CHUNK_TOKENS = 64


def segment_starts(segment_ids_BT: Int32[Array, "B T"]) -> Bool[Array, "B T"]:
    """True at the first token of every run of equal segment ids."""
    changed = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
    return jnp.pad(changed, ((0, 0), (1, 0)), constant_values=True)


def causal_convolution(
    x_BTP: Float[Array, "B T P"], kernel_WP: Float[Array, "W P"], segment_ids_BT: Int32[Array, "B T"]
) -> Float[Array, "B T P"]:
    """Depthwise convolution over the last W tokens of the segment; tap W - 1 meets the token itself.

    Sums in float32 and returns the dtype of x.
    """
    tokens = x_BTP.shape[1]
    taps = kernel_WP.shape[0]
    run_BT = jnp.cumsum(segment_starts(segment_ids_BT), axis=1)
    total_BTP = jnp.zeros(x_BTP.shape, jnp.float32)
    for back in range(min(taps, tokens)):
        shift = ((0, 0), (back, 0))
        earlier_BTP = jnp.pad(x_BTP, (*shift, (0, 0)))[:, :tokens]
        same_BT1 = (jnp.pad(run_BT, shift)[:, :tokens] == run_BT)[:, :, None]
        tap_P = kernel_WP[taps - 1 - back].astype(jnp.float32)
        total_BTP += jnp.where(same_BT1, earlier_BTP.astype(jnp.float32), 0.0) * tap_P
    return total_BTP.astype(x_BTP.dtype)


def recurrent_gated_delta_rule(
    q_BTKE: Float32[Array, "B T K E"],
    k_BTKE: Float32[Array, "B T K E"],
    v_BTKGF: Float32[Array, "B T K G F"],
    g_BTKG: Float32[Array, "B T K G"],
    beta_BTKG: Float32[Array, "B T K G"],
    segment_ids_BT: Int32[Array, "B T"],
) -> Float32[Array, "B T K G F"]:
    """The rule token by token; see the module's docstring."""
    rows, _, heads, key_size = k_BTKE.shape
    groups, value_size = v_BTKGF.shape[-2:]

    def step(s_BKGEF: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        q_BKE, k_BKE, v_BKGF, g_BKG, beta_BKG, start_B = token
        kept_BKG = jnp.where(start_B[:, None, None], 0.0, jnp.exp(g_BKG))
        s_BKGEF = s_BKGEF * kept_BKG[..., None, None]
        change_BKGF = beta_BKG[..., None] * (v_BKGF - jnp.einsum("bke,bkgef->bkgf", k_BKE, s_BKGEF))
        s_BKGEF = s_BKGEF + jnp.einsum("bke,bkgf->bkgef", k_BKE, change_BKGF)
        return s_BKGEF, jnp.einsum("bke,bkgef->bkgf", q_BKE, s_BKGEF)

    tokens = (q_BTKE, k_BTKE, v_BTKGF, g_BTKG, beta_BTKG, segment_starts(segment_ids_BT))
    empty = jnp.zeros((rows, heads, groups, key_size, value_size), jnp.float32)
    _, out = jax.lax.scan(step, empty, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens))
    return jnp.moveaxis(out, 0, 1)


def chunked_gated_delta_rule(
    q_BTKE: Float[Array, "B T K E"],
    k_BTKE: Float[Array, "B T K E"],
    v_BTKGF: Float[Array, "B T K G F"],
    g_BTKG: Float32[Array, "B T K G"],
    beta_BTKG: Float32[Array, "B T K G"],
    segment_ids_BT: Int32[Array, "B T"],
) -> Float[Array, "B T K G F"]:
    """The rule in chunks of 64 tokens, for any T: equal to `recurrent_gated_delta_rule`.

    Inside a chunk, with d_ij the decay from token j to token i (0 across segments) and n_i what
    token i finally writes, n = beta v - N n - beta d_i (k_i S), where N_ij = beta_i d_ij k_i.k_j for j < i,
    S is the state before the chunk and d_i the decay from there to token i. `lazyjax.models.delta_states`
    solves this chunk after chunk; the rest is products inside chunks, of all chunks at once.

    The states before each chunk are named `delta_states`.
    """
    return _chunked(q_BTKE, k_BTKE, v_BTKGF, g_BTKG, beta_BTKG, segment_ids_BT, None)[0]


def gated_delta_rule_from(
    q_BTKE: Float[Array, "B T K E"],
    k_BTKE: Float[Array, "B T K E"],
    v_BTKGF: Float[Array, "B T K G F"],
    g_BTKG: Float32[Array, "B T K G"],
    beta_BTKG: Float32[Array, "B T K G"],
    segment_ids_BT: Int32[Array, "B T"],
    s_BKGEF: Float32[Array, "B K G E F"],
) -> tuple[Float[Array, "B T K G F"], Float32[Array, "B K G E F"]]:
    """The rule over a piece whose first segment continues the state `s`; the state behind the piece.

    Differentiable, also with respect to the state.
    """
    return _chunked(q_BTKE, k_BTKE, v_BTKGF, g_BTKG, beta_BTKG, segment_ids_BT, s_BKGEF)


def continued_gated_delta_rule(
    q_BTKE: Float[Array, "B T K E"],
    k_BTKE: Float[Array, "B T K E"],
    v_BTKGF: Float[Array, "B T K G F"],
    g_BTKG: Float32[Array, "B T K G"],
    beta_BTKG: Float32[Array, "B T K G"],
    s_BKGEF: Float32[Array, "B K G E F"],
) -> tuple[Float[Array, "B T K G F"], Float32[Array, "B K G E F"]]:
    """The rule over one more piece of a segment, from the state before it to the state after it.

    A token with g = 0 and beta = 0 leaves the state as it is. Not meant to be differentiated.
    """
    if q_BTKE.shape[1] == 1:
        s_BKGEF, out_BKGF = _one_token(
            s_BKGEF, q_BTKE[:, 0], k_BTKE[:, 0], v_BTKGF[:, 0], jnp.exp(g_BTKG[:, 0]), beta_BTKG[:, 0]
        )
        return out_BKGF[:, None], s_BKGEF
    one_segment_BT = jnp.ones(q_BTKE.shape[:2], jnp.int32)
    return gated_delta_rule_from(q_BTKE, k_BTKE, v_BTKGF, g_BTKG, beta_BTKG, one_segment_BT, s_BKGEF)


def _one_token(
    s_BKGEF: Array, q_BKE: Array, k_BKE: Array, v_BKGF: Array, kept_BKG: Array, beta_BKG: Array
) -> tuple[Array, Array]:
    """The state behind a token, and what the token reads.

    With S' = kept S + k n^T the token reads q^T S' = kept q^T S + (q.k) n, so that the old state is read once
    for both products and once for the update: states are what a decode step moves most of.
    """
    both_BXKE = jnp.stack([k_BKE, q_BKE], axis=1)
    read_BXKGF = jnp.einsum("bxke,bkgef->bxkgf", both_BXKE, s_BKGEF) * kept_BKG[:, None, ..., None]
    change_BKGF = beta_BKG[..., None] * (v_BKGF - read_BXKGF[:, 0])
    similar_BK11 = jnp.einsum("bke,bke->bk", q_BKE, k_BKE)[..., None, None]
    written_BKGEF = jnp.einsum("bke,bkgf->bkgef", k_BKE, change_BKGF)
    return s_BKGEF * kept_BKG[..., None, None] + written_BKGEF, read_BXKGF[:, 1] + similar_BK11 * change_BKGF


def _chunked(
    q_BTKE: Array,
    k_BTKE: Array,
    v_BTKGF: Array,
    g_BTKG: Array,
    beta_BTKG: Array,
    segment_ids_BT: Array,
    start_BKGEF: Array | None,
) -> tuple[Array, Array]:
    """Outputs in the dtype of keys, queries and values, and the state behind the last token.

    `start_BKGEF` is the state that the first segment continues; None: all segments start empty.
    """
    tokens = q_BTKE.shape[1]
    padding = -tokens % CHUNK_TOKENS
    q_CBKLE, k_CBKLE = _chunk(q_BTKE, padding, heads=1), _chunk(k_BTKE, padding, heads=1)
    v_CBKGLF = _chunk(v_BTKGF, padding, heads=2)
    g_CBKGL, beta_CBKGL = _chunk(g_BTKG, padding, heads=2), _chunk(beta_BTKG, padding, heads=2)
    # Tokens of the padding join the last segment: with beta = 0 and g = 0 they change nothing.
    run_CBL = _chunk(jnp.cumsum(segment_starts(segment_ids_BT), axis=1), padding, heads=0, mode="edge")
    last_CB1 = run_CBL[..., -1:]
    # Runs count from 1: 0 is none.
    before_CB1 = jnp.pad(
        last_CB1[:-1], ((1, 0), (0, 0), (0, 0)), constant_values=0 if start_BKGEF is None else 1
    )

    decay_CBKGLL, from_start_CBKGL, to_end_CBKGL, kept_CBKG = _decays(g_CBKGL, run_CBL, before_CB1)
    causal_LL = jnp.tri(CHUNK_TOKENS, dtype=jnp.bool_)

    # Keys and queries together: both meet the keys, and both read the states.
    both_CBKXE = jnp.concatenate([k_CBKLE, q_CBKLE], axis=-2)
    pairs_CBKXL = _pairs(both_CBKXE, k_CBKLE)
    similar_CBKLL, attention_CBKLL = jnp.split(pairs_CBKXL, 2, axis=-2)
    system_CBKGLL = jnp.where(
        causal_LL & ~jnp.eye(CHUNK_TOKENS, dtype=jnp.bool_),
        beta_CBKGL[..., None] * similar_CBKLL[:, :, :, None] * decay_CBKGLL,
        0.0,
    )
    if start_BKGEF is None:
        rows, heads, groups = v_CBKGLF.shape[1:4]
        start_BKEGF = jnp.zeros((rows, heads, k_CBKLE.shape[-1], groups, v_CBKGLF.shape[-1]), jnp.float32)
    else:
        start_BKEGF = jnp.swapaxes(start_BKGEF, 2, 3)
    written_CBKGLF, read_CBKLGF, end_BKEGF = states_through_chunks(
        system_CBKGLL,
        both_CBKXE,
        (beta_CBKGL[..., None] * v_CBKGLF.astype(jnp.float32)).astype(v_CBKGLF.dtype),
        beta_CBKGL * from_start_CBKGL,
        to_end_CBKGL,
        kept_CBKG,
        start_BKEGF,
    )
    dtype = written_CBKGLF.dtype
    weights_CBKGLL = (attention_CBKLL[:, :, :, None] * decay_CBKGLL).astype(dtype)
    within_CBKGLF = product("...ij,...jf->...if", weights_CBKGLL, written_CBKGLF)
    before_CBKGLF = from_start_CBKGL[..., None] * jnp.swapaxes(read_CBKLGF, -3, -2).astype(jnp.float32)
    out_CBKGLF = (within_CBKGLF.astype(jnp.float32) + before_CBKGLF).astype(dtype)
    out_BCLKGF = jnp.transpose(out_CBKGLF, (1, 0, 4, 2, 3, 5))
    out_BTKGF = out_BCLKGF.reshape(*out_BCLKGF.shape[:1], -1, *out_BCLKGF.shape[3:])[:, :tokens]
    return out_BTKGF, jnp.swapaxes(end_BKEGF, 2, 3)


@jax.custom_vjp
def _pairs(both_CBKXE: Array, k_CBKLE: Array) -> Float32[Array, "C B K X L"]:
    """Products of a chunk's keys and queries with its keys; their gradient is rounded as the operands are."""
    return float32_product("...xe,...je->...xj", both_CBKXE, k_CBKLE)


def _pairs_forward(both: Array, keys: Array) -> tuple[Array, tuple[Array, Array]]:
    return _pairs(both, keys), (both, keys)


def _pairs_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    both, keys = saved
    gradient = gradient.astype(keys.dtype)
    return product("...xj,...je->...xe", gradient, keys), product("...xj,...xe->...je", gradient, both)


_pairs.defvjp(_pairs_forward, _pairs_backward)


def _decays(g_CBKGL: Array, run_CBL: Array, before_CB1: Array) -> tuple[Array, Array, Array, Array]:
    """What is left of a state: from token to token, from a chunk's start, to its end, from start to end.

    Nothing goes from run to run: `before_CB1` is the run that each chunk continues.
    """
    last_CB1 = run_CBL[..., -1:]
    coarse_CBKGL, fine_CBKGL = _running_sums(g_CBKGL)
    causal_LL = jnp.tri(CHUNK_TOKENS, dtype=jnp.bool_)
    sees_CBLL = (run_CBL[..., :, None] == run_CBL[..., None, :]) & causal_LL
    decay_CBKGLL = _masked_exp(
        (coarse_CBKGL[..., :, None] - coarse_CBKGL[..., None, :])
        + (fine_CBKGL[..., :, None] - fine_CBKGL[..., None, :]),
        sees_CBLL,
    )
    total_CBKGL = coarse_CBKGL + fine_CBKGL
    from_start_CBKGL = _masked_exp(total_CBKGL, run_CBL == before_CB1)
    to_end_CBKGL = _masked_exp(
        (coarse_CBKGL[..., -1:] - coarse_CBKGL) + (fine_CBKGL[..., -1:] - fine_CBKGL), run_CBL == last_CB1
    )
    kept_CBKG = _masked_exp(total_CBKGL[..., -1:], last_CB1 == before_CB1)[..., 0]
    return decay_CBKGLL, from_start_CBKGL, to_end_CBKGL, kept_CBKG


def _chunk(x: Array, padding: int, *, heads: int, mode: str = "constant") -> Array:
    """[B, T, heads..., rest...] -> [C, B, heads..., L, rest...], `heads` being the number of head axes."""
    x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2), mode=mode)
    x = x.reshape(x.shape[0], -1, CHUNK_TOKENS, *x.shape[2:])
    rest = tuple(range(3 + heads, x.ndim))
    return jnp.transpose(x, (1, 0, *range(3, 3 + heads), 2, *rest))


def _running_sums(g_L: Array) -> tuple[Array, Array]:
    """Sums of log decays up to every token of the chunk, as coarse + fine parts.

    What is used are differences between two tokens, and one strong decay anywhere would cost all
    of them their last digits. The coarse part is a multiple of 2^-10 below 2^14, so that its sums
    and their differences are exact; the fine part is small. exp(-200) is 0 in float32, hence the
    bound.
    """
    g_L = jnp.maximum(g_L, -200.0)
    coarse_L = jax.lax.stop_gradient(jnp.round(g_L * 1024) / 1024)
    return jnp.cumsum(coarse_L, axis=-1), jnp.cumsum(g_L - coarse_L, axis=-1)


def _masked_exp(exponent: Array, mask: Array) -> Array:
    """exp where the mask holds, else 0; a masked exponent is never exponentiated."""
    heads = exponent.ndim - mask.ndim
    mask = jnp.expand_dims(mask, tuple(range(2, 2 + heads)))
    return jnp.exp(jnp.where(mask, exponent, -jnp.inf))
