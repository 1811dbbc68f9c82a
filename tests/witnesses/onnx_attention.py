"""ONNX's attention, of both kinds, in terms of ``flash_attn``, ``rope`` and the scans.

And the convolution that comes before the second kind.
"""

import jax
import numpy as np

import fuel_jax as fj

from .onnx_cases import array, on_host

HIDDEN = -1e4  # added to a score it leaves nothing of its weight; −∞ would meet a 0 and be NaN


def split(x, heads):
    """``[b, s, h·d]`` as ``[b, h, s, d]``."""
    return np.swapaxes(x.reshape(*x.shape[:2], heads, -1), 1, 2)


def places(sq, past_key, nonpad):
    """Where the first query stands among the keys, for each sequence or for all."""
    if nonpad is not None:
        return nonpad.reshape(-1, 1, 1, 1) - sq
    return 0 if past_key is None else past_key.shape[2]


def additive(mask, shape, dtype):
    """A mask as numbers to add to the scores; keys that it does not reach are hidden."""
    if mask.dtype == bool:
        mask = np.where(mask, 0, -np.inf).astype(dtype)
    short = [(0, 0)] * (mask.ndim - 1) + [(0, shape[-1] - mask.shape[-1])]
    return np.broadcast_to(np.pad(mask, short, constant_values=-np.inf), shape)


def masked(q, k, v, mask, scale, k_len):
    """Queries and keys whose product holds the mask: q·k + m = [q, m/scale]·[k, 1].

    Before the keys stands one of value 0 that only a query that sees no other attends to.
    """
    k, v = (np.pad(x, ((0, 0), (0, 0), (1, 0), (0, 0))) for x in (k, v))
    m = np.maximum(mask, HIDDEN)
    m = np.pad(m, ((0, 0), (0, 0), (0, 0), (1, 0)), constant_values=HIDDEN / 2)
    one = np.broadcast_to(np.eye(k.shape[2], dtype=k.dtype), (*k.shape[:2], *[k.shape[2]] * 2))
    q, k = np.concatenate([q, (m / scale).astype(q.dtype)], -1), np.concatenate([k, one], -1)
    return q, k, v, None if k_len is None else k_len + 1


