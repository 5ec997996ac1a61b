"""rlgraph.graph.capture: what a replay computes, on a CPU (run directly) and on a GPU (captured)."""

import warnings

import pytest
import torch

from rlgraph.errors import CaptureError, UsageError
from rlgraph.graph.capture import capture
from rlgraph.graph.uncapturable import _is_a_fill

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Walk:
    """A random walk with state updated in place: what a captured function looks like."""

    def __init__(self, device, seed=0):
        self.generator = torch.Generator(device).manual_seed(seed)
        self.position = torch.zeros(5, device=device)
        self.scale = torch.ones((), device=device)

    def step(self):
        noise = torch.rand(5, generator=self.generator, device=self.position.device)
        self.position.add_(noise * self.scale)
        return self.position * 2, noise

    def captured(self, **kwargs):
        return capture(self.step, state=[self.position, self.scale], generators=[self.generator], **kwargs)


@pytest.mark.parametrize("device", DEVICES)
def test_replays_equal_direct_calls_to_the_last_bit_with_resets_between(device):
    direct, replayed = Walk(device), Walk(device)
    graph = replayed.captured()
    for i in range(12):
        if i % 4 == 3:
            for walk in (direct, replayed):
                walk.position.zero_()
        expected, noise = direct.step()
        doubled, drawn = graph.replay()
        assert torch.equal(doubled, expected), f"replay {i}"
        assert torch.equal(drawn, noise), f"replay {i}"
    assert graph.replays == 12
    assert graph.captured == (device == "cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_capture_leaves_no_trace(device):
    walk = Walk(device)
    position, random_state = walk.position.clone(), walk.generator.get_state()
    walk.captured(warmup=5)
    assert torch.equal(walk.position, position)
    assert torch.equal(walk.generator.get_state(), random_state)


@pytest.mark.parametrize("device", DEVICES)
def test_trials_begin_where_a_replay_will(device):
    """What counts rows of a buffer that is as long as the run: its second call would write beyond the end."""
    row, rows = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, 3, device=device)

    def write():
        rows.index_copy_(0, row, torch.ones(1, 3, device=device))
        row.add_(1)

    graph = capture(write, state=[row, rows])
    assert (row.item(), rows.sum().item()) == (0, 0)
    graph.replay()
    assert (row.item(), rows.sum().item()) == (1, 3)


@pytest.mark.parametrize("device", DEVICES)
def test_every_replay_draws_fresh_numbers_and_a_seed_set_after_the_capture_counts(device):
    walk = Walk(device)
    graph = walk.captured()
    draws = [graph.replay()[1].clone() for _ in range(4)]
    assert len({tuple(d.tolist()) for d in draws}) == 4
    walk.generator.manual_seed(0)
    assert torch.equal(graph.replay()[1], draws[0])
    walk.generator.manual_seed(1)
    assert not torch.equal(graph.replay()[1], draws[0])


@pytest.mark.parametrize("device", DEVICES)
def test_a_value_kept_in_a_tensor_may_change_between_replays(device):
    walk = Walk(device)
    graph = walk.captured()
    graph.replay()
    before = walk.position.clone()
    walk.scale.zero_()
    graph.replay()
    assert torch.equal(walk.position, before)


@pytest.mark.parametrize("device", DEVICES)
def test_inputs_are_copied_into_static_buffers(device):
    def double(x):
        return x * 2

    given = torch.arange(4.0, device=device)
    graph = capture(double, given)
    assert graph.replay(given + 1).tolist() == [2, 4, 6, 8]
    assert given.tolist() == [0, 1, 2, 3]
    assert graph.replay().tolist() == [2, 4, 6, 8]  # nothing given: the last inputs stand


def test_an_input_with_a_gradient_leaves_none_in_the_buffers():
    seen = []

    def double(x):
        seen.append(x.requires_grad)
        return x * 2

    graph = capture(double, torch.zeros(3), watch=False)  # which would not let it fill a list
    graph.replay(torch.ones(3, requires_grad=True))
    graph.replay(torch.ones(3, requires_grad=True))
    assert not any(seen)


@pytest.mark.parametrize("device", DEVICES)
def test_outputs_are_the_same_tensors_every_time(device):
    graph = capture(lambda x: x + 1, torch.zeros(3, device=device))
    first = graph.replay(torch.zeros(3, device=device))
    second = graph.replay(torch.ones(3, device=device))
    assert first is second
    assert first.tolist() == [2, 2, 2]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((torch.zeros(4),), r"captured as torch.float32\[3\], got torch.float32\[4\]"),
        ((torch.zeros(3, dtype=torch.float64),), r"got torch.float64\[3\]"),
        ((torch.zeros(3), torch.zeros(3)), "captured with 1 inputs, got 2"),
    ],
)
def test_wrong_inputs_are_refused(device, inputs, message):
    graph = capture(lambda x: x + 1, torch.zeros(3, device=device))
    with pytest.raises(ValueError, match=message):
        graph.replay(*(x.to(device) for x in inputs))


