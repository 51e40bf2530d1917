"""What kernels store in quantised pages is bit for bit what torch's conversion stores."""

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")
pytest.importorskip("triton", reason="Triton kernels need triton")

from perfmodel_executors.kernels import load_kernels  # noqa: E402
from perfmodel_executors.kernels.kv_pages import FP8, empty_pages  # noqa: E402

PAGE, DIM = 16, 2048


def written(values_D, dtype, backend):
    k_TKH = values_D.view(-1, 1, DIM)
    num_tokens = len(k_TKH)
    pages = empty_pages(-(-num_tokens // PAGE), PAGE, 1, (DIM, DIM), dtype)
    load_kernels(backend).rope_kv_write(k_TKH, k_TKH, k_TKH, None, pages, torch.arange(num_tokens))
    return pages


def around_every_fp8():
    """Each finite e4m3, the midpoints between neighbours (ties to even) and their neighbours in fp32; and beyond."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    values = codes[codes.isfinite()].unique()
    points = torch.cat((values, (values[1:] + values[:-1]) / 2, torch.tensor([460.0, 464.0, 1e30, -500.0, 1e-20])))
    inf = torch.full_like(points, torch.inf)
    points = torch.cat((points, torch.nextafter(points, inf), torch.nextafter(points, -inf)))
    return torch.nn.functional.pad(points, (0, -len(points) % DIM))


def test_every_fp8_and_every_tie_between_two_is_written_as_torch_does():
    ours, theirs = (written(around_every_fp8(), FP8, backend) for backend in ("triton", "torch"))
    assert torch.equal(ours.k_BSKH.view(torch.uint8), theirs.k_BSKH.view(torch.uint8))
    assert torch.equal(ours.v_BSKH.view(torch.uint8), theirs.v_BSKH.view(torch.uint8))


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_int8_and_its_scales_are_written_as_torch_does(scale):
    values = torch.randn(3 * DIM, generator=torch.Generator().manual_seed(0)) * scale
    values[:DIM] = 0
    ours, theirs = (written(values, torch.int8, backend) for backend in ("triton", "torch"))
    assert len(ours.tensors) == 4
    for one, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert torch.equal(one, other)
