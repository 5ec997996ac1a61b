"""What a step takes as actions: arrays of any library, and one line for everything else."""

import array
import subprocess
import sys
import warnings
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import rlgraph
from rlgraph.vector import arrays

pytestmark = pytest.mark.usefixtures("compilation_once")
BACKENDS = ("torch", "jax")
FORCE = [[0.5], [-1.5]]


class WithDLPack:
    """An array of a library that nobody knows, which offers DLPack alone."""

    def __init__(self, held):
        self.held = held

    def __dlpack__(self, **kwargs):
        return self.held.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.held.__dlpack_device__()


class WithArray:
    def __init__(self, make):
        self.make = make

    def __array__(self, dtype=None, copy=None):
        return self.make()


def failing():
    raise RuntimeError("no numbers here\nnor there")


def read_only(values):
    made = np.array(values)
    made.flags.writeable = False
    return made


def an_inference_tensor(values):
    with torch.inference_mode():
        return torch.tensor(values)


def deleted():
    made = jnp.array([1, 0]) + 0
    made.delete()
    return made


def quietly(make, *args, **kwargs):
    """Deprecated, in beta, a prototype: torch warns of most of its odd tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(*args, **kwargs)


def holding_itself():
    made = []
    made.append(made)
    return made


DISCRETE = {
    "numpy's, read only": read_only([1, 0]),
    "numpy's, of another byte order": np.array([1, 0], ">i4"),
    "numpy's, of objects": np.array([1, np.int8(0)], object),
    "numpy's, with a mask of nothing": np.ma.array([1, 0], mask=[0, 0]),
    "a memoryview": memoryview(np.array([1, 0])),
    "an array.array": array.array("q", [1, 0]),
    "a range": range(1, -1, -1),
    "torch's, of uint64": torch.tensor([1, 0], dtype=torch.uint64),
    "torch's, with gaps": torch.tensor([1, 5, 0, 5])[::2],
    "torch's, of inference mode": an_inference_tensor([1, 0]),
    "torch's and a number in a list": [torch.tensor(1), 0],
    "JAX's, of int4": jnp.array([1, 0], jnp.int4),
    "JAX's, in a list": [jnp.array(1), jnp.array(0)],
    "with __array__ alone": WithArray(lambda: np.array([1, 0])),
    "with DLPack alone": WithDLPack(np.array([1, 0])),
    "JAX's behind DLPack alone": WithDLPack(jnp.array([1, 0])),
}
BOX = {
    "numpy's, long double": np.array(FORCE, np.longdouble),
    "numpy's, column by column": np.asfortranarray(np.array(FORCE)),
    "a fraction in a list": [[Fraction(1, 2)], [-1.5]],
    "torch's, with a gradient": torch.tensor(FORCE, requires_grad=True),
    "torch's, of bfloat16, with a gradient": torch.tensor(FORCE, dtype=torch.bfloat16, requires_grad=True),
    "torch's, of float8": torch.tensor(FORCE).to(torch.float8_e5m2),
    "torch's, negated in the view": torch.tensor([[1 - 0.5j], [1 + 1.5j]]).conj().imag,
    "torch's, transposed": torch.tensor([[0.5, -1.5]]).T,
    "torch's, with gradients in nested lists": [[torch.tensor(0.5, requires_grad=True)], [torch.tensor(-1.5)]],
    "torch's, of bfloat16 in a list": [torch.tensor([0.5]).bfloat16(), torch.tensor([-1.5])],
    "a parameter of torch": torch.nn.Parameter(torch.tensor(FORCE)),
    "JAX's, of bfloat16": jnp.array(FORCE, jnp.bfloat16),
    "JAX's, of float8": jnp.array(FORCE, jnp.float8_e4m3fn),
    "JAX's, of bfloat16 in a list": list(jnp.array(FORCE, jnp.bfloat16)),
}


def made(backend, name, **kwargs):
    return rlgraph.make_vec(name, 2, backend, device="cpu", output="numpy", **kwargs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "plain", "others"),
    [("CartPole-v1", np.array([1, 0]), DISCRETE), ("Pendulum-v1", np.array(FORCE, np.float32), BOX)],
)
def test_an_array_of_any_library_is_the_same_action(backend, name, plain, others):
    env = made(backend, name)
    first = env.reset(seed=1)[0]
    want = env.step(plain)[0]
    assert not np.array_equal(first, want)
    for sort, actions in others.items():
        env.reset(seed=1)
        np.testing.assert_array_equal(env.step(actions)[0], want, err_msg=sort)


def test_no_gradient_and_no_memory_is_kept_of_an_action():
    actions = torch.tensor(FORCE, requires_grad=True)
    env = rlgraph.make_vec("Pendulum-v1", 2, device="cpu", seed=1)
    env.reset()
    obs = env.step(actions)[0]
    assert not obs.requires_grad
    kept = obs.clone()
    with torch.no_grad():
        actions.zero_()
    assert torch.equal(obs, kept)


WRONG = [
    (np.array([2**63, 0], np.uint64), ValueError, r"in \[0, 1\], got 0 to 9223372036854775808"),
    (torch.tensor([2**63, 0], dtype=torch.uint64), ValueError, r"in \[0, 1\], got 0 to 9223372036854775808"),
    ([10**25, 0], ValueError, "cannot read list: a number among them does not fit in 64 bits"),
    (np.array([-(10**25), 0], object), ValueError, "does not fit in 64 bits"),
    ([[1, 0], [1]], ValueError, r"must be an array of shape \[2\]; cannot read list: "),
    ([torch.ones(2), torch.ones(3)], ValueError, "cannot read list: "),
    (holding_itself(), ValueError, "cannot read list: "),
    (torch.ones(2, device="meta"), ValueError, "cannot read Tensor: a meta tensor has no numbers"),
    ([torch.ones((), device="meta")] * 2, ValueError, "cannot read list: a meta tensor has no numbers"),
    (torch.tensor([1.0, 0.0]).to_sparse(), ValueError, "nested or sparse tensor is no array: .*to_dense"),
    (quietly(torch.eye(2).to_sparse_csr), ValueError, "nested or sparse tensor is no array"),
    (
        quietly(torch.nested.nested_tensor, [torch.ones(1), torch.ones(2)]),
        ValueError,
        "nested or sparse tensor is no array: .*to_padded_tensor",
    ),
    (
        quietly(torch.nested.nested_tensor, [torch.ones(1), torch.ones(2)], layout=torch.jagged),
        ValueError,
        "nested or sparse tensor is no array",
    ),
    (
        quietly(torch.quantize_per_tensor, torch.ones(2), 0.1, 0, torch.quint8),
        ValueError,
        r"quantized .*dequantize\(\)",
    ),
    (torch.tensor(1), ValueError, r"shape \[2\], got \[\]"),
    (torch.tensor([1j, 0]), TypeError, "must be integers.*got complex numbers"),
    (quietly(torch.ones, 2, dtype=torch.complex32), ValueError, "cannot read Tensor: "),
    (jnp.array([True, False]), TypeError, "got booleans"),
    (torch.tensor([True, False]), TypeError, "got booleans"),
    (["a", "b"], TypeError, "got texts"),
    ([None, 1], TypeError, "got objects"),
    (np.zeros(2, [("a", int)]), TypeError, "must be integers"),
    (np.ma.array([1, 0], mask=[1, 0]), ValueError, "cannot read MaskedArray: some of its entries are masked"),
    (WithArray(failing), ValueError, "cannot read WithArray: no numbers here$"),
    (jax.random.split(jax.random.key(0), 2), ValueError, "cannot read PRNGKeyArray"),
    (deleted(), ValueError, "cannot read ArrayImpl: Array has been deleted"),
    ({0: 1}, ValueError, r"shape \[2\], got \[\]"),
    (b"ab", ValueError, r"shape \[2\], got \[\]"),
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_no_action_is_one_line(backend):
    env = made(backend, "CartPole-v1", seed=1)
    env.reset()
    for actions, kind, text in WRONG:
        with pytest.raises(kind, match=text) as caught:
            env.step(actions)
        assert "\n" not in str(caught.value)
    for actions, text in ((WRONG[0][0], "got 0 to 9223"), ([10**25, 0], "64 bits"), (torch.ones(2).to("meta"), "meta")):
        with pytest.raises(ValueError, match=rf"^[^\n]*{text}[^\n]*$"):
            env.steps([actions, actions])
    with pytest.raises(TypeError, match=r"must be floats; got booleans"):
        other = made(backend, "Pendulum-v1")
        other.reset()
        other.step(torch.ones(2, 1, dtype=torch.bool))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_on_the_host_is_refused_and_an_infinity_is_not(backend):
    env = made(backend, "Pendulum-v1")
    nan = [[float("nan")], [0.0]]
    env.reset(seed=1)
    sorts = [nan, np.array(nan, np.float16), np.array(nan, object), torch.tensor(nan), torch.tensor(nan).bfloat16()]
    for actions in [*sorts, jnp.array(nan, jnp.bfloat16)]:
        with pytest.raises(ValueError, match=r"^actions must be numbers, got NaN: [^\n]*$"):
            env.step(actions)
    want = env.step([[2.0], [-2.0]])[0]
    huge = [[1e300], [-1e300]]  # beyond float32
    for actions in ([[np.inf], [-np.inf]], np.array(huge), torch.tensor(huge, dtype=torch.float64)):
        env.reset(seed=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            np.testing.assert_array_equal(env.step(actions)[0], want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_inside_a_trace_is_one_line(backend):
    env = made(backend, "CartPole-v1")
    env.reset()
    traced = jax.jit(lambda actions: env.step(actions)[0]), torch.vmap(lambda actions: env.step(actions)[0])
    for call, actions in zip(traced, (jnp.array([1, 0]), torch.tensor([[1, 0]]))):
        with pytest.raises(ValueError) as caught:
            call(actions)
        assert str(caught.value).startswith("actions must be an array of shape [2]; cannot read ")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_of_any_library_and_what_is_none(backend):
    env = made(backend, "CartPole-v1", seed=1)
    before = env.reset()[0]
    for mask in (torch.tensor([True, False]), jnp.array([True, False]), WithDLPack(np.array([True, False]))):
        after = env.reset(options={"reset_mask": mask, "low": 1.0, "high": 2.0})[0]
        assert (after[0] >= 1).all()
        np.testing.assert_array_equal(after[1], before[1])
    wrong = [
        ([True, False], TypeError, "must be a numpy or"),
        (torch.ones(2, requires_grad=True), TypeError, "dtype bool, got float32"),
        (torch.ones(2).bfloat16(), TypeError, "dtype bool, got float32"),
        (torch.ones(2, dtype=torch.bool, device="meta"), ValueError, "cannot read Tensor: a meta tensor"),
        (torch.ones(2, dtype=torch.bool).to_sparse(), ValueError, "nested or sparse"),
        (torch.tensor(True), ValueError, r"shape \[2\], got \[\]"),
    ]
    for mask, kind, text in wrong:
        with pytest.raises(kind, match=text) as caught:
            env.reset(options={"reset_mask": mask})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("backend", "own", "other"),
    [("torch", "torch.tensor([0, 1])", "jax"), ("jax", "jax.numpy.array([0, 1])", "torch")],
)
def test_actions_of_its_own_do_not_load_the_other_library(backend, own, other):
    program = f"""