@pytest.mark.parametrize(("device", "other"), [("cpu", "meta"), pytest.param("cuda", "cpu", marks=pytest.mark.gpu)])
def test_an_input_on_another_device_is_refused_not_copied(device, other):
    graph = capture(lambda x: x + 1, torch.zeros(3, device=device))
    with pytest.raises(ValueError, match=rf"captured on {device}.*, got one on {other}: move it there first, by .to\("):
        graph.replay(torch.zeros(3, device=other))
    assert graph.replays == 0


def test_an_input_that_is_no_tensor_and_a_device_that_is_not_there_are_refused():
    with pytest.raises(UsageError, match="cuda:99"):
        capture(lambda: None, device="cuda:99")
    with pytest.raises(UsageError, match=r"input 1 of <lambda> is of type float: an input is a tensor"):
        capture(lambda x, y: x + y, torch.zeros(3), 1.0)


@pytest.mark.parametrize("device", DEVICES)
def test_after_reset_a_replay_is_refused(device):
    walk = Walk(device)
    graph = walk.captured()
    graph.replay()
    graph.reset()
    graph.reset()
    with pytest.raises(RuntimeError, match="released by reset"):
        graph.replay()
    walk.step()  # the function itself still works
    assert walk.captured().replay() is not None


def _reads_a_value(x):
    return x * float(x.sum())


def _branches(x):
    if x.sum() > 0:
        return x
    return -x


def _masks(x):
    return x[x > 0].sum()


def _finds(x):
    return torch.nonzero(x).sum()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("fn", "operation", "advice"),
    [
        (_reads_a_value, "_local_scalar_dense", "torch.where"),
        (_branches, "_local_scalar_dense", "torch.where"),
        (_masks, "masked", "torch.where"),
        (_finds, "nonzero", "torch.where"),
        (lambda x: x.masked_select(x > 0), "masked_select", "torch.where"),
        (lambda x: x.__setitem__(x > 1, x[:2]), "masked", "torch.where"),
        (lambda x: x.unique(), "_unique2", "torch.sort"),
        (lambda x: x[None].unique(dim=1), "unique_dim", "torch.sort"),
        (lambda x: x.unique_consecutive(), "unique_consecutive", "torch.sort"),
        (lambda x: x.long().bincount(), "bincount", "scatter_add_"),
        (lambda x: x.repeat_interleave(x.long()), "repeat_interleave", "output_size"),
        (lambda x: x * torch.equal(x, x + 0), "equal", "(a == b).all()"),
        (lambda x: x * torch.allclose(x, x), "allclose", "torch.isclose"),
        (lambda x: torch.linalg.inv(x.diag() + 1), "_linalg_check_errors", "inv_ex"),
    ],
)
def test_what_cannot_be_captured_is_named_with_its_line_and_its_cure(device, fn, operation, advice):
    x = torch.arange(4.0, device=device)
    with pytest.raises(CaptureError) as error:
        capture(fn, x)
    message = str(error.value)
    assert fn.__name__ in message
    assert operation in message
    assert advice in message
    assert "test_capture.py:" in message
    assert capture(lambda x: x + 1, x).replay(x).tolist() == [1, 2, 3, 4]  # and the process goes on


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("fn", "operation"),
    [
        (lambda x: x * x[1].item(), "_local_scalar_dense"),
        (_branches, "_local_scalar_dense"),
        (lambda x: x.argwhere(), "nonzero"),
        (lambda x: torch.where(x > 1)[0], "nonzero"),
        (lambda x: x.repeat_interleave(x.long()), "repeat_interleave"),
        (lambda x: torch.linalg.inv(x.diag() + 1), "_linalg_check_errors"),
    ],
)
def test_inference_mode_hides_none_of_it(device, fn, operation):
    x = torch.arange(4.0, device=device)
    with pytest.raises(CaptureError, match=rf"cannot be captured: {operation}: .*test_capture.py:"):
        capture(torch.inference_mode()(fn), x)


@pytest.mark.parametrize("device", DEVICES)
def test_inference_mode_forbids_nothing_more(device):
    x = torch.arange(4.0, device=device)
    graph = capture(
        torch.inference_mode()(
            lambda x: x.repeat_interleave(2).reshape(4, 2).to(torch.float64) @ x.new_ones(2).double()
        ),
        x,
    )
    assert graph.replay().tolist() == [0, 2, 4, 6]


