"""Several processes that train one model together."""

import torch


def in_process_group() -> bool:
    """Whether this is one of several processes that train together."""
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1


def rank_generator(device: torch.device) -> torch.Generator | None:
    """In a process group, a generator that differs between ranks even where their seeds agree.

    It is seeded from torch's own, so saving torch's state is still enough to draw the same again.
    """
    if not in_process_group():
        return None
    seed = int(torch.randint(2**62, ()).item())
    generator = torch.Generator(device)
    rank = torch.distributed.get_rank()
    return generator.manual_seed((seed + 0x9E3779B97F4A7C15 * rank) % 2**63)