import sys, {backend}, numpy, rlgraph
env = rlgraph.make_vec("CartPole-v1", 2, "{backend}", device="cpu")
env.reset()
for actions in ({own}, numpy.array([0, 1]), [0, 1]):
    env.step(actions)
assert "{other}" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


# ---- from one library's device memory to the other's


def test_tensors_cross_to_jax_without_the_host():
    """The same calls as on a GPU, which the CPU's memory takes too."""
    env = rlgraph.make_vec("CartPole-v1", 3, "jax", device="cpu")
    given = torch.tensor([[1, 7, 2**40], [0, 7, -(2**40)], [1, 7, 0]])[:, ::2]
    taken = env._imported(given)
    assert taken.tolist() == [[1, 2**31 - 1], [0, -(2**31)], [1, 0]], "out of range for JAX, too"
    given.zero_()
    assert taken.tolist()[0][0] == 1, "a copy"
    floats = torch.tensor(FORCE, dtype=torch.bfloat16, requires_grad=True)
    assert env._imported(floats).tolist() == FORCE
    assert env._imported(torch.tensor([True])).dtype == bool
    assert env._imported(WithDLPack(np.array([1, 0], np.int32))).tolist() == [1, 0]
    with pytest.raises(ValueError, match="meta"):
        env._imported(torch.ones(2, device="meta"))