def test_only_a_mask_on_the_same_device_makes_a_fill():
    """With one on another, torch looks up where it is true."""
    mask, value = torch.tensor([True, False]), torch.tensor(0.0)
    for device, fill in (("cpu", True), ("meta", False)):
        assert _is_a_fill("index_put_", (torch.ones(2, device=device), [mask], value)) == fill


@pytest.mark.parametrize("device", DEVICES)
def test_what_looks_like_it_but_can_be_captured(device):
    x = torch.arange(4.0, device=device)
    ones = torch.ones(4, dtype=torch.int64, device=device)

    def fill(x):
        y = x.repeat_interleave(ones, output_size=4)
        y[y > 1] = 0.5
        return y

    graph = capture(fill, x)
    assert graph.replay().tolist() == [0, 1, 0.5, 0.5]
    assert graph.replay(x - 1).tolist() == [-1, 0, 1, 0.5]


def test_a_long_line_is_cut():
    x = torch.ones(1)
    with pytest.raises(CaptureError) as error:
        capture(lambda x: x.item() + 1000000000 + 1000000000 + 1000000000 + 1000000000 + 1000000000 + 1000000000, x)
    assert str(error.value).endswith("1000000000 + 100000...)") and len(str(error.value)) < 400


def test_without_cuda_it_says_once_that_nothing_is_captured():
    from rlgraph.graph import capture as module

    module._say_once_that_nothing_is_captured.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            capture(lambda x: x + 1, torch.zeros(2))
    assert [str(w.message) for w in said] == [
        "no CUDA graph on cpu: the function is run directly, with the same buffers"
    ]
    assert said[0].filename == __file__  # where it was captured


def test_a_device_that_is_not_there_is_told_in_a_line():
    with pytest.raises(UsageError, match="unknown device 'foo'"):
        capture(lambda x: x + 1, torch.zeros(2), device="foo")


def test_an_input_that_is_no_tensor_is_told_in_a_line():
    with pytest.raises(ValueError, match="input 0 of <lambda> is a tensor, not of type float"):
        capture(lambda x: x + 1, torch.zeros(2)).replay(1.0)


@pytest.mark.gpu
def test_a_copy_to_the_host_is_named():
    with pytest.raises(CaptureError, match="copy to host"):
        capture(lambda x: x.cpu(), torch.zeros(3, device="cuda"))


def _makes_a_constant(x):
    return x + torch.tensor(1.0, device="cuda")


def _draws_from_a_stranger(x, generator=[]):  # noqa: B006 - made on first use, on the device
    if not generator:
        generator.append(torch.Generator("cuda"))
    return x + torch.rand(4, generator=generator[0], device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("fn", [_makes_a_constant, _draws_from_a_stranger])
def test_an_error_inside_warm_up_or_capture_names_the_line_and_leaves_the_process_usable(fn):
    x = torch.arange(4.0, device="cuda")
    for _ in range(2):
        with pytest.raises(CaptureError, match=r"test_capture.py:\d+"):
            capture(fn, x)
        torch.cuda.synchronize()
        walk, direct = Walk("cuda"), Walk("cuda")
        graph = walk.captured()
        for _ in range(3):
            assert torch.equal(graph.replay()[0], direct.step()[0])


@pytest.mark.gpu
def test_what_launches_nothing_is_an_error_and_without_tensors_a_gpu_is_taken():
    x, on_host = torch.zeros(3, device="cuda"), torch.zeros(3)
    graph = capture(lambda: x + 1)
    assert graph.captured
    assert torch.equal(graph.replay(), x + 1)
    with pytest.raises(CaptureError, match="launches nothing on cuda:0: name the device"):
        capture(lambda: on_host.add_(1), watch=False)
    assert torch.equal(capture(lambda: x + 2).replay(), x + 2)
    views = capture(lambda x: x[1:], x)
    assert views.replay(torch.arange(3.0, device="cuda")).tolist() == [1, 2]


@pytest.mark.gpu
def test_a_graph_may_share_another_ones_pool():
    x = torch.ones(1 << 20, device="cuda")
    first = capture(lambda x: (x * 2).sum(), x)
    second = capture(lambda x: (x * 3).sum(), x, pool=first.pool)
    assert first.replay().item() == 2 << 20
    assert second.replay().item() == 3 << 20


@pytest.mark.gpu
def test_capture_on_the_last_device_while_the_first_is_current():
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    with torch.cuda.device(0):
        walk, direct = Walk(device), Walk(device)
        graph = walk.captured()
        for _ in range(3):
            assert torch.equal(graph.replay()[0], direct.step()[0])
