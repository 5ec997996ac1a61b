"""Running mean and variance on the device.

The count of rows is float32. Once a batch is less than 2^-24 of it, it stays as it is, and each batch moves the moments
by that share: the oldest are forgotten, slowly. Nothing overflows.
"""

import torch


def merge_moments(mean_D, var_D, count, batch_ND) -> None:
    """Merge a batch into running moments, in place (Chan, Golub & LeVeque, 1979).

    Args:
        mean_D, var_D: [D] float32, population moments of what came before.
        count: [] float32, how many rows that was.
        batch_ND: [N, D] float32.
    """
    n = batch_ND.shape[0]
    batch_var_D, batch_mean_D = torch.var_mean(batch_ND, dim=0, correction=0)
    delta_D, total = batch_mean_D - mean_D, count + n
    var_D.copy_((var_D * count + batch_var_D * n + delta_D**2 * (count * n / total)) / total)
    mean_D.add_(delta_D * (n / total))
    count.copy_(total)