def scores(q, k, mask, scale, softcap, mode):
    """What enters the softmax: capped (from mode 1), masked (mode 2)."""
    k = np.repeat(k, q.shape[1] // k.shape[1], 1)
    s = on_host(fj.matmul)(q, np.swapaxes(k, 2, 3)) * np.asarray(scale, q.dtype)
    if softcap and mode:
        s = softcap * np.tanh(s / softcap)
    return s + mask if mode == 2 and mask is not None else s


def attention(
    op,
    q,
    k,
    v,
    mask=None,
    past_key=None,
    past_value=None,
    nonpad=None,
    *,
    q_num_heads=None,
    kv_num_heads=None,
    scale=None,
    softcap=0.0,
    is_causal=0,
    left_window_size=-1,
    right_window_size=-1,
    qk_matmul_output_mode=0,
    softmax_precision=None,  # float32 or wider in ours
):
    packed = q.ndim == 3
    if packed:
        q, k, v = split(q, q_num_heads), split(k, kv_num_heads), split(v, kv_num_heads)
    if past_key is not None:
        join = on_host(fj.concat)
        k, v = join(past_key, k, dim=2), join(past_value, v, dim=2)
    present, sq, sk = (k, v), q.shape[2], k.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    left, right = (None if n < 0 else n for n in (left_window_size, right_window_size))
    rules = {"causal": bool(is_causal), "window_size_left": left, "window_size_right": right}
    rules |= {"softmax_scale": scale, "softcap": softcap or None}
    k_len, first = nonpad, places(sq, past_key, nonpad)
    if nonpad is None and (is_causal or left is not None or right is not None):
        k_len = first + sq  # their last query stands there, ours at the last key in use
        if k_len > sk:  # where there are no keys: some for the mask to hide
            mask = np.zeros((sq, sk), q.dtype) if mask is None else mask
            k, v = (np.pad(x, ((0, 0), (0, 0), (0, k_len - sk), (0, 0))) for x in (k, v))
            sk = k_len
    operands = q, k, v, k_len
    if mask is not None:
        mask = additive(mask, (*q.shape[:3], sk), q.dtype)
        operands = masked(q, k, v, mask, scale, k_len)
    attend = lambda q, k, v, k_len: op(q, k, v, None, k_len, **rules)
    y = attend(*operands)
    if qk_matmul_output_mode == 3:  # probabilities: of values that are the identity
        wide_q, wide_k, values, k_len = operands
        one = np.eye(values.shape[2], sk, sk - values.shape[2], dtype=v.dtype)
        one = np.broadcast_to(one, (*v.shape[:2], *one.shape))
        s = lambda: attend(wide_q, wide_k, one, k_len)
    else:
        if is_causal and mask is not None:
            visible = np.arange(sk) <= np.arange(sq)[:, None] + first
            mask = np.where(visible, mask, -np.inf).astype(mask.dtype)
        s = lambda: scores(q, k, mask, scale, softcap, qk_matmul_output_mode)
    if packed:
        y = np.swapaxes(y, 1, 2).reshape(y.shape[0], sq, -1)
    return y, *present, s


def beyond_attention(q, k, v, mask=None, *_, softcap=0.0, **__):
    if mask is not None and softcap:
        return "a mask beside softcap, which would cap the mask's features too"
    return None


# -- attention with a subgraph -------------------------------------------------------------

SUBGRAPHS = {  # what a subgraph does to the scores, by its name and the number it holds
    "score_mod_soft_cap": lambda cap, shape: {"softcap": cap},
    "score_mod_causal_mask": lambda shape: {"is_causal": 1},
    "score_mod_bias": lambda bias, shape: {"mask": np.full(shape, bias, np.float32)},
    "score_mod_relative_positional": lambda shape: {
        "mask": np.float32(np.arange(shape[0])[:, None] - np.arange(shape[1]))
    },
}


def flex(op, q, k, v, *, scale=None, score_mod=None, prob_mod=None):
    rules = {}
    if score_mod is not None:
        held = {t.name: float(array(t)) for t in score_mod.initializer if t.name in ("bias", "cap")}
        rules = SUBGRAPHS[score_mod.name](*held.values(), shape=(q.shape[2], k.shape[2]))
    return attention(op, q, k, v, scale=scale, **rules)[0]


def beyond_flex(*_, scale=None, score_mod=None, prob_mod=None):
    return prob_mod and "a subgraph on the probabilities, inside attention"


# -- positions -----------------------------------------------------------------------------


def rotary(
    op,
    x,
    cos,
    sin,
    positions=None,
    *,
    num_heads=0,
    rotary_embedding_dim=0,
    interleaved=0,
):
    """Half-width tables twice side by side; interleaved pairs are laid out as halves, and back."""
    if x.ndim == 3:
        heads = np.swapaxes(x.reshape(*x.shape[:2], num_heads, -1), 1, 2)
        y = rotary(op, heads, cos, sin, positions)
        return np.swapaxes(y, 1, 2).reshape(x.shape)
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    cos, sin = (np.concatenate([t, t], -1) for t in (cos, sin))
    width = rotary_embedding_dim or x.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    swap = lambda v, *pair: np.swapaxes(v.reshape(*v.shape[:-1], *pair), -1, -2).reshape(v.shape)
    if interleaved:
        turned = swap(turned, width // 2, 2)
    y = np.asarray(jax.vmap(op)(turned, cos, sin))
    if interleaved:
        y = swap(y, 2, width // 2)
    return np.concatenate([y, rest], -1)


# -- linear attention ----------------------------------------------------------------------


def decays_by_key(q, k, v, past=None, decay=None, beta=None, *, kv_num_heads, **_):
    return decay is not None and beta is None and decay.shape[-1] > kv_num_heads


def decays_by_head(*inputs, **attributes):
    return not decays_by_key(*inputs, **attributes)


def beyond_scan(q, k, v, past=None, decay=None, beta=None, **_):
    return None if beta is None else "the delta rule, whose state depends on what it recalls"


def linear_attention(op, q, k, v, past=None, decay=None, *, q_num_heads, kv_num_heads, update_rule):
    """SSD with dt the logarithm of the decay and a = 1, or without decay dt = 1 and a = 0."""
    assert past is None
    q, k, v = (x.reshape(*x.shape[:2], kv_num_heads, -1) for x in (q, k, v))
    dt = np.ones(v.shape[:3], v.dtype) if decay is None else decay
    a = np.full(kv_num_heads, 0 if decay is None else 1, v.dtype)
    q = q / np.sqrt(q.shape[-1]).astype(q.dtype)
    y, state = op(v / dt[..., None], dt, a, k, q, chunk_size=q.shape[1])
    return y.reshape(*y.shape[:2], -1), np.swapaxes(state, 2, 3)


def linear_attention_by_key(
    op, q, k, v, past=None, decay=None, *, q_num_heads, kv_num_heads, update_rule
):
    """Every element of the state a channel of its own, whose output is that element."""
    assert past is None
    q, k, v, decay = (x.reshape(*x.shape[:2], kv_num_heads, -1) for x in (q, k, v, decay))
    shape = (*k.shape, v.shape[-1])
    delta = -np.broadcast_to(decay[..., None], shape).reshape(*shape[:2], -1)
    u = (k[..., None] * v[..., None, :]).reshape(delta.shape) / delta
    a, one = -np.ones((delta.shape[-1], 1), u.dtype), np.ones((*shape[:2], 1), u.dtype)
    states, last = op(u, delta, a, one, one)
    q = q / np.sqrt(q.shape[-1]).astype(q.dtype)
    y = on_host(fj.matmul)(q[..., None, :], states.reshape(shape))
    return y.reshape(*shape[:2], -1), last.reshape(shape[0], *shape[2:])


def causal_conv(op, x, w, bias=None, past=None, *, activation="none"):
    taps = w.shape[-1]
    past = np.zeros((*x.shape[:2], taps - 1), x.dtype) if past is None else past
    bias = np.zeros(len(w), x.dtype) if bias is None else bias
    whole = np.concatenate([past, x], -1)
    return op(whole, w, bias, use_silu=activation != "none"), whole[..., x.shape[-1] :]
