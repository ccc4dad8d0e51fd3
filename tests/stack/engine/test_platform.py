"""The platform answers on machines without an accelerator only; that SGLang finds it, test_engine_server.py shows."""

from __future__ import annotations

import pytest
import torch

from miles_verifiers.engine import platform


@pytest.mark.parametrize(("cuda", "xpu", "ours"), [(False, False, True), (True, False, False), (False, True, False)])
def test_it_is_active_without_an_accelerator_only(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, xpu: bool, ours: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: xpu)
    assert platform.activate() == (platform.PLATFORM if ours else None)