def test_jax_arrays_cross_to_torch_without_the_host():
    env = rlgraph.make_vec("CartPole-v1", 2, "torch", device="cpu")
    assert env._imported(jnp.array([1, 0])).tolist() == [1, 0]
    assert env._imported(jnp.array(FORCE, jnp.bfloat16)).float().tolist() == FORCE


def test_what_is_on_a_gpu():
    assert not any(map(arrays.is_on_cuda, (np.ones(1), torch.ones(1), jnp.ones(1), [1], None, failing)))
    assert not arrays.is_on_cuda(torch.ones(1, device="meta"))

    class OnGpu:
        def __dlpack_device__(self):
            return (2, 0)

    assert arrays.is_on_cuda(OnGpu())


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_arrays_on_a_gpu_are_the_same_actions_from_either_library(backend, name):
    values = [1, 0] if name == "CartPole-v1" else FORCE
    gpu = jax.devices("gpu")[0]
    sorts = [
        torch.tensor(values, device="cuda"),
        torch.tensor([values, values], device="cuda").transpose(0, -1).contiguous().transpose(0, -1)[0],
        [torch.tensor(value, device="cuda") for value in values],
        jax.device_put(np.array(values), gpu),
    ]
    if name == "Pendulum-v1":
        sorts += [
            torch.tensor(values, device="cuda", dtype=torch.bfloat16, requires_grad=True),
            jax.device_put(jnp.array(values, jnp.bfloat16), gpu),
        ]
    for device in ("cpu", "cuda"):
        env = rlgraph.make_vec(name, 2, backend, device=device, output="numpy", mode="eager")
        env.reset(seed=1)
        want = env.step(values)[0]
        # Of the last no library knows how to bring it to the host.
        for actions in [*sorts, *([WithDLPack(sorts[0])] if device == "cuda" else [])]:
            env.reset(seed=1)
            np.testing.assert_array_equal(env.step(actions)[0], want)


@pytest.mark.gpu
def test_a_tensor_that_jax_has_taken_may_be_written_at_once():
    """Its step may still be waiting for the device."""
    env = rlgraph.make_vec("Pendulum-v1", 4096, "jax", device="cuda")
    env.reset(seed=1)
    actions = torch.full((4096, 1), 2.0, device="cuda")
    want = np.asarray(env.step(actions.clone())[0])
    env.reset(seed=1)
    got = env.step(actions)[0]
    actions.fill_(-2.0)
    np.testing.assert_array_equal(np.asarray(got), want)


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "other"), [("jax", "torch"), ("torch", "jax")])
def test_actions_of_the_other_library_do_not_wait_for_the_gpu(backend, other):
    env = rlgraph.make_vec("CartPole-v1", 2, backend, device="cuda")
    env.reset()
    values = np.array([1, 0])
    actions = torch.tensor(values, device="cuda") if other == "torch" else jax.device_put(values, jax.devices("gpu")[0])
    env.step(actions)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with jax.transfer_guard_device_to_host("disallow"):
            env.step(actions)
    finally:
        torch.cuda.set_sync_debug_mode("default")
