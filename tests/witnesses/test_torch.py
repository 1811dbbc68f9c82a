"""PyTorch: its own samples of every op that it shares with us, values and gradients in float64.

The samples are those PyTorch tests its operators with (OpInfo); ``torch_adapters.py`` puts them to
our ops.  What they do not reach is counted in ``LEFT_OUT``, with the reason; ``pytest -rs`` prints
it.
"""

import collections
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuel_jax as F

from .torch_adapters import ADAPTERS, QUICKLY, OutOfReach

torch = pytest.importorskip("torch", reason="PyTorch is not installed: no OpInfo samples")
pytest.importorskip("expecttest", reason="expecttest is not installed: OpInfo imports it")
if not torch.__version__.startswith("2.13."):
    reason = "OpInfo is private to PyTorch; its samples are counted for 2.13"
    pytest.skip(reason, allow_module_level=True)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # PyTorch's own, of deprecated modules it imports
    from torch.testing._internal.common_methods_invocations import op_db

INFOS = {f"{o.name}.{o.variant_test_name}".rstrip("."): o for o in op_db}

NORMS = F.layer_norm_last_dim, F.rms_norm_last_dim
CANCELS = "value only: the gradient of a row of one or two elements all but cancels"
LEFT_OUT = {  # how many samples, for what reason
    "cat": {"an empty vector beside matrices": 1},
    "gather": {"indices of another rank": 1},
    "nn.functional.cross_entropy": {"targets that are probabilities": 10},
    "nn.functional.layer_norm": {"a negative eps": 1, CANCELS: 4},
    "native_layer_norm": {"a negative eps": 4, CANCELS: 12},
    "nn.functional.rms_norm": {"a negative eps": 1, CANCELS: 4},
    "nn.functional.pad.circular": {"mode 'circular'": 8},
    "nn.functional.scaled_dot_product_attention": {"dropout": 12, "a bias on the scores": 1},
}
REASONS = [(name, reason) for name, reasons in LEFT_OUT.items() for reason in reasons]


@pytest.mark.parametrize(("name", "reason"), REASONS)
def test_left_out(name, reason):
    pytest.skip(f"{name}: {LEFT_OUT[name][reason]} left out: {reason}")


# -- the comparison ------------------------------------------------------------------------


def as_numpy(x):
    """A tensor, exactly; halves as float64, which NumPy can hold."""
    x = x.detach()
    return x.double().numpy() if x.is_floating_point() else x.numpy()


def agree(got, want, bound):
    """Equal where not finite, and within ``bound`` of the largest wanted value elsewhere."""
    assert got.shape == want.shape
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    got, want = got[finite], want[finite]
    error = np.abs(got - want).max(initial=0)
    largest = np.abs(want).max(initial=0)
    assert error <= bound * largest, f"off by {error}, the largest is {largest}"


class Case:
    """A sample, PyTorch's answer to it, and a cotangent of that."""

    def __init__(self, info, sample):
        self.leaves, self.tree = jax.tree.flatten((sample.input, list(sample.args), sample.kwargs))
        self.tensors = {i: x for i, x in enumerate(self.leaves) if torch.is_tensor(x)}
        self.wrt = [i for i, x in self.tensors.items() if x.requires_grad]
        if info.name.endswith("attention"):  # of ±9 softmax picks one key, and its slope is noise
            for x in self.tensors.values():
                x.detach().mul_(1 / 8)
        y = info.op(sample.input, *sample.args, **sample.kwargs)
        if info.name == "native_layer_norm":
            y = y[0]  # mean and deviation are no outputs of ours
        self.want = y if isinstance(y, tuple) else (y,)
        differentiable = self.wrt and self.want[0].requires_grad
        self.cotangent = torch.randn_like(self.want[0]) if differentiable else None

    def arrays(self):
        """What is traced."""
        given = {i: jnp.asarray(x.detach().numpy()) for i, x in self.tensors.items()}
        return given, None if self.cotangent is None else jnp.asarray(as_numpy(self.cotangent))

    def answer(self, adapter, given, cotangent):
        """Our values, and the gradients of what PyTorch differentiates."""

        def ours(active):
            leaves = dict(enumerate(self.leaves)) | given | active
            first, args, kwargs = self.tree.unflatten(leaves.values())
            y = adapter(first, *args, **kwargs)
            return y[0] if isinstance(y, tuple) else y, jax.tree.leaves(y)

        active = {i: given[i] for i in self.wrt}
        if cotangent is None:
            return ours(active)[1], {}
        _, pull, values = jax.vjp(ours, active, has_aux=True)
        return values, pull(cotangent.astype(values[0].dtype))[0]

    def compare(self, op, values, gradients):
        bound = op.precision.tolerance(np.float64)
        for y, t in zip(values, self.want, strict=True):
            agree(y, as_numpy(t), bound)
        if self.cotangent is None:
            return
        if op in NORMS and values[0].shape[-1] <= 2:
            raise OutOfReach(CANCELS)
        wrt = [self.tensors[i] for i in self.wrt]
        want = torch.autograd.grad(self.want[0], wrt, self.cotangent)
        for i, t in zip(self.wrt, want, strict=True):
            agree(gradients[i], as_numpy(t), bound)

    def __str__(self):
        shape = lambda x: f"{x.dtype}{list(x.shape)}".removeprefix("torch.")
        return str(
            self.tree.unflatten([shape(x) if torch.is_tensor(x) else x for x in self.leaves])
        )


def together(op, adapter, cases):
    """The answer to each case, or what it raised; compiled as one program."""
    raised = {}

    def program(inputs):
        answers = []
        for i, (case, arrays) in enumerate(zip(cases, inputs, strict=True)):
            try:
                answers.append(case.answer(adapter, *arrays))
            except (OutOfReach, F.FuelError, TypeError) as error:
                raised[i] = error
                answers.append(None)
        return answers

    if op is not F.nonzero_indices:  # whose count is read
        program = jax.jit(program, compiler_options=QUICKLY)
    answers = program([case.arrays() for case in cases])
    return [raised.get(i, answer) for i, answer in enumerate(answers)]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")  # its copy
@pytest.mark.parametrize("name", ADAPTERS)
def test_samples(name):
    info, (op, adapter) = INFOS[name], ADAPTERS[name]
    torch.manual_seed(0)
    samples = info.sample_inputs("cpu", torch.float64, requires_grad=info.supports_autograd)
    cases = [Case(info, sample) for sample in samples]
    left_out, failed = collections.Counter(), []
    for case, answer in zip(cases, together(op, adapter, cases), strict=True):
        try:
            if isinstance(answer, Exception):
                raise answer
            case.compare(op, *answer)
        except OutOfReach as reason:
            left_out[str(reason)] += 1
        except (AssertionError, F.FuelError, TypeError) as error:
            failed.append(f"sample {cases.index(case)}, {case}: {error}")
    assert not failed, "\n".join(failed)
    assert left_out == LEFT_OUT.get(name, {})
