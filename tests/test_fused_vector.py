"""Vector environments in mode fused: one kernel a step, or several steps a launch.

Without a GPU, Triton runs the kernels in Python: small sizes. With one, the tests marked `gpu` run.
"""

import numpy as np
import pytest
import torch
from agent_tools import copy, differ
from fused_tools import DEVICES, KERNEL_MARKS, Sorted, interpreted, rounding
from gymnasium.error import ClosedEnvironmentError, ResetNeeded

import rlgraph
from rlgraph.environment import DISABLED, NEXT_STEP, SAME_STEP
from rlgraph.errors import UsageError

pytest.importorskip("triton", reason="needs the package triton, which is for Linux only")

pytestmark = KERNEL_MARKS
AUTORESET = (NEXT_STEP, SAME_STEP, DISABLED)
# It starts where it always starts, so that all draws are the same; and soon falls.
FALLING = {"low": 0.05, "high": 0.05, "theta_threshold": 0.1, "max_episode_steps": 7}


def make_vec(mode, autoreset, num_envs=3, device="cpu", name="CartPole-v1", **params):
    return rlgraph.make_vec(name, num_envs, device=device, mode=mode, seed=1, autoreset_mode=autoreset, **params)


def some_actions(K, B):
    return np.random.default_rng(0).integers(2, size=(K, B)) * (np.arange(B) > 0)  # the first falls early


def taken(envs, actions):
    """What steps return, and how many have elapsed after each, as numpy; resets by hand where they must be."""
    kept = [envs.reset()[0]]
    for action in actions:
        *results, infos = envs.step(action)
        kept += [*results, *(infos[key] for key in ("final_obs", "_final_obs") if key in infos)]
        kept += [envs._carry.elapsed_B, envs._carry.done_B]
        if envs.autoreset_mode.value == DISABLED and (ended := results[2] | results[3]).any():
            kept.append(envs.reset(options={"reset_mask": ended})[0])
        kept = [copy(x) for x in kept]
    return kept


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("autoreset", AUTORESET)
def test_a_vector_environments_steps_are_the_eager_ones(autoreset, device):
    actions = some_actions(8, 3)
    fused_env, eager = (make_vec(mode, autoreset, device=device, **FALLING) for mode in ("fused", "eager"))
    assert fused_env.mode == "fused"
    got, expected = taken(fused_env, actions), taken(eager, actions)
    assert len(got) == len(expected)
    for i, (a, b) in enumerate(zip(got, expected)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), i
        if a.dtype == np.float32:
            np.testing.assert_allclose(a, b, *rounding(device), err_msg=str(i))
        else:
            np.testing.assert_array_equal(a, b, err_msg=str(i))
    size = 9 if autoreset == SAME_STEP else 7
    if autoreset != DISABLED:
        assert any(x.any() for x in got[3::size])  # it fell
        assert any(x.any() for x in got[4::size])  # and was cut off


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("autoreset", [NEXT_STEP, SAME_STEP])
def test_several_steps_are_as_many_steps(autoreset, device):
    """In one launch; to the last bit where nothing is drawn."""
    actions = some_actions(6, 3)
    one, several = (make_vec("fused", autoreset, device=device, **FALLING) for _ in range(2))
    np.testing.assert_array_equal(copy(one.reset()[0]), copy(several.reset()[0]))
    singles = [one.step(action) for action in actions]
    *results, infos = several.steps(actions)
    for i, result in enumerate(results):
        np.testing.assert_array_equal(copy(result), np.stack([copy(s[i]) for s in singles]))
    assert set(infos) == ({"final_obs", "_final_obs"} if autoreset == SAME_STEP else set())
    for key in infos:
        np.testing.assert_array_equal(copy(infos[key]), np.stack([copy(s[-1][key]) for s in singles]))
    assert differ([copy(results[2])], [np.zeros((6, 3), bool)])
    for a, b in zip(torch.utils._pytree.tree_leaves(one._carry), torch.utils._pytree.tree_leaves(several._carry)):
        np.testing.assert_array_equal(copy(a), copy(b))


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("output", ["tensor", "numpy"])
@pytest.mark.parametrize("autoreset", [NEXT_STEP, SAME_STEP])
def test_several_steps_in_other_modes_are_a_loop(autoreset, output, backend, quick_compilation):
    options = {"device": "cpu", "seed": 5, "autoreset_mode": autoreset, "max_episode_steps": 3}
    one, several = (rlgraph.make_vec("Pendulum-v1", 4, backend, output=output, **options) for _ in range(2))
    one.reset(), several.reset()
    actions = np.random.default_rng(0).normal(size=(7, 4, 1))
    singles = [one.step(action) for action in actions]
    *results, infos = several.steps(actions)
    for i, result in enumerate(results):
        assert isinstance(result, np.ndarray) == (output == "numpy")
        np.testing.assert_array_equal(np.asarray(result), np.stack([np.asarray(s[i]) for s in singles]))
    assert np.asarray(results[3]).sum() == 2 * 4 if autoreset == SAME_STEP else np.asarray(results[3]).any()
    assert set(infos) == ({"final_obs", "_final_obs"} if autoreset == SAME_STEP else set())
    if autoreset == SAME_STEP:
        np.testing.assert_array_equal(np.asarray(infos["_final_obs"]), np.asarray(results[2]) | np.asarray(results[3]))
        for t, mask in enumerate(np.asarray(infos["_final_obs"])):
            for b in np.flatnonzero(mask):
                np.testing.assert_array_equal(
                    np.asarray(infos["final_obs"])[t, b], np.asarray(singles[t][-1]["final_obs"][b])
                )
    np.testing.assert_array_equal(np.asarray(one.step(actions[0])[0]), np.asarray(several.step(actions[0])[0]))


