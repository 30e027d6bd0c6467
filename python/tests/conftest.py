"""Devices: every test that takes ``device`` runs on the CPU, and on a CUDA device where there is one and the package is built for it."""

import pytest
import torch

from lacuna import _core


def _no_cuda() -> str:
    if not _core.has_cuda:
        return "the package is built without CUDA"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.cuda.get_device_capability() < (8, 9):
        return "the CUDA device is older than compute capability 8.9"
    return ""


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and (reason := _no_cuda()):
        pytest.skip(f"on CUDA: {reason}")
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)
