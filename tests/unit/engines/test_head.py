"""Losses and gradients of the head, in blocks, against torch's own cross entropy and reverse-mode."""

import subprocess
import sys

import pytest
import torch

from permille.engines.head import OutputHead

# More than one block of the vocabulary and of the rows.
VOCABULARY, HIDDEN, ROWS = 4100, 6, 1030


@pytest.fixture(params=[None, 3.0], ids=["plain", "softcap"])
def softcap(request: pytest.FixtureRequest) -> float | None:
    cap: float | None = request.param
    return cap


def reference(
    weight: torch.Tensor, hidden: torch.Tensor, target: torch.Tensor, cap: float | None
) -> torch.Tensor:
    logits = hidden @ weight.to(hidden.dtype).T
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    return torch.nn.functional.cross_entropy(logits, target, reduction="none")


def test_losses_are_cross_entropies(softcap: float | None) -> None:
    torch.manual_seed(0)
    weight, hidden = torch.randn(VOCABULARY, HIDDEN), 2 * torch.randn(ROWS, HIDDEN)
    target = torch.randint(0, VOCABULARY, (ROWS,))
    got = OutputHead(weight, softcap).losses(hidden, target)
    torch.testing.assert_close(got, reference(weight, hidden, target, softcap), rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_reverse_mode(softcap: float | None) -> None:
    torch.manual_seed(0)
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64)
    hidden = (2 * torch.randn(ROWS, HIDDEN, dtype=torch.float64)).requires_grad_()
    target = torch.randint(0, VOCABULARY, (ROWS,))
    (expected,) = torch.autograd.grad(reference(weight, hidden, target, softcap).sum(), hidden)
    head = OutputHead(weight, softcap)
    loss, got = head.gradients(hidden.detach(), target)
    torch.testing.assert_close(loss, head.losses(hidden.detach(), target))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_a_bfloat16_head_has_float32_logits() -> None:
    torch.manual_seed(0)
    weight = torch.randn(VOCABULARY, HIDDEN).bfloat16()
    hidden = torch.randn(3, HIDDEN).bfloat16()
    got = OutputHead(weight, None).logits(hidden)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, hidden.float() @ weight.float().T, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("rows", "hidden"), [(1024, 64), (8, 4096)])
@pytest.mark.parametrize("method", ["losses", "gradients"])
def test_a_large_vocabulary_stays_below_64_mib(rows: int, hidden: int, method: str) -> None:
    """256,000 words: all logits of 1,024 targets would be 1 GB, the widened weight of 4,096 columns 4 GB."""
    code = f"""
import threading, torch
from permille.engines.head import OutputHead

def anonymous():  # Without files: mapped code of libraries is read as it is first run.
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) >> 10

torch.set_num_threads(1)
weight = torch.zeros(256_000, {hidden}, dtype=torch.bfloat16)  # Read, never written: it takes no memory.
head = OutputHead(weight, 30.0)
hidden, target = torch.ones({rows}, {hidden}), torch.arange({rows})
before, seen, done = anonymous(), [], threading.Event()

def watch():
    while not done.wait(0.005):
        seen.append(anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
head.{method}(hidden, target)
done.set()
watcher.join()
print(max(seen) - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64


def test_large_logits_neither_overflow_nor_lose_the_loss() -> None:
    weight = torch.tensor([[1.0], [0.0], [-1.0]])
    got = OutputHead(weight, None).losses(torch.tensor([[1e4], [-1e4]]), torch.tensor([1, 2]))
    torch.testing.assert_close(got, torch.tensor([1e4, 0.0]))


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_hidden_states_that_are_not_finite_give_no_finite_loss(broken: float) -> None:
    got = OutputHead(torch.ones(4, 2), None).losses(torch.tensor([[broken, 1.0]]), torch.tensor([1]))
    assert not torch.isfinite(got).any()
