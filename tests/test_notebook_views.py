"""What ops, tables and explanations look like in a terminal and in a notebook."""

import xml.etree.ElementTree as ET

import jax.numpy as jnp
import pytest

import fuel_jax
from fuel_jax import FUSED, OPS, FusedOps, OpKind


def cells(markup):
    """The rows of a table, as text; the markup is well formed."""
    tree = ET.fromstring(f"<div>{markup}</div>")
    return [["".join(cell.itertext()) for cell in row.iter("td")] for row in tree.iter("tr")]


X = jnp.ones((2, 300))
SHOWN = [
    pytest.param(fuel_jax.softmax_last_dim, id="an op"),
    pytest.param(fuel_jax.step, id="an op whose formula has < and >"),
    pytest.param(OPS, id="OPS"),
    pytest.param(FUSED, id="FUSED"),
    pytest.param(fuel_jax.softmax_last_dim.explain(X), id="an explanation"),
    pytest.param(fuel_jax.fuse.report(lambda x: x)(X), id="a fuse report"),
]


@pytest.mark.parametrize("shown", SHOWN)
def test_is_well_formed_and_leaves_colours_to_the_page(shown):
    markup = shown._repr_html_()
    ET.fromstring(f"<div>{markup.replace('<br>', '<br/>')}</div>")
    assert "color" not in markup


def test_tables_have_a_row_for_each():
    assert [key for key, _ in cells(OPS._repr_html_())] == [kind.name for kind in OPS]
    assert ["SOFTMAX_LAST_DIM", fuel_jax.softmax_last_dim.usage()] in cells(FUSED._repr_html_())
    for table, name in ((OPS, "OPS, by kind"), (FUSED, "FUSED, by id")):
        first, *rows = repr(table).splitlines()
        assert first == name
        assert len(rows) == len([op for op in table.values() if op])


def test_tables_are_read_only_mappings():
    assert set(OPS) == set(OpKind)
    assert FUSED[FusedOps.ROPE] is FUSED[5] is fuel_jax.rope
    assert FUSED.get(999) is None
    with pytest.raises(TypeError):
        OPS[OpKind.MatMul] = None  # pyright: ignore


def test_a_runtime_op_is_among_them_while_it_is_registered():
    op = fuel_jax.register_fused("shifted", lambda x: x + 1)
    try:
        assert FUSED[op.id] is op
        assert "shifted(x" in repr(FUSED)
    finally:
        fuel_jax.unregister_fused("shifted")
    assert "shifted(x" not in repr(FUSED)


def test_an_explanation_says_who_runs_and_why_not_the_others():
    said = fuel_jax.softmax_last_dim.explain(X)
    rows = cells(said._repr_html_())
    assert {way for way, _, _ in rows} == {"forward", "backward"}
    assert ["forward", "xla", "serves every platform"] in rows
    assert str(said).count("\n") == len(rows)
    text = fuel_jax.exp.explain(X)
    assert ["backward", "", "derivative of whatever runs forward"] in cells(text._repr_html_())
