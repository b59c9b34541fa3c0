"""What changes from step to step: the published learning-rate schedule, and the KL's warm-up."""


def learning_rate(epoch: int, lr: float, decay: float, decay_after: int) -> float:
    """`lr` for the first `decay_after` epochs, then times `decay` for every further one.

    >>> [round(learning_rate(e, 1.0, 0.9, 2), 3) for e in range(5)]
    [1.0, 1.0, 0.9, 0.81, 0.729]
    """
    return lr * decay ** max(0, epoch + 1 - decay_after)


def warmth(step: int, steps: int) -> float:
    """The part of the KL that counts: it rises with every step, and after `steps` all of it does.

    >>> [warmth(step, 4) for step in (0, 1, 2, 3, 4, 5)]
    [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return min(1.0, step / steps)
