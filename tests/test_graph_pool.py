"""rlgraph.graph.pool: any batch size from a few graphs, on a CPU (called with added rows) and on a GPU (captured)."""

import array
import random
import threading
import time

import pytest
import torch

from rlgraph.errors import UsageError
from rlgraph.graph.capture import CaptureError, capture
from rlgraph.graph.pool import SIZES, GraphPool, _fill
from rlgraph.registry import make
from rlgraph.rollout.torch import evaluate
from rlgraph.runs.train import default_config, trainer_class

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
POLICIES = [
    ("ppo", "CartPole-v1"),
    ("ppo", "Pendulum-v1"),
    ("dqn", "CartPole-v1"),
    ("pqn", "CartPole-v1"),
    ("sac", "Pendulum-v1"),
]


def rowwise(obs, gain):
    """Row by row, and exact in small whole numbers, whatever the size."""
    return {"sum": (obs * gain[:, None]).sum(1), "parts": (obs + 1, [gain > 2])}


def numbers(B, device, D=3):
    return torch.arange(float(B * D), device=device).reshape(B, D), torch.arange(B, device=device)


def sizes_of(pool):
    return [size for size, _ in pool.graphs]


@pytest.mark.parametrize("device", DEVICES)
def test_results_are_those_of_the_function_at_every_batch_size(device):
    pool = GraphPool(rowwise, sizes=(8, 1, 2, 4, 16, 32))
    for B in [*range(1, 18), 3, 32, 1]:
        obs, gain = numbers(B, device)
        got, expected = pool(obs, gain), rowwise(obs, gain)
        assert got.keys() == expected.keys()
        assert torch.equal(got["sum"], expected["sum"]), B
        assert torch.equal(got["parts"][0], expected["parts"][0]), B
        assert torch.equal(got["parts"][1][0], expected["parts"][1][0]), B
    assert sorted(sizes_of(pool)) == [1, 2, 4, 8, 16, 32]  # a graph a size, and no other
    assert all(graph.captured == (device == "cuda") for graph in pool.graphs.values())
    assert {size: graph.replays for (size, _), graph in pool.graphs.items()} == {1: 2, 2: 1, 4: 3, 8: 4, 16: 8, 32: 2}


@pytest.mark.parametrize("device", DEVICES)
def test_a_network_gives_the_bits_of_the_graphs_size(device):
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(5, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2)).to(device)
    pool = GraphPool(network, sizes=(8, 64))
    for B in (3, 8, 40):
        obs = torch.randn(B, 5, device=device)
        size = 8 if B <= 8 else 64
        padded = torch.cat([obs, torch.zeros(size - B, 5, device=device)])
        got = pool(obs)
        assert torch.equal(got, network(padded)[:B])
        torch.testing.assert_close(got, network(obs))
        assert not got.requires_grad


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_an_earlier_call_are_gone_also_when_they_were_nan(device):
    total = torch.zeros(2, device=device)

    def masked_mean(obs, valid):
        """Sums over rows, of state and of results alike: right if the added rows are false in the mask."""
        valid = valid[:, None]
        total.add_(torch.where(valid, obs, 0).sum(0))
        return obs, (torch.where(valid, obs, 0).sum(0) / valid.sum()).expand_as(obs)

    def mask(B):
        return torch.ones(B, dtype=torch.bool, device=device)

    pool = GraphPool(masked_mean, sizes=(8,), state=total)
    pool(torch.full((8, 2), torch.nan, device=device), mask(8))
    total.zero_()
    obs = torch.arange(6.0, device=device).reshape(3, 2)
    same, mean = pool(obs, mask(3))
    assert torch.equal(same, obs)
    assert mean.tolist() == [[2, 3]] * 3
    assert total.tolist() == [6, 9]
    (graph,) = pool.graphs.values()
    assert not graph.inputs[0][3:].any()
    assert not graph.inputs[1][3:].any()


@pytest.mark.parametrize("device", DEVICES)
def test_a_nan_stays_in_its_row(device):
    pool = GraphPool(rowwise, sizes=(8,))
    obs, gain = numbers(5, device)
    obs[2] = torch.nan
    assert pool(obs, gain)["sum"].isnan().tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("device", DEVICES)
def test_results_are_the_callers_to_keep_in_any_order_of_sizes(device):
    pool = GraphPool(lambda x: (x.cumsum(1) * 2).flip(1), sizes=SIZES)
    generator = random.Random(0)
    kept = []
    for i in range(60):
        x = torch.full((generator.randint(1, 200), 5), float(i), device=device)
        kept.append((pool(x), (x.cumsum(1) * 2).flip(1)))
    for i, (got, expected) in enumerate(kept):
        assert torch.equal(got, expected), f"call {i}"


