"""The extra `features` for tests, which are skipped without it.

A torchvision built for CUDA misses its operators beside a torch without CUDA, and says so at its
import. The networks used here need none of them, so those it asks for are declared.
"""

from typing import Any

import pytest
import torch

try:
    import torchvision
except ImportError:
    pytest.skip("the extra features is not installed", allow_module_level=True)
except RuntimeError:
    missing = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        missing.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision

Image: Any = pytest.importorskip("PIL.Image", reason="the extra features is not installed")

__all__ = ["Image", "torchvision"]
