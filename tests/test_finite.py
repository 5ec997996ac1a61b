"""NaN and infinity end a training or an evaluation with one line, wherever they come from. Nothing finite is lost."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import rlgraph
from rlgraph.bench.solve import solve
from rlgraph.cli import main as cli
from rlgraph.config import TrainConfig
from rlgraph.errors import NonFiniteError
from rlgraph.runs import finite
from rlgraph.runs.checkpoint import BEGINNING, Checkpoints, saved
from rlgraph.runs.loop import Clock, Loop
from rlgraph.runs.metrics import MetricsLog
from rlgraph.runs.train import config_class, evaluate_run, train

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Pays {reward} for the step that takes an episode to time 12, else 1, and shows {shown} then, else the time.
DEFINITION = """
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box, Discrete

ID, MAX_EPISODE_STEPS, REWARD_THRESHOLD, RESET_DRAWS, STEP_DRAWS = "Bad-v0", 20, None, 0, 0


class State(NamedTuple):
    time: Any


@dataclass(frozen=True)
class Params:
    pass


def observation_space(p):
    return Box(-np.inf, np.inf, shape=(1,), dtype=np.float32)


def action_space(p):
    return {action_space}


def reset(xp, u, p):
    return State(xp.zeros_like(u[:, 0]))


def step(xp, s, action, u, p):
    time = s.time + 1
    return State(time), xp.where(time == 12, xp.full_like(time, {reward}), xp.ones_like(time)), time < 0


def observe(xp, s, p):
    return xp.where(s.time == 12, xp.full_like(s.time, {shown}), s.time)[:, None]
