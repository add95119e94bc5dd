"""Products of few rows against those of many, on a GPU or Triton's interpreter. Needs the extra `cuda`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cuda.runners import torch  # isort: skip - first, it tells Triton where to run

from shoal.runners.cuda import kernels as k
from shoal.runners.cuda.products import few_of, product
from shoal.runners.cuda.weights import stacked
from tests.cuda.interpreter import mend_dot
from tests.cuda.tiny import random_weight


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # in the interpreter
@pytest.mark.parametrize("epilogue", [k.STORE, k.PARTS, k.GATED], ids=["store", "parts", "gated"])
def test_few_rows_get_the_sums_of_a_product(epilogue: Any) -> None:
    cuda = torch.cuda.is_available()
    if not cuda:
        mend_dot()
    device = torch.device("cuda:0" if cuda else "cpu")
    weight = random_weight("BF16", 64, 1024)
    matrix, gated = stacked([weight], device)[0], epilogue == k.GATED
    assert few_of(matrix, 3, gated) is not None, "this size takes another way"
    x = torch.randn(17, 1024, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    width = matrix.n // 2 if gated else matrix.n
    kind_of = torch.float32 if epilogue == k.PARTS else torch.bfloat16
    few = torch.zeros(3, width, device=device, dtype=kind_of)
    assert product(x[:3], matrix, few, epilogue, 3) == 1
    many = torch.zeros(4, 17, width, device=device, dtype=kind_of)
    total = torch.zeros(17, width, device=device, dtype=kind_of)
    for part in many[: product(x, matrix, many, epilogue, 17)]:
        total = total + part
    if cuda:
        assert torch.equal(few, total[:3])
    assert (few - total[:3]).float().norm() < 1e-5 * few.float().norm()
    exact = x[:3].float() @ torch.from_numpy(weight.values()).float().T.to(device)
    if gated:
        exact = torch.nn.functional.silu(exact[:, :32]) * exact[:, 32:]
    assert (few.float() - exact).norm() < 0.02 * exact.norm()


def test_what_does_not_fit_registers_goes_the_other_way() -> None:
    device = torch.device("cpu")
    for kind, inputs, rows in (
        ("BF16", 512, 1),
        ("BF16", 1024, 17),
        ("BF16", 4096, 3),
        ("BF16", 3072, 9),
        ("BF16", 8192, 1),
        ("Q8_0", 1024, 1),
    ):
        assert few_of(stacked([random_weight(kind, 16, inputs)], device)[0], rows, gated=False) is None
