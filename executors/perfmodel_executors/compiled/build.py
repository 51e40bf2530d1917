"""Compile a recorded launch for a GPU that need not be there. The signature is what Triton derives from the arguments:
pointers by their element type, integers as i32 or i64, `None` and integers equal to 1 as constants; pointers and
integers divisible by 16 are declared as such, without which it neither vectorises nor pipelines."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.specs.hardware import HardwareSpec
from perfmodel_executors.compiled.binary import BinaryFacts, Occupancy, occupancy, read_binary, shared_limit_bytes
from perfmodel_executors.kernels.dispatch import check_capability, load_kernels
from perfmodel_executors.kernels.launch import Launch, kernel_error, recording
from perfmodel_executors.kernels.problem import Inputs, Problem
from perfmodel_executors.kernels.tiles import DeviceLimits, targeting

_POINTERS = {
    **{torch.bool: "*i1", torch.uint8: "*u8"},
    **{torch.int8: "*i8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64"},
    **{torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"},
    **{torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5"},
}


@dataclass(frozen=True)
class CompiledKernel:
    launch: Launch
    facts: BinaryFacts
    occupancy: Occupancy


def compile_launch(launch: Launch, hardware: HardwareSpec) -> CompiledKernel:
    """The launch's kernel, compiled for `hardware`. Raises SpecError for a device that Triton kernels are not built
    for, or whose SRAM cannot hold the kernel's tiles; KernelError for a kernel that does not compile."""
    capability = compute_capability(hardware)
    from triton import compile as compile_source
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    signature, constants, attributes = _specialise(launch)
    try:
        source = (GluonASTSource if launch.kernel.is_gluon() else ASTSource)(
            fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes
        )
        built = compile_source(source, target=GPUTarget("cuda", capability, 32), options=asdict(launch.options))
    except Exception as error:
        raise kernel_error(launch.name, hardware.name, launch.constants, error) from error
    shared = int(built.metadata.shared)
    limit = shared_limit_bytes(hardware)
    if shared > limit:
        raise SpecError(
            f"{launch.name} with {launch.constants}, {launch.options.num_stages} stages needs {shared} bytes of shared "
            f"memory a block; {hardware.name} has {limit}. Take a smaller tile or fewer stages."
        )
    tensor_memory = int(getattr(built.metadata, "tmem_size", 0) or 0)
    facts = read_binary(built.asm["cubin"], built.asm["ptx"], shared, tensor_memory)
    return CompiledKernel(launch, facts, occupancy(hardware, launch.options.num_warps, facts.registers, shared))


def device_limits(hardware: HardwareSpec) -> DeviceLimits:
    return DeviceLimits(hardware.name, compute_capability(hardware), shared_limit_bytes(hardware))


def compile_problem(problem: Problem, hardware: HardwareSpec) -> list[CompiledKernel]:
    """The distinct kernels that the operator's Triton implementation launches for `problem` on `hardware`."""
    operator = getattr(load_kernels("triton"), problem.operator)
    with targeting(device_limits(hardware)), recording() as launches:
        operator(*problem.make(Inputs("meta")))
    distinct = {(launch.name, str(launch.constants), launch.options): launch for launch in launches}
    return [compile_launch(launch, hardware) for launch in distinct.values()]


def compute_capability(hardware: HardwareSpec) -> int:
    """80 for sm_80; raises SpecError for what is no CUDA device, or one without the tensor cores Triton uses."""
    target = hardware.declared.compile_target or ""
    number = target.removeprefix("sm_")
    if not target.startswith("sm_") or not number.isdigit():
        raise SpecError(
            f"{hardware.name}: Triton kernels are built for CUDA devices (compile_target sm_80 and newer), not for "
            f"{target or hardware.kind}; use the torch kernels."
        )
    check_capability(hardware.name, int(number))
    return int(number)


def _specialise(launch: Launch) -> tuple[dict[str, str], dict[tuple[int, ...], Any], dict[tuple[int, ...], Any]]:
    names = list(launch.kernel.arg_names)
    values = dict(zip(names, launch.args, strict=False)) | launch.constants
    if missing := [name for name in names if name not in values]:
        raise PerfmodelError(f"{launch.name} was launched without {', '.join(missing)}.")
    signature, constants, attributes = dict[str, str](), dict[tuple[int, ...], Any](), dict[tuple[int, ...], Any]()
    unspecialised = {p.name for p in launch.kernel.params if p.do_not_specialize}
    for index, name in enumerate(names):
        value = values[name]
        if name in unspecialised:
            signature[name] = _integer(value)
            continue
        kind = "constexpr" if name in launch.constants else _kind(value)
        signature[name] = kind
        if kind == "constexpr":
            constants[(index,)] = value
        elif kind.startswith("*") or (isinstance(value, int) and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def _integer(value: int) -> str:
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if value is None or (isinstance(value, int) and value == 1):
        return "constexpr"
    if isinstance(value, int):
        return _integer(value)
    if isinstance(value, float):
        return "fp32"
    raise PerfmodelError(f"a kernel argument of type {type(value).__name__} has no type on the device: {value!r}.")