"""
RUN = Path("run")
NAN, INFINITY = "float('nan')", "float('inf')"


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def config_of(agent, backend="torch", reward=NAN, shown="0", **fields):
    action_space = "Box(-1, 1, shape=(1,))" if agent == "sac" else "Discrete(2)"
    path = Path(f"{agent}_env.py")
    path.write_text(DEFINITION.format(action_space=action_space, reward=reward, shown=shown))
    # Two environments, four steps an iteration: time 12 is the last step of the third one.
    sizes = {"num_envs": 2, "num_steps": 4, "total_steps": 80, "hidden": (8,), "eval_episodes": 2, "run_dir": "run"}
    if agent in ("dqn", "sac"):
        sizes |= {"learning_starts": 8, "minibatch_size": 64, "replay_capacity": 80}
    if agent == "pqn":
        sizes |= {"num_minibatches": 2}
    sizes |= {"device": "cpu", "checkpoint_seconds": 0}
    return config_class(agent)(env=str(path), backend=backend, **sizes | fields)


def fails(message, agent, config):
    with pytest.raises(NonFiniteError, match=message) as caught:
        train(agent, config)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("agent, backend", [*itertools.product(("ppo", "dqn", "pqn", "sac"), ("torch", "jax"))])
def test_one_nan_reward_stops_the_training_in_its_iteration(agent, backend):
    config = config_of(agent, backend)
    loss = {"ppo": "policy_loss", "sac": "critic_loss"}.get(agent, "loss")
    fails(rf"^'{loss}' is nan in iteration 3 \(24 steps\).*000000000016\.safetensors' is the last", agent, config)
    # What is left is finite, and is played. That it meets NaN itself is said, too.
    assert max(saved(RUN)) == 16
    assert not (RUN / "policy.safetensors").exists()
    assert not (RUN / "result.json").exists()
    with pytest.raises(NonFiniteError, match=r"^the return is nan in 3 of 3 greedy episodes"):
        evaluate_run("run", 3, checkpoint="last")


FAST_MODES = [("ppo", "torch", "fused"), ("ppo", "jax", "fused")]
CAPTURED = [*FAST_MODES, ("ppo", "torch", "graph"), ("dqn", "torch", "graph"), ("sac", "jax", "graph")]


@pytest.mark.usefixtures("own_kernel_cache", "quick_interpreter")
@pytest.mark.parametrize("agent, backend, mode", FAST_MODES)
def test_kernels_report_it_too(agent, backend, mode):
    few = {"num_epochs": 1, "num_minibatches": 1}  # interpreted, kernels are slow
    fails(r" is nan in iteration 3 \(24 steps\)", agent, config_of(agent, backend, mode=mode, **few))


@pytest.mark.gpu
@pytest.mark.parametrize("agent, backend, mode", CAPTURED)
def test_on_a_gpu_it_stops_in_the_same_iteration(agent, backend, mode):
    fails(r" is nan in iteration 3 \(24 steps\)", agent, config_of(agent, backend, mode=mode, device="cuda"))


@pytest.mark.parametrize("agent", ["ppo", "dqn", "pqn", "sac"])
@pytest.mark.parametrize("reward, shown", [("-" + INFINITY, "0"), ("1e38", "0"), ("1", NAN), ("1", INFINITY)])
def test_infinite_overflowing_and_unseen_numbers_stop_it_too(agent, reward, shown):
    fails(r" is -?(nan|inf) in iteration \d+ \(\d+ steps\)", agent, config_of(agent, reward=reward, shown=shown))


def test_a_launch_of_several_iterations_names_the_one_that_was_bad():
    fails(r" in iteration 3 \(24 steps\)", "ppo", config_of("ppo", iterations_per_launch=5))
    assert not saved(RUN)


def test_what_no_update_has_seen_is_not_saved():
    # The only draw from the replay misses the bad reward, and no episode ends: only the state knows of it.
    config = config_of("dqn", num_updates=1, minibatch_size=1, total_steps=24)
    fails(r"^'\w+/\w+' holds nan after iteration 3 \(24 steps\)", "dqn", config)
    assert max(saved(RUN)) == 16


def test_a_return_of_the_evaluation_that_is_not_finite_is_an_error_and_the_policy_is_kept():
    config = config_of("ppo", total_steps=16)  # time 12 comes in the evaluation alone
    with pytest.raises(NonFiniteError, match=r"^the return is nan in 2 of 2 greedy episodes"):
        train("ppo", config)
    assert (RUN / "policy.safetensors").exists()
    assert not (RUN / "result.json").exists()


def test_the_command_line_says_it_in_one_line(capsys):
    config_of("ppo")
    words = "train ppo --env ppo_env.py --num-envs 2 --num-steps 4 --total-steps 80 --device cpu --run-dir run"
    assert cli.main(words.split()) == 1
    complaint = capsys.readouterr().err
    assert complaint.startswith("rlgraph: 'policy_loss' is nan in iteration 3 (24 steps), so the training stops: look")
    assert complaint.endswith("; no checkpoint was due before\n")
    assert complaint.count("\n") == 1


class Trainer:
    """Its metrics are finite. After its second iteration one of its arrays is not."""

    def __init__(self, name):
        self.name, self.iterations = name, 0

    def iterate(self):
        self.iterations += 1
        return SimpleNamespace(get=lambda: [[1.0, 0.0, 0.0, 0.0]])

    def state_arrays(self):
        return {"policy/w": np.ones(3, np.float32), self.name: np.array([1, -np.inf if self.iterations == 2 else 2])}

    def arrays(self):
        return {"w": np.ones(3, np.float32)}


def run_of(trainer, tmp_path):
    config = TrainConfig(num_envs=1, num_steps=1, total_steps=3, checkpoint_seconds=0)
    log = MetricsLog(tmp_path)
    checkpoints = Checkpoints(tmp_path, 3, {})
    names = ("loss", "episode_return_sum", "episode_length_sum", "episodes")
    Loop(config, names, checkpoints, log, Clock(BEGINNING), 0, None).run(trainer, [])
    log.close()


@pytest.mark.parametrize("name", ["optimizer/w", "policy/obs_var", "collector/return_B", "replay/reward"])
def test_what_the_last_updates_led_to_is_looked_at_before_it_is_saved(name, tmp_path):
    with pytest.raises(NonFiniteError, match=rf"^'{name}' holds -inf after iteration 2 \(2 steps\)"):
        run_of(Trainer(name), tmp_path)
    assert list(saved(tmp_path)) == [1]


@pytest.mark.parametrize("name", ["collector/carry/state/best", "collector/obs", "replay/obs", "replay/final_obs"])
def test_an_infinity_of_the_environments_own_is_no_fault(name, tmp_path):
    run_of(Trainer(name), tmp_path)
    assert list(saved(tmp_path)) == [1, 2, 3]


def test_the_benchmark_of_training_until_solved_stops_too():
    def to_the_mark(total_steps):
        config = config_of("ppo", total_steps=total_steps, eval_episodes=2)
        return solve("ppo", config, rlgraph.make("ppo_env.py", max_episode_steps=10), 1e9, 1, lambda *_: None)

    with pytest.raises(NonFiniteError, match=r"greedy episodes|after 24 steps"):
        config = config_of("ppo", total_steps=24)
        solve("ppo", config, rlgraph.make("ppo_env.py"), 1e9, 1, lambda *_: None)
    assert to_the_mark(24)["solved"] is False  # within its limit of 10 steps the environment is sound


def test_all_numbers_of_any_kind_are_looked_at():
    assert finite.bad_metric({"a": 1.0, "b": 0.0}) is None
    assert finite.bad_metric({"a": 1.0, "b": float("-inf"), "c": float("nan")}) == "'b' is -inf"
    integers = {"key": np.array([2**32 - 1], np.uint32), "done": np.array([True])}
    assert finite.bad_array(integers | {"w": np.float32(3)}) is None
    assert finite.bad_array(integers | {"w": np.array([[0, np.nan]], np.float16)}) == "'w' holds nan"
