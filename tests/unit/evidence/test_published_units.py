"""Units of published figures, as their authors write them."""

import pytest

from perfmodel.evidence.kinds.published_block import factor_of_unit


@pytest.mark.parametrize(
    ("unit", "dimension", "factor"),
    [
        ("B", "bytes", 1),
        ("kB", "bytes", 1e3),
        ("KiB", "bytes", 1024),
        ("MB", "bytes", 1e6),
        ("MiB", "bytes", 1024**2),
        ("GiB", "bytes", 1024**3),
        ("TiB", "bytes", 1024**4),
        ("TB", "GB", 1e3),
        ("GiB", "GB", 1.073741824),
        ("TB/s", "GB/s", 1e3),
        ("KB/token", "bytes", 1e3),
        ("MB/token", "bytes", 1e6),
        ("s", "ms", 1e3),
        ("min", "s", 60),
        ("h", "s", 3600),
        ("ms", "us", 1e3),
        ("ns", "us", 1e-3),
        ("PFLOP/s", "TFLOP/s", 1e3),
        ("GFLOPS", "TFLOP/s", 1e-3),
        ("ktok/s", "tokens/s", 1e3),
        ("tokens/s/GPU", "tokens/s", 1),
        ("req/min", "requests/s", 1 / 60),
        ("%", "fraction", 0.01),
        ("x (faster)", "times", 1),
        ("Wh", "J", 3600),
        ("kJ", "J", 1e3),
        ("sequences", "count", 1),
    ],
)
def test_a_unit_is_so_much_of_the_metrics_own(unit: str, dimension: str, factor: float) -> None:
    assert factor_of_unit(unit, dimension, "a metric") == pytest.approx(factor)