@pytest.mark.parametrize("mode", ["eager", pytest.param("fused", marks=interpreted)])
def test_wrong_uses_of_several_steps_are_errors(mode):
    envs = make_vec(mode, NEXT_STEP)
    good = some_actions(2, 3)
    with pytest.raises(ResetNeeded, match="call reset"):
        envs.steps(good)
    envs.reset()
    before = [copy(x) for x in torch.utils._pytree.tree_leaves(envs._carry)]
    with pytest.raises(ValueError, match=r"must have shape \[K, 3\] with K >= 1"):
        envs.steps(good[:0])
    with pytest.raises(ValueError, match=r"must have shape \[K, 3\] with K >= 1"):
        envs.steps(1)
    with pytest.raises(ValueError, match=r"must have shape \[2, 3\], got \[2, 2\]"):
        envs.steps(good[:, :2])
    with pytest.raises(ValueError, match=r"must have shape \[3, 3\], got \[3\]"):
        envs.steps(good[0])
    with pytest.raises(ValueError, match=r"in \[0, 1\], got 0 to 2"):
        envs.steps([[0, 1, 0], [0, 2, 0]])
    with pytest.raises(TypeError, match="integers"):
        envs.steps(good * 0.5)
    for a, b in zip(before, torch.utils._pytree.tree_leaves(envs._carry)):
        np.testing.assert_array_equal(a, copy(b))
    envs.close()
    with pytest.raises(ClosedEnvironmentError):
        envs.steps(good)
    envs = make_vec(mode, DISABLED)
    envs.reset()
    with pytest.raises(UsageError, match=r"use step\(\) with AutoresetMode.DISABLED"):
        envs.steps(good)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("invalid", [2, -1, 10**12])
def test_an_action_out_of_range_sets_the_flag_and_the_nearest_is_taken(invalid, device):
    """On a CPU such an action comes no further than the check: the kernel is asked directly."""
    wrong, right = (make_vec("fused", NEXT_STEP, device=device, low=0, high=0) for _ in range(2))
    assert not copy(wrong._steps.counter)  # making the graph has left no trace
    wrong.reset(), right.reset()
    actions = torch.tensor([[0, invalid, 1], [1, 1, 0]], device=device)
    got = wrong._steps.take(actions)
    assert copy(wrong._out_of_range)
    expected = right._steps.take(actions.clamp(0, 1))
    assert not copy(right._out_of_range)
    for a, b in zip(got, expected):
        np.testing.assert_array_equal(copy(a), copy(b))
    with pytest.raises(ValueError, match="outside"):
        wrong._unverified = 1
        wrong.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("trigger", ["step", "steps"])
def test_an_action_out_of_range_on_the_gpu_is_caught(trigger):
    envs = make_vec("fused", NEXT_STEP, device="cuda")
    envs.reset()
    bad = torch.tensor([0, 2, 1], device="cuda")
    envs.step(bad) if trigger == "step" else envs.steps(bad[None])
    with pytest.raises(ValueError, match=r"outside \[0, 1\].*one of the last"):
        envs.close()


@interpreted
def test_gymnasiums_basics_hold_in_mode_fused():
    envs = make_vec("fused", NEXT_STEP, name="Pendulum-v1")
    obs, info = envs.reset(seed=7)
    assert obs.shape == (3, 3) and info == {}
    action = envs.action_space.sample()
    obs, reward, terminated, truncated, info = envs.step(action)
    assert obs.shape == (3, 3) and reward.shape == terminated.shape == truncated.shape == (3,) and info == {}
    assert (obs.dtype, reward.dtype, terminated.dtype) == (torch.float32, torch.float32, torch.bool)
    kept = obs.clone()
    envs.step(action)
    assert torch.equal(obs, kept)  # it is the caller's
    again, _ = envs.reset(seed=7)
    assert torch.equal(again, make_vec("fused", NEXT_STEP, name="Pendulum-v1").reset(seed=7)[0])
    envs.close()


@pytest.mark.parametrize("device", DEVICES)
def test_mode_fused_without_a_form_is_an_error(device, monkeypatch):
    monkeypatch.setitem(rlgraph.ENVIRONMENTS, "Sorted-v0", Sorted)
    with pytest.raises(UsageError, match=r"environment 'Sorted-v0' cannot be fused: .*xp\.sort"):
        rlgraph.make_vec("Sorted-v0", 3, mode="fused", device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_seed_repeats_a_vector_environments_episodes(device):
    envs = make_vec("fused", SAME_STEP, device=device, max_episode_steps=2)  # its resets in between are drawn too

    def play():
        first = copy(envs.reset(seed=5)[0])
        return [first, *(copy(envs.step(np.ones(3, int))[0]) for _ in range(6))]

    for a, b in zip(play(), play(), strict=True):
        np.testing.assert_array_equal(a, b)