@pytest.mark.parametrize("device", DEVICES)
def test_row_shapes_and_dtypes_have_graphs_of_their_own(device):
    pool = GraphPool(lambda x: x + 1, sizes=(4,))
    for x in (
        torch.zeros(3, device=device),
        torch.zeros(3, 1, device=device),
        torch.zeros(3, 2, device=device),
        torch.zeros(3, 2, dtype=torch.int32, device=device),
        torch.zeros(1, 2, dtype=torch.int32, device=device),
        torch.zeros(2, device=device),
    ):
        assert torch.equal(pool(x), x + 1)
        assert pool(x).dtype == x.dtype
    assert [rows for _, rows in pool.graphs] == [
        (((1,), torch.float32),),
        (((2,), torch.float32),),
        (((2,), torch.int32),),
        (((), torch.float32),),  # used last
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_a_bound_releases_the_graph_unused_for_longest(device):
    pool = GraphPool(lambda x: x + 1, sizes=(1, 2, 4), most=2)

    def call(B):
        assert pool(torch.ones(B, device=device)).tolist() == [2] * B
        return sizes_of(pool)

    assert call(1) == [1]
    assert call(2) == [1, 2]
    assert call(1) == [2, 1]
    first = pool.graphs[2, (((), torch.float32),)]
    assert call(4) == [1, 4]
    assert call(2) == [4, 2]
    assert pool.evicted == 2
    with pytest.raises(RuntimeError, match="released"):
        first.replay()
    alone = GraphPool(lambda x: x + 1, sizes=(1, 2, 4), most=1)
    for B in (1, 2, 4, 3, 1):
        assert alone(torch.ones(B, device=device)).tolist() == [2] * B
    assert sizes_of(alone) == [1]


@pytest.mark.parametrize("device", DEVICES)
def test_all_sizes_up_front(device):
    ran = array.array("q")  # a list would be watched, and what makes it longer is refused

    def double(x):
        assert not torch.is_grad_enabled()  # else its outputs would keep what a gradient needs
        ran.append(len(x))
        return x * 2

    pool = GraphPool(double, sizes=(2, 4, 8))
    pool.capture(torch.ones(3, 2, device=device))
    assert sizes_of(pool) == [8, 4, 2]  # the largest first
    assert list(ran) == sorted(ran, reverse=True)
    del ran[:]
    for B in range(1, 9):
        assert pool(torch.ones(B, 2, device=device)).tolist() == [[2, 2]] * B
    assert len(pool.graphs) == 3
    assert len(ran) == (0 if device == "cuda" else 8)
    with pytest.raises(UsageError, match="3 sizes need as many graphs, but `most` is 2"):
        GraphPool(double, sizes=(2, 4, 8), most=2).capture(torch.ones(1, device=device))


@pytest.mark.parametrize("device", DEVICES)
def test_captures_leave_no_trace_in_state_and_generators(device):
    calls = torch.zeros((), dtype=torch.int64, device=device)
    generator = torch.Generator(device).manual_seed(0)

    def sample(x):
        calls.add_(1)
        return x + torch.rand(x.shape, generator=generator, device=device)

    pool = GraphPool(sample, sizes=(2, 4), state=[calls], generators=[generator])
    pool.capture(torch.zeros(1, device=device))
    assert calls.item() == 0
    drawn = torch.cat([pool(torch.zeros(B, device=device)) for B in (2, 4, 2)])
    assert calls.item() == 3
    assert len(set(drawn.tolist())) == 8
    again = torch.Generator(device).manual_seed(0)
    assert torch.equal(drawn, torch.cat([torch.rand(B, generator=again, device=device) for B in (2, 4, 2)]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(9,)], "was given 9 rows: from 1 to 8, its largest size"),
        ([(0, 2)], "was given 0 rows"),
        ([(3,), (4,)], r"one number of rows, but was given \[3\], \[4\]"),
        ([()], r"one number of rows, but was given \[\]"),
        ([], "one number of rows, but was given none"),
    ],
)
def test_inputs_it_cannot_take_are_refused(device, shapes, message):
    pool = GraphPool(lambda *inputs: [x + 1 for x in inputs], sizes=(1, 8))
    with pytest.raises(UsageError, match=message):
        pool(*(torch.zeros(shape, device=device) for shape in shapes))
    with pytest.raises(UsageError, match="input 1 of <lambda> is of type list: an input is a tensor"):
        pool(torch.zeros(2, device=device), [1, 2])
    assert not pool.graphs
    assert pool(torch.ones(2, device=device))[0].tolist() == [2, 2]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fn", [lambda x: x.sum(), lambda x: x[1:], lambda x: {"kept": x, "mean": x.mean(0)}])
