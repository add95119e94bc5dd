"""Products of few rows against those of many, on a GPU or Triton's interpreter. Needs the extra `cuda`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cuda.runners import torch  # isort: skip - first, it tells Triton where to run

from shoal.runners.cuda import kernels as k
from shoal.runners.cuda import products
from shoal.runners.cuda.products import few_of, product
from shoal.runners.cuda.supports import SPLIT_ROWS
from shoal.runners.cuda.weights import stacked
from tests.cuda.interpreter import mend_dot
from tests.cuda.tiny import random_weight


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # in the interpreter
@pytest.mark.parametrize("epilogue", [k.STORE, k.SUMS, k.GATED], ids=["store", "sums", "gated"])
@pytest.mark.parametrize("kind", ["BF16", "Q4_0", "Q4_K", "Q6_K", "Q8_0"])
def test_few_rows_get_the_sums_of_a_product(kind: str, epilogue: Any) -> None:
    """Off a GPU all rows go the same way, and are held against exact sums only."""
    cuda = torch.cuda.is_available()
    if not cuda:
        mend_dot()
    device = torch.device("cuda:0" if cuda else "cpu")
    weight = random_weight(kind, 64, 1280)  # ten chunks: warps have two or one
    matrix, gated = stacked([weight], device)[0], epilogue == k.GATED
    counts = (1, 3, 16, 17, 33, *([300] if cuda else []))  # 300 is slow in the interpreter
    x = torch.randn(max(counts), 1280, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    width = matrix.n // 2 if gated else matrix.n
    exact = x.float() @ torch.from_numpy(weight.values()).bfloat16().float().T.to(device)
    if gated:
        exact = torch.nn.functional.silu(exact[:, :32]) * exact[:, 32:]
    found = []
    for rows in counts:
        out = torch.zeros(4, rows, width, device=device, dtype=torch.float32 if epilogue == k.SUMS else torch.bfloat16)
        total = torch.zeros(rows, width, device=device)
        for part in out[: product(x[:rows], matrix, out, epilogue, rows)]:
            total = total + part
        found.append(total)
        assert (total - exact[:rows]).norm() < 0.02 * exact[:rows].norm()
    if cuda:
        assert all(torch.equal(rows, found[-1][: len(rows)]) for rows in found)


def test_tiles_of_many_rows_keep_the_processors_busy_and_fit_the_memory_for_sums() -> None:
    device = torch.device("cpu")  # counts as 132 processors
    output, gates = (stacked([random_weight("BF16", n, 256)], device)[0] for n in (1024, 6144))
    for matrix, rows, split, expected in (
        (output, 64, True, (64, 2)),
        (output, 256, True, (64, 2)),
        (output, 256, False, (64, 1)),
        (output, 2048, True, (128, 1)),
        (gates, 512, False, (64, 1)),
        (gates, 2048, False, (128, 1)),
    ):
        assert products.many_of(matrix, rows, split=split) == expected, (matrix.n, rows)
    for rows in range(33, 9000, 31):
        _, parts = products.many_of(output, rows, split=True)
        assert parts * rows <= max(rows, 4 * SPLIT_ROWS), rows


def test_what_shared_memory_does_not_hold_goes_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "runs_few", lambda device, form: True)
    device = torch.device("cpu")
    for inputs, rows, taken in (
        (1024, 1, True),
        (1024, 17, False),
        (9728, 2, True),
        (9728, 3, False),
        (16384, 1, False),
    ):
        matrix = stacked([random_weight("BF16", 16, inputs)], device)[0]
        assert (few_of(matrix, rows, gated=False) is not None) is taken, (inputs, rows)
