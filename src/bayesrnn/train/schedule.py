"""The published learning-rate schedule."""


def learning_rate(epoch: int, lr: float, decay: float, decay_after: int) -> float:
    """`lr` for the first `decay_after` epochs, then times `decay` for every further one.

    >>> [round(learning_rate(e, 1.0, 0.9, 2), 3) for e in range(5)]
    [1.0, 1.0, 0.9, 0.81, 0.729]
    """
    return lr * decay ** max(0, epoch + 1 - decay_after)