def test_a_function_that_does_not_return_a_row_for_each_is_refused(device, fn):
    with pytest.raises(UsageError, match="must return a row for each of 4, but returns"):
        GraphPool(fn, sizes=(4,))(torch.zeros(3, 2, device=device))


WRONG_SIZES = [(), (0, 4), 5, None, ("4",), [None, 1], (2.5, 4), (True, 4)]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        *[({"sizes": sizes}, "sizes must be batch sizes, whole numbers of 1") for sizes in WRONG_SIZES],
        *[({"most": most}, "most must be at least 1 graph") for most in (0, 1.5, True, "2")],
        ({"device": "gpuu"}, "unknown device"),
    ],
)
def test_settings_that_make_no_sense_are_refused(kwargs, message):
    with pytest.raises(UsageError, match=message):
        GraphPool(rowwise, **kwargs)


def test_what_makes_no_sense_beside_is_refused():
    with pytest.raises(UsageError, match="a function of tensors, not a value of type str"):
        GraphPool("greedy")
    with pytest.raises(UsageError, match=r"input 0 of <lambda> is sparse: give it as to_dense\(\) makes it"):
        GraphPool(lambda x: x + 1)(torch.eye(4).to_sparse())


# ---- rows that depend on each other


class Counting:
    """Running statistics, of all rows or of those in a mask."""

    def __init__(self, device):
        self.mean = torch.zeros(2, device=device)

    def of_all(self, x):
        self.mean.add_(0.1 * (x.mean(0) - self.mean))
        return x + 1

    def of_some(self, x, valid):
        mean = (x * valid[:, None]).sum(0) / valid.sum()
        self.mean.add_(0.1 * (mean - self.mean))
        return x - mean


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("B", [1, 3, 4])
@pytest.mark.parametrize(
    ("fn", "what"),
    [
        (lambda device: lambda x: x - x.mean(0), "its results"),
        (lambda device: lambda x: {"first": x, "rank": x[:, 0].argsort()}, "its results"),
        (lambda device: torch.nn.BatchNorm1d(2).to(device), "its results"),
        (lambda device: Counting(device).of_all, "its state"),
    ],
)
def test_a_function_that_mixes_rows_is_refused(fn, what, B, device):
    fn = fn(device)
    state = fn if isinstance(fn, torch.nn.Module) else getattr(getattr(fn, "__self__", None), "mean", ())
    pool = GraphPool(fn, sizes=(4,), state=state)
    with pytest.raises(UsageError, match=f"mixes rows: what is in the rows that are added changes {what}; leave"):
        pool(torch.arange(8.0, device=device).reshape(4, 2).flip(0)[:B])
    assert not pool.graphs
    assert not getattr(getattr(fn, "__self__", None), "mean", torch.zeros(1)).any()


