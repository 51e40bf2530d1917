"""What is compiled ahead is what a launch looks for in Triton's cache."""

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")
pytest.importorskip("triton", reason="Triton kernels need triton")

from perfmodel.specs import load_hardware  # noqa: E402
from perfmodel_executors.compiled.build import device_limits  # noqa: E402
from perfmodel_executors.gpu_suite.ahead import compile_job, job_of, launches_of, prepare  # noqa: E402
from perfmodel_executors.kernels.dispatch import load_kernels  # noqa: E402
from perfmodel_executors.kernels.launch import recording  # noqa: E402
from perfmodel_executors.kernels.problem import Inputs, problems_of  # noqa: E402
from perfmodel_executors.kernels.tiles import listing, targeting  # noqa: E402

HARDWARE = load_hardware("h200-sxm")


@pytest.fixture
def compiles_for_hopper(monkeypatch):
    from triton.runtime import driver

    monkeypatch.setattr(driver, "_active", None)  # and as it was afterwards
    monkeypatch.setattr("os.nice", lambda niceness: 0)
    threads = torch.get_num_threads()
    prepare(90)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("operator", ["linear", "attention_decode", "rms_norm"])
def test_a_job_has_the_key_of_the_launch_that_it_stands_for(operator, compiles_for_hopper):
    """Tensors become dtypes, integers what Triton tells apart: the binary is the same."""
    problem = problems_of(operator)[0]
    with targeting(device_limits(HARDWARE)), recording() as launches, torch.inference_mode():
        getattr(load_kernels("triton"), operator)(*problem.make(Inputs("meta")))
    for launch in launches:
        options = {"num_warps": launch.options.num_warps, "num_stages": launch.options.num_stages}
        built = launch.kernel.run(*launch.args, grid=launch.grid, warmup=True, **launch.constants, **options)
        launch.kernel.device_caches.clear()  # of the process: what is on disk has to be found
        assert compile_job(job_of(launch)) == built.hash


def test_the_number_of_tokens_makes_no_other_kernel():
    """One token, five and sixteen: within a serving run, each would be compiled in the middle of a step."""
    kernels = load_kernels("triton")
    with targeting(device_limits(HARDWARE)), torch.inference_mode():
        found = []
        for tokens in (1, 5, 16):
            with recording() as launches:
                kernels.linear(*(torch.empty(n, 4096, dtype=torch.bfloat16, device="meta") for n in (tokens, 4096)))
            found.append(job_of(launches[0]))
    assert found[0] == found[1] == found[2]


def test_every_candidate_is_listed():
    problem = problems_of("linear")[0]
    with targeting(device_limits(HARDWARE)), recording() as launches, listing():
        load_kernels("triton").linear(*problem.make(Inputs("meta")))
    assert len({str(launch.constants) + str(launch.options) for launch in launches}) > 4


@pytest.mark.parametrize("part", ["smoke", "kernels", "steps", "serving", "pairs"])
def test_all_parts_of_the_suite_are_recorded(part):
    """Each has hundreds; a part that cannot be recorded would be compiled while it is measured."""
    names = {job.kernel for job in map(job_of, launches_of(part, HARDWARE))}
    assert {"_swapped_product_kernel", "_many_tokens_kernel", "_attention_decode_kernel"} <= names
    assert ("_up_kernel" in names) is (part != "pairs")  # which have no experts
