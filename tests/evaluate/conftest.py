"""torchmetrics, to compare with."""

from types import ModuleType

import pytest


@pytest.fixture
def other_metrics() -> ModuleType:
    """torchmetrics' functions for classes; the test is skipped where it is not, or broken."""
    try:
        import torchmetrics.functional.classification as functions
    except (ImportError, RuntimeError) as error:  # it imports torchvision, which may not fit torch
        pytest.skip(f"torchmetrics is not here: {error}")
    return functions
