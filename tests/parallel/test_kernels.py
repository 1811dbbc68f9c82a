"""Kernels on split operands under jit: one device's results, and no byte sent that need not be.

``test_rules`` has every op by what serves here; these are other kernels, and other splits.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import fuel_jax
from fuel_jax._choose import PIN
from fuel_jax._op import as_tuple
from fuel_jax.fused.flash_attn import flash_attn_backward
from fuel_jax.types import Array, Floats

from .counted import collectives, largest_error, predicted, sent

TOLERANCE = 2e-5


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((2, 2), ("i", "j"), axis_types=(kind, kind), devices=jax.devices()[:4])


def normal(*shape, scale=1.0):
    rng = np.random.default_rng(math.prod(shape))
    return jnp.asarray(scale * rng.normal(size=shape), "float32")


def attention(h, hk):
    return normal(4, h, 6, 4), normal(4, hk, 8, 4), normal(4, hk, 8, 4)


ROWS, COLUMNS = P(("i", "j")), P(None, "j")
NF4 = (normal(4, 64), jnp.arange(8 * 32, dtype="uint8").reshape(8, 32), jnp.abs(normal(8, 1)))

CASES = {  # op, its kernel, operands, their layouts, parameters
    "softmax": ("softmax_last_dim", "triton", (normal(8, 4, 6),), (P("i", "j"),), {}),
    "rms_norm": ("rms_norm_last_dim", "triton", (normal(8, 6),), (ROWS,), {}),
    "layer_norm": ("layer_norm_last_dim", "triton", (normal(4, 4, 6),), (COLUMNS,), {}),
    "alibi": (
        *("flash_attn", "chunked", (*attention(4, 2), normal(4))),
        *((*3 * (P("i"),), P()), {"causal": True, "return_lse": True}),
    ),
    "one key head": ("flash_attn", "chunked", attention(4, 1), (COLUMNS, P(), P()), {}),
    "images": (
        *("conv2d", "product", (normal(4, 2, 5, 5), normal(3, 2, 1, 1), normal(3))),
        *((P("i"), P(), P()), {}),
    ),
    "columns of nf4": ("nf4_matmul", "blocked", NF4, (P("i"), P("j"), P("j")), {}),
    "linear": (
        *("fused_linear", "xla", (normal(4, 6), normal(6, 8), normal(8))),
        *((P("i"), P(None, "j"), P("j")), {}),
    ),
    "running sum": ("cumsum", "steps", (normal(20, 4),), (COLUMNS,), {"dim": 0}),
}


def with_gradient(f, arrays):
    """Results, and gradients for cotangents that are laid out as the results."""
    at = tuple(i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating))

    def run(*arrays):
        def of(*floats):
            every = dict(zip(at, floats, strict=True))
            return f(*(every.get(i, x) for i, x in enumerate(arrays)))

        y, pull = jax.vjp(of, *(arrays[i] for i in at))
        return y, pull(jax.tree.map(jnp.cos, y))

    return run


@pytest.mark.parametrize("case", [case for case in CASES if case != "linear"])
def test_parts_stay_where_they_are(case):
    """0 all-gathers; all-reduces of what the rule says is a sum, forward and backward, only."""
    name, kernel, arrays, specs, params = CASES[case]
    op, mesh = getattr(fuel_jax, name), mesh_of()
    f = functools.partial(op.using(kernel), **params)
    back = getattr(op, "backward", None)
    differentiable = name not in ("nf4_matmul", "cumsum")
    program = with_gradient(f, arrays) if differentiable else f
    want = jax.jit(program)(*arrays)
    given = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]
    assert largest_error(jax.jit(program)(*given), want) < TOLERANCE

    bound, operands = op._bind(given, params)
    y = op.out(*arrays, **params)
    rule = op.sharding(*arrays, **params)
    split = rule.split(mesh, [tuple(s) for s in specs])
    assert split, "nothing is split"
    count = predicted(rule, split, mesh, as_tuple(y))
    if differentiable and isinstance(back, fuel_jax.FusedOp):
        asked = bound | op._returning_all()
        outputs = as_tuple(jax.eval_shape(functools.partial(op.body, **asked), *operands))
        pool = op._named(asked, operands, outputs) | op._cotangents(asked, outputs)
        static = {n: asked[n] for n in back.params}
        grads = as_tuple(back.out(*(pool[n] for n in back.inputs), **static))
        its = back._rule(static, [pool[n] for n in back.inputs], grads)
        count += predicted(its, split, mesh, grads)
    found = collectives(program, *given)
    assert set(found) <= {"all-reduce"}, found
    assert found.get("all-reduce", 0) == count


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("kernel", ["rows", "triton"])
def test_rows_of_a_loss(kernel, reduction):
    """Scalars are summed, rows and logits are not."""
    x, t = normal(8, 12), jnp.arange(8, dtype="int32")
    ce = fuel_jax.fused_softmax_cross_entropy.using(kernel)
    program = with_gradient(functools.partial(ce, reduction=reduction), (x, t))
    given = [jax.device_put(a, NamedSharding(mesh_of(), ROWS)) for a in (x, t)]
    assert largest_error(jax.jit(program)(*given), jax.jit(program)(x, t)) < TOLERANCE
    found = collectives(program, *given)
    assert set(found) <= {"all-reduce"}, found
    assert found.get("all-reduce", 0) <= 3 * 8  # the loss, and the number of rows kept


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("softmax", AxisType.Auto),
        ("softmax", AxisType.Explicit),
        ("alibi", AxisType.Explicit),
        ("linear", AxisType.Explicit),
    ],
)
def test_in_a_mesh_s_context(case, kind):
    """Eager, and mapped along an axis that is whole or split; the result lies as the operands do.

    Along the one that is split every device has its examples, and the gradient of each is whole.
    """
    name, kernel, arrays, specs, params = CASES[case]
    f = functools.partial(getattr(fuel_jax, name).using(kernel), **params)
    want, stacked = f(*arrays), [jnp.stack([x, 2 * x]) for x in arrays]
    program = jax.vmap(with_gradient(f, arrays))
    want_all = jax.jit(program)(*stacked)
    with jax.set_mesh(mesh_of(kind)):
        given = [jax.device_put(x, s) for x, s in zip(arrays, specs, strict=True)]
        y = f(*given)
        first = as_tuple(y)[0].sharding.spec
        assert tuple(first)[: len(specs[0])] == tuple(specs[0])
        assert largest_error(y, want) < TOLERANCE
        for axis, inner in ((None, specs), ("i", [P(*without(s, "i")) for s in specs])):
            layouts = [P(axis, *s) for s in inner]
            given = [jax.device_put(x, s) for x, s in zip(stacked, layouts, strict=True)]
            compiled = jax.jit(program).lower(*given).compile()
            assert largest_error(compiled(*given), want_all) < TOLERANCE
            sums = sent(compiled.as_text())
            assert set(sums) <= {"all-reduce"}
            if case == "softmax":
                assert not sums


def without(spec, name):
    """A layout that leaves a mesh axis alone."""
    return (None if axis == name else axis for axis in spec)


def test_derivatives_of_linear_ops_stay_with_their_rows():
    """Forward, backward, and mapped over the axis that is split."""
    x, at = normal(8, 2, 70), jnp.asarray([69, 3, 3, 100])
    ops = [
        functools.partial(fuel_jax.cumsum.using("triton"), dim=-1),
        lambda x: fuel_jax.index_select(x, at, dim=-1),
        lambda x: fuel_jax.scatter_add(x, jnp.tile(at, (*x.shape[:-1], 1)), x[..., :4], dim=-1),
    ]

    def every(x, g):
        each = lambda f: jax.vmap(lambda x: jax.vjp(f, x)[1](jnp.cos(f(x)))[0])(x)
        first = ops[0]
        plainly = jax.vjp(first, x)[1](g), jax.jvp(first, (x,), (g,)), jax.vmap(first)(x)
        return plainly, list(map(each, ops))

    want = jax.jit(every)(x, jnp.cos(x))
    given = [jax.device_put(a, NamedSharding(mesh_of(), P("i"))) for a in (x, jnp.cos(x))]
    compiled = jax.jit(every).lower(*given).compile()
    same = lambda found: jax.tree.map(lambda y: jnp.where(jnp.isnan(y), 7.0, y), found)
    assert largest_error(same(compiled(*given)), same(want)) < TOLERANCE
    assert not sent(compiled.as_text())


def test_a_gradient_is_summed_over_the_devices_that_split_and_no_others():
    """With explicit axes, of which one splits nothing: by ``shard_map``, in parts."""
    x, mesh = normal(8, 2, 70), mesh_of(AxisType.Explicit)
    every = lambda x: jax.vjp(functools.partial(fuel_jax.cumsum, dim=-1), x)[1](jnp.cos(x))
    with jax.set_mesh(mesh):
        given = jax.device_put(x, P("i"))
        assert largest_error(jax.jit(every)(given), jax.jit(every)(x)) < TOLERANCE
        assert not collectives(every, given)


def test_inside_shard_map_a_kernel_sees_its_part():
    x = normal(8, 4, 6)
    f = fuel_jax.softmax_last_dim.using("triton")
    mesh = mesh_of()
    mapped = jax.shard_map(f, mesh=mesh, in_specs=ROWS, out_specs=ROWS, check_vma=False)
    given = jax.device_put(x, NamedSharding(mesh, ROWS))
    assert largest_error(mapped(given), f(x)) < TOLERANCE
    assert not collectives(mapped, given)


def test_an_axis_that_must_be_whole_is_gathered():
    x = normal(4, 8)
    f = fuel_jax.softmax_last_dim.using("triton")
    given = jax.device_put(x, NamedSharding(mesh_of(), COLUMNS))
    assert largest_error(f(given), f(x)) < TOLERANCE
    assert set(collectives(f, given)) == {"all-gather"}
    with PIN("triton"):
        says = fuel_jax.softmax_last_dim.explain(given)
    assert says.devices[0] == "batch_0 n -> batch_0 n"
    assert says.devices[-1] == "XLA reshards x: axis 1 is split over j, and n must be whole"


def test_explain_says_what_is_split_summed_and_resharded():
    mesh = mesh_of()
    lay = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    q, k, v = attention(8, 4)
    with PIN("chunked"):
        says = fuel_jax.flash_attn.explain(lay(q, "i", "j"), lay(k, "i", None, "j"), v)
        assert says.devices[1:] == [
            "each device computes its part: b over i, hk over j",
            "XLA reshards k: axis 2 is split over j, and sk must be whole",
        ]
        assert "devices   each device computes" in str(says)
        assert not fuel_jax.flash_attn.explain(q, k, v).devices
        q_i, lse = lay(q, "i"), normal(*q.shape[:3])
        back = flash_attn_backward.explain(q_i, k, v, q, lse, q, None, normal(8))
        assert back.devices[1:] == [
            "each device computes its part: b over i",
            "result 3 is summed over i",
        ]
    plain = fuel_jax.neg.explain(lay(q, "i"))
    assert plain.devices == ("xla serves, and splits it as it can",)
    with PIN("triton"):
        layout = NamedSharding(mesh, P("i"))
        odd = jax.ShapeDtypeStruct((3, 4), "float32", sharding=layout)
        says = fuel_jax.softmax_last_dim.explain(odd)
        assert says.devices[1:] == [
            "each computes the whole",
            "XLA reshards x: axis 0 is split over i, and the 3 of batch_0 are not a multiple of "
            "the devices",
        ]


def test_a_part_is_served_by_what_serves_its_size():
    """The whole is long enough for the kernel, a part is not."""

    def halved(x: Floats[Array, "*shape"]) -> Floats[Array, "*shape"]:
        return x / 2

    op = fuel_jax.register_fused("halved", halved, splits="*shape")
    short = lambda x: "few" if x.shape[0] < 8 else None
    op.kernel("long", declines=short)(lambda x: x / 2 + 1)
    try:
        x = jnp.zeros((8, 2), "float32")
        assert op(x)[0, 0] == 1
        assert op(jax.device_put(x, NamedSharding(mesh_of(), P("i"))))[0, 0] == 0
    finally:
        fuel_jax.unregister_fused("halved")


@pytest.mark.parametrize("name", ["max_reduce", "argmin_dim"])
def test_an_extreme_along_a_split_axis(name):
    """XLA's CPU backend does not compile its reductions there."""
    x = normal(20, 4).at[3, 1].set(jnp.nan)
    dim = {"dim": 0} if name == "argmin_dim" else {"dims": 0}
    f = functools.partial(getattr(fuel_jax, name), **dim)
    given = jax.device_put(x, NamedSharding(mesh_of(), P("i")))
    np.testing.assert_array_equal(f(given), f(x))
