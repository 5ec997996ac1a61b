"""Sums along time, without a loop over it. T steps, B environments."""

import torch


def linear_scan(c_TB: torch.Tensor, x_TB: torch.Tensor) -> torch.Tensor:
    """y[t] = x[t] + c[t] y[t+1] with y[T] = 0, for all t in ceil(log2 T) rounds.

    Each round doubles the window that an entry has summed (Hillis & Steele, 1986): a few launches over the whole
    array in place of T dependent ones. Where c[t] is 0, y[t] is x[t], also if y[t+1] is infinite or no number.
    """
    shift = 1
    while shift < x_TB.shape[0]:
        c, x = c_TB[:-shift], x_TB[:-shift]
        x_TB = torch.cat([torch.where(c == 0, x, x + c * x_TB[shift:]), x_TB[-shift:]])
        c_TB = torch.cat([c_TB[:-shift] * c_TB[shift:], torch.zeros_like(c_TB[-shift:])])
        shift *= 2
    return x_TB


def gae(reward_TB, value_TB, final_value_TB, terminated_TB, truncated_TB, gamma: float, gae_lambda: float):
    """Generalised advantage estimation (Schulman et al., 2016, eq. 16).

    An episode that terminated has no future; one that was truncated goes on from the value of its final observation,
    as does the last step of the rollout. Nothing leaks from one episode into the one before it, no NaN either.

    Args:
        reward_TB, value_TB: [T, B] float32.
        final_value_TB: [T, B] float32, value of the observation that step t led to, before any reset.
        terminated_TB, truncated_TB: [T, B] bool.

    Returns:
        Advantages [T, B]; the value targets are these plus `value_TB`.
    """
    future_TB = final_value_TB.masked_fill(terminated_TB, 0)  # not a product: 0 times infinity is no number
    delta_TB = reward_TB + gamma * future_TB - value_TB  # eq. 10
    going_on_TB = ~(terminated_TB | truncated_TB)
    return linear_scan(gamma * gae_lambda * going_on_TB.float(), delta_TB)


def discounted_returns(reward_TB, done_TB, return_B, gamma: float):
    """Running discounted return of each environment, starting afresh after each episode.

    Args:
        reward_TB: [T, B] float32.
        done_TB: [T, B] bool, step t ended its episode.
        return_B: [B] float32, the running return before the first step, 0 where an episode starts.

    Returns:
        g [T, B] with g[t] = r[t] + gamma g[t-1] within an episode, and the [B] to start the next rollout with.
    """
    going_on_TB = torch.cat([torch.ones_like(done_TB[:1]), ~done_TB[:-1]])
    first_B = (reward_TB[0] + gamma * return_B).unsqueeze(0)
    backwards = linear_scan((gamma * going_on_TB.float()).flip(0), torch.cat([first_B, reward_TB[1:]]).flip(0))
    g_TB = backwards.flip(0)
    return g_TB, g_TB[-1].masked_fill(done_TB[-1], 0)


def lambda_returns(reward_TB, final_value_TB, terminated_TB, truncated_TB, gamma: float, q_lambda: float):
    """Peng's Q(lambda) (Peng & Williams, 1996), the targets of PQN (Gallici et al., 2024, algorithm 1).

    G[t] = r[t] + gamma ((1 - lambda) V'[t] + lambda G[t+1]), with V'[t] the greatest action value that step t led to.
    An episode that terminated has no future; one that was truncated goes on from V' alone, as does the last step of
    the rollout. Nothing leaks from one episode into the one before it.

    Args:
        reward_TB: [T, B] float32.
        final_value_TB: [T, B] float32, V': max_a Q of the observation that step t led to, before any reset.
        terminated_TB, truncated_TB: [T, B] bool.

    Returns:
        G [T, B].
    """
    going_on_TB = ~(terminated_TB | truncated_TB)
    lambda_TB = q_lambda * torch.cat([going_on_TB[:-1], torch.zeros_like(going_on_TB[-1:])]).float()
    # Where lambda is 1, V' is left out as well.
    future_TB = final_value_TB.masked_fill(terminated_TB | (lambda_TB == 1), 0)
    x_TB = reward_TB + gamma * (1 - lambda_TB) * future_TB
    return linear_scan(gamma * lambda_TB, x_TB)