MEAN_AWAY = [
    (lambda x: x - x.mean(0), [[0.0], [1.0], [2.0]]),  # one row is added: a copy of the first would be zero, too
    (lambda x: x - x.mean(0), [[0.0], [0.0], [2.0]]),
    (lambda x: x - x.mean(0), [[1.0], [-1.0]]),  # a copy of each would cancel
    (lambda x: x[:, :1] - x[:, :1].mean(), [[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]),
    (lambda x: torch.cat([1e4 * x, x - x.mean(0)], 1), [[1.0], [2.0], [3.0]]),  # a large column beside it
    (lambda x: x > x.mean(0), [[0.0], [1.0], [2.0]]),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("fn", "rows"), MEAN_AWAY)
def test_rows_that_hardly_show_a_mixture_do(fn, rows, device):
    with pytest.raises(UsageError, match=r"mixes rows: .* changes its results"):
        GraphPool(fn, sizes=(4,))(torch.tensor(rows, device=device))


@pytest.mark.parametrize("device", DEVICES)
def test_a_mask_is_false_in_the_rows_of_the_trial_too(device):
    counting = Counting(device)
    pool = GraphPool(counting.of_some, sizes=(8,), state=counting.mean)
    x = torch.tensor([[1.0, 0.0], [2.0, 5.0], [6.0, 1.0]], device=device)
    assert pool(x, torch.ones(3, dtype=torch.bool, device=device)).tolist() == (x - x.mean(0)).tolist()
    torch.testing.assert_close(counting.mean, 0.1 * x.mean(0))


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_norm_with_a_first_row_of_zeros_is_refused_and_as_before(device):
    norm = torch.nn.BatchNorm1d(1).to(device)
    x = torch.tensor([[0.0], [1.0], [2.0]], device=device)
    with pytest.raises(UsageError, match="mixes rows"):
        GraphPool(norm, sizes=(4,), state=norm)(x)
    assert norm.running_mean.item() == 0 and norm.num_batches_tracked.item() == 0
    assert torch.equal(GraphPool(norm.eval(), sizes=(4,), state=norm)(x), norm(x))


@pytest.mark.parametrize("device", DEVICES)
def test_state_that_changes_slowly_far_from_zero_shows_a_mixture(device):
    mean = torch.full((1,), 1000.0, device=device)

    def track(x):
        mean.add_(0.001 * (x.mean(0) - mean))
        return x

    pool = GraphPool(track, sizes=(4,), state=mean)
    with pytest.raises(UsageError, match=r"mixes rows: .* changes its state"):
        pool(torch.tensor([[1000.0], [1001.0], [999.0]], device=device))
    assert mean.item() == 1000


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
def test_rows_of_any_dtype_and_shape_are_tried(dtype, device):
    """A row may be a single number or empty, and a function's rows of its own are no mixture."""
    pool = GraphPool(lambda x, y: (x * 2, y), sizes=(4,))
    x, empty = torch.arange(3, device=device).to(dtype), torch.zeros(3, 0, device=device)
    assert pool(x, empty)[0].tolist() == [0, 2, 4]


def test_only_a_copy_from_the_device_goes_on_after_the_call(monkeypatch):
    """Also on a CPU: what is copied from the host may be pinned, and its owner may write to it at once."""
    waits, copy = [], torch.Tensor.copy_

    def spied(buffer, source, non_blocking=False):
        waits.append((source.is_cuda, non_blocking))
        return copy(buffer, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", spied)
    _fill([torch.zeros(4, 2)], [torch.ones(3, 2)])
    assert waits == [(False, False)]


@pytest.mark.parametrize("device", DEVICES)
def test_the_trial_leaves_no_trace_and_draws_nothing(device):
    counting, generator = Counting(device), torch.Generator(device).manual_seed(0)
    direct = torch.Generator(device).manual_seed(0)

    def noisy(x, valid):
        return counting.of_some(x, valid) + torch.rand(8, 2, generator=generator, device=device)

    pool = GraphPool(noisy, sizes=(8,), state=counting.mean, generators=[generator])
    x, valid = torch.ones(3, 2, device=device), torch.ones(3, dtype=torch.bool, device=device)
    for i in range(1, 4):
        expected = torch.rand(8, 2, generator=direct, device=device)[:3]
        assert torch.equal(pool(x, valid), expected)
        torch.testing.assert_close(counting.mean, torch.full((2,), 1 - 0.9**i, device=device))
        assert [graph.replays for graph in pool.graphs.values()] == [i]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fn", [torch.nn.Dropout(0.5), lambda x: torch.bernoulli(x / 2), lambda x: torch.rand_like(x)])
def test_draws_from_torchs_own_generator_are_no_mixture(fn, device, monkeypatch):
    own = torch.cuda.default_generators[0] if device == "cuda" else torch.default_generator
    places, check = [], GraphPool._check_rows

    def spied(*args):
        places.append(own.get_state())
        check(*args)
        places.append(own.get_state())

    monkeypatch.setattr(GraphPool, "_check_rows", spied)
    pool, x = GraphPool(fn, sizes=(128,)), torch.ones(100, device=device)
    first, second = pool(x), pool(x)
    assert not torch.equal(first, second)  # calls draw on
    assert torch.equal(*places)  # the trial does not


def test_what_was_not_named_is_not_told_as_a_mixture():
    """Only without a GPU: there a capture refuses the generator, and the warm-up alone counts on."""
    generator, calls = torch.Generator().manual_seed(0), torch.zeros(())

    def draws(x):
        return x + torch.rand(x.shape, generator=generator)

    def counts(x):
        return x + calls.add_(1)

    for fn, named in ((draws, {"generators": [generator]}), (counts, {"state": calls})):
        with pytest.raises(UsageError, match=f"{fn.__name__} gives other results for the same inputs: name in `gen"):
            GraphPool(fn, sizes=(4,))(torch.ones(3, 2))
        assert GraphPool(fn, sizes=(4,), **named)(torch.ones(3, 2)).shape == (3, 2)


@pytest.mark.parametrize("device", DEVICES)
def test_complex_results_may_be_nan(device):
    x = torch.tensor([[0.0], [1.0], [torch.nan]], device=device)
    got = GraphPool(lambda x: torch.complex(x, -x).conj(), sizes=(4,))(x)
    assert got[:2].tolist() == [[0], [1 + 1j]] and got[2].isnan().all()
    with pytest.raises(UsageError, match="mixes rows"):
        GraphPool(lambda x: torch.complex(x, x.mean(0).expand_as(x)), sizes=(4,))(x[:2])


@pytest.mark.parametrize("device", DEVICES)
def test_indices_of_rows_remain_such(device):
    """What fills the rows that are added for the trial is what was given, and no other number."""
    table = torch.arange(10.0, device=device)
    pool = GraphPool(lambda i: table[i[:, 0].long()], sizes=(4,))
    assert pool(torch.tensor([[9.0], [3.0]], device=device)).tolist() == [9, 3]


@pytest.mark.gpu
def test_inputs_from_the_host_are_copied_before_the_call_is_over():
    """Also from pinned memory, which a copy could go on reading."""
    pool = GraphPool(lambda x: x + 1, sizes=(1,), device="cuda")
    x = torch.zeros(1, 1 << 24, pin_memory=True)
    pool(x)
    for i in range(5):
        x.fill_(i)
        got = pool(x)
        x.fill_(-1)  # by the host, which copies and kernels do not wait for
        assert torch.equal(got, torch.full_like(got, i + 1))


@pytest.mark.parametrize("device", DEVICES)
def test_a_failed_capture_leaves_the_pool_as_it_was(device):
    failing = [False]

    def picky(x):
        return x * float(x.sum()) if failing[0] else x + 1

    pool = GraphPool(picky, sizes=(2, 4))
    assert pool(torch.ones(2, device=device)).tolist() == [2, 2]
    failing[0] = True
    with pytest.raises(CaptureError, match=r"picky cannot be captured: .*test_graph_pool.py:\d+"):
        pool(torch.ones(3, device=device))
    failing[0] = False
    assert sizes_of(pool) == [2]
    assert pool(torch.ones(3, device=device)).tolist() == [2, 2, 2]
    assert pool(torch.ones(1, device=device)).tolist() == [2]


@pytest.mark.parametrize("device", DEVICES)
def test_reset_releases_all_and_the_next_call_captures_anew(device):
    pool = GraphPool(rowwise, sizes=(2, 4))
    pool.capture(*numbers(1, device))
    graphs = list(pool.graphs.values())
    pool.reset()
    assert not pool.graphs
    assert pool.memory() == 0
    for graph in graphs:
        with pytest.raises(RuntimeError, match="released"):
            graph.replay()
    assert pool(*numbers(3, device))["sum"].tolist() == [0, 12, 42]


@pytest.mark.parametrize("device", DEVICES)
def test_the_report_names_sizes_replays_and_memory(device):
    pool = GraphPool(rowwise, sizes=(2, 16), most=2)
    for B in (9, 2, 1):
        pool(*numbers(B, device))
    inputs = sum(size * (3 * 4 + 8) for size in (2, 16))
    assert pool.memory() >= inputs
    if device == "cpu":
        assert pool.memory() == inputs
    first, *lines = pool.report().splitlines()
    assert first.startswith(f"rowwise: 2 graphs on {device}")
    assert "0 evicted" in first
    assert [line.split(";")[0].strip() for line in lines] == [
        "2 rows: float32[2, 3], int64[2]",
        "16 rows: float32[16, 3], int64[16]",
    ]
    assert "2 replays" in lines[0]
    assert "1 replays" in lines[1]


@pytest.mark.parametrize("device", DEVICES)
def test_calls_from_several_threads_take_turns(device):
    def slow(x):
        time.sleep(0.002)
        return x * 2

    pool, wrong = GraphPool(slow, sizes=(1, 4)), []

    def play(value):
        for B in (1, 3, 4, 2, 1):
            got = pool(torch.full((B,), float(value), device=device))
            if got.tolist() != [2.0 * value] * B:
                wrong.append((value, got))

    threads = [threading.Thread(target=play, args=[value]) for value in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sorted(sizes_of(pool)) == [1, 4]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("agent", "name"), POLICIES)
def test_an_agents_greedy_policy_can_be_served(device, agent, name):
    env, policy = _policy(agent, name, device)
    generator = torch.Generator(device).manual_seed(0)
    obs = torch.randn(7, *env.observation_space.shape, generator=generator, device=device)
    assert torch.equal(GraphPool(policy.greedy, sizes=(7,))(obs), policy.greedy(obs))


def _policy(agent, name, device):
    env, config = make(name), default_config(agent, name)
    policy = trainer_class(agent, "torch").build_policy(config, env)
    return env, policy.to(device)


@pytest.mark.gpu
@pytest.mark.parametrize(("agent", "name"), POLICIES)
def test_an_evaluation_through_graphs_has_the_returns_of_one_without(agent, name, monkeypatch):
    env, policy = _policy(agent, name, "cuda")
    sizes, call = [], GraphPool.__call__
    monkeypatch.setattr(GraphPool, "__call__", lambda pool, obs: (sizes.append(sizes_of(pool)), call(pool, obs))[1])
    direct = evaluate(env, policy.greedy, 50, torch.Generator("cuda").manual_seed(3)).numpy(force=True)
    served = trainer_class(agent, "torch").evaluate_policy(policy, env, 50, seed=3)
    assert served.tolist() == direct.tolist()
    assert sizes[-1] == [50] and len(sizes) > 1


# ---- memory, streams and devices: only on a GPU


def wide(x):
    """Some 4 * 256 KiB a row of intermediate results."""
    for _ in range(3):
        x = torch.tanh(x) + 1
    return x.sum(1)


def wide_rows(B):
    return torch.ones(B, 1 << 16, device="cuda")


def reserved(pool_handle):
    return sum(s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == pool_handle)


@pytest.mark.gpu
def test_graphs_share_memory():
    sizes = (8, 16, 32, 64)
    pool = GraphPool(wide, sizes=sizes)
    pool.capture(wide_rows(1))
    separate = [capture(wide, wide_rows(size)) for size in sizes]
    alone = [reserved(graph.pool.handle) for graph in separate]
    shared = reserved(next(iter(pool.graphs.values())).pool.handle)
    assert min(alone) > 0
    assert shared <= 1.2 * max(alone)
    assert shared < 0.8 * sum(alone)
    assert pool.memory() == shared + sum(size * 4 << 16 for size in sizes)
    for graph in separate:
        graph.reset()


@pytest.mark.gpu
def test_memory_is_bounded_over_many_calls_of_any_size():
    pool = GraphPool(wide, sizes=(1, 2, 4, 8, 16, 32), most=3)
    pool(wide_rows(32))
    handle = next(iter(pool.graphs.values())).pool.handle
    generator, held = random.Random(0), []
    for _ in range(200):
        B = generator.randint(1, 32)
        assert pool(wide_rows(B)).shape == (B,)
        held.append(reserved(handle))
        inputs = sum(size * 4 << 16 for size in sizes_of(pool))
        assert pool.memory() == held[-1] + inputs
        assert len(pool.graphs) <= 3
    assert pool.evicted > 20
    assert held[-1] == held[99] <= 8 * 32 * (4 << 16)
    pool.reset()
    torch.cuda.empty_cache()
    assert reserved(handle) == 0


@pytest.mark.gpu
def test_calls_on_different_streams_wait_for_each_other():
    def slow(x):
        torch.cuda._sleep(20_000_000)  # about 10 ms
        return x * 2

    pool = GraphPool(slow, sizes=(2, 4))
    pool.capture(torch.ones(1, device="cuda"))
    streams = [torch.cuda.Stream() for _ in range(3)]
    inputs = [torch.full((B,), float(B), device="cuda") for B in (1, 2, 3, 4, 3, 2)]
    torch.cuda.synchronize()
    got = []
    for i, x in enumerate(inputs):
        with torch.cuda.stream(streams[i % 3]):
            got.append(pool(x))
    torch.cuda.synchronize()
    assert [result.tolist() for result in got] == [(x * 2).tolist() for x in inputs]


@pytest.mark.gpu
def test_inputs_are_copied_to_the_device():
    pool = GraphPool(lambda x: x + 1, sizes=(4,), device="cuda")
    got = pool(torch.ones(3))
    assert got.is_cuda
    assert got.tolist() == [2, 2, 2]
    assert torch.equal(got, pool(torch.ones(3, device="cuda")))
    assert len(pool.graphs) == 1
