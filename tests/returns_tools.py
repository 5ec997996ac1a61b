"""Sums along time, one step after the other, in float64: what backends and kernels are compared to."""

import numpy as np


def gae_by_loop(reward, value, final_value, terminated, truncated, gamma, gae_lambda):
    advantage, after = np.zeros(reward.shape), np.zeros(reward.shape[1])
    for t in reversed(range(len(reward))):
        future = np.where(terminated[t], 0, final_value[t])
        after = np.where(terminated[t] | truncated[t], 0, after)
        advantage[t] = after = reward[t] + gamma * future - value[t] + gamma * gae_lambda * after
    return advantage


def returns_by_loop(reward, done, start, gamma):
    g, running = np.zeros(reward.shape), start.astype(np.float64)
    for t in range(len(reward)):
        running = reward[t] + gamma * running
        g[t] = running
        running = np.where(done[t], 0, running)
    return g, running


def lambda_returns_by_loop(reward, final_value, terminated, truncated, gamma, q_lambda):
    returns, after = np.zeros(reward.shape), final_value[-1].astype(np.float64)
    for t in reversed(range(len(reward))):
        after = np.where(truncated[t], final_value[t], (1 - q_lambda) * final_value[t] + q_lambda * after)
        returns[t] = after = reward[t] + gamma * np.where(terminated[t], 0, after)
    return returns
