"""Template for a new device's file: a known one's figures with every field explained."""

import json
from collections.abc import Collection, Iterator

from perfmodel.errors import SpecError
from perfmodel.files.base import as_file_name
from perfmodel.files.units import shortest_amount
from perfmodel.specs.hardware import HardwareSpec, MemoryLevel
from perfmodel.specs.networks import Link

_ON_LEVELS = """  memory:
    # The outermost level first; it needs its bandwidth, and is called hbm whatever its technology (GDDR7, LPDDR5X ...).
    #   capacity_bytes         what the vendor says ("80 GB" are 80e9 bytes, "80 GiB" 1024 x 1024 x 1024 each)
    #   visible_bytes          what a process is shown, if that is known (torch's total_memory): what KV blocks are
    #                          counted from; without it they are from the capacity
    #   bandwidth_bytes_per_s  of the outermost level: bus width in bytes x data rate. It decides how fast tokens come
    #   inline_ecc             true: check bits lie in the same memory and take a 17th of its bandwidth (L4, A10)
    #   technology             a word for the reader
    #   bus_width_bits, transfers_per_s   what the bandwidth comes from: 384 wires x 21e9 / 8 bits (GDDR6X)
    #   unified                true: an integrated GPU; device_share: of the capacity, what the system lets it have
    # Then what is known of l3, l2, sram (shared memory), tensor_memory, registers. `per: compute_unit`: capacity and
    # bandwidth are those of one unit. A bandwidth that is not known is left out.
"""
_ON_LINKS = """\
  # Bandwidth one way, per device: half of what vendors print in "bidirectional" figures. The fastest is taken between
  # devices that share a model; the other way to the host is called pcie. A topology with the word "switch" lets the
  # fabric add up sums. latency_s: one hop of a collective, with what the library does in between. A device that has
  # no siblings needs no link but pcie. peer_to_peer: false where cards cannot reach each other's memory over it.
"""
_ON_PEAKS = """\
  # Dense peaks. Vendors like to print those "with sparsity", which are twice as high: halve them. The keys are fp32,
  # tf32, fp16, bf16, fp8, fp4, int8, int4. A format that is left out has no units on this device: a model in it is
  # refused, or its weights are converted on the way, as the engine does.
"""


_LEVEL = (
    *("level", "capacity_bytes", "visible_bytes", "bandwidth_bytes_per_s", "per", "bus_width_bits"),
    *("transfers_per_s", "unified", "device_share", "technology", "inline_ecc"),
)
_LINK = ("name", "bandwidth_bytes_per_s", "direction", "latency_s", "peer_to_peer", "topology")
_UNITS = {"capacity_bytes": "B", "visible_bytes": "B", "bandwidth_bytes_per_s": "B/s"}
_UNITS |= {"transfers_per_s": "Hz", "latency_s": "s"}
_USAGE = """\
#   perfmodel hardware show ./FILE.yaml                               what was read, and the ridge points
#   perfmodel simulate llama-3.1-8b-a100 --set hardware=./FILE.yaml   how it serves"""
_PRICE = """\
# price:  # what an hour of one device costs; without it the answers have no costs
#   source: "who asks it"
#   date: 2026-01-31  # when; answers name prices that are old
#   usd_per_hour: 2.50
#   kind: on_demand  # on_demand | reserved | spot | owned
#   is_unconfirmed: false  # true: from memory, which answers mark
"""


def hardware_template(name: str, like: HardwareSpec, is_here: bool = False) -> str:
    """YAML of device `name` with the figures of `like`. Raises SpecError for an invalid file name.

    is_here: `like` is this machine's device, so its visible memory is known"""
    try:
        as_file_name(name)
    except ValueError as error:
        raise SpecError(f"hardware new {name[:60]!r}: {error}.") from None
    return "\n".join((*_about_device(name, like, is_here), *_figures(like, is_here), _PRICE))


def _about_device(name: str, like: HardwareSpec, is_here: bool) -> Iterator[str]:
    units = "A figure may have a unit: 80 GB, 3.35 TB/s, 989 TFLOPS, 1.83 GHz, 0.6 us."
    source = "REPLACE: vendor, document, year"
    if is_here:
        source = f"this machine; {like.declared.source}"
        yield f"# What this machine says of itself, and for the rest what is known of {like.name}."
        yield f"# {units}"
    else:
        before = f"A device that nobody has described yet. The figures are those of {like.name}"
        yield f"# {before}: replace each by what the"
        yield f"# vendor's datasheet says. {units}"
    yield _USAGE
    yield f"name: {name}"
    yield f"kind: {like.kind}  # gpu | cpu | tpu | npu | fpga"
    yield f"maker: {like.maker or 'somebody'}  # whose device it is, for lists"
    yield "aliases: []  # other names that scenarios and result files have for it"
    yield "declared:"
    yield f"  source: {json.dumps(source)}  # where the figures of this block are from"


def _figures(like: HardwareSpec, is_here: bool) -> Iterator[str]:
    declared = like.declared
    yield "  # Devices of one architecture (ampere, ada, hopper, blackwell, cdna3 ...) share what was fitted to the"
    yield "  # measured ones. Of one without measurements the datasheet alone decides, and the answer says so."
    yield f"  architecture: {declared.architecture or 'my-own'}"
    if declared.compile_target is not None:
        yield f"  compile_target: {declared.compile_target}  # what compilers call it; leave it out if you do not know"
    yield f"  compute_units: {declared.compute_units}  # SMs (NVIDIA), CUs (AMD), Xe cores (Intel), cores (CPU, TPU)"
    cores = declared.performance_cores
    yield f"  {'' if cores else '# '}performance_cores: {cores or 8}  # of a CPU that has small ones as well"
    yield f"  instructions: [{', '.join(declared.instructions)}]  # what code can rely on: dp4a, matrix, avx2, amx ..."
    yield f"  clock_hz: {shortest_amount(declared.clock_hz, 'Hz')}  # the one that the peaks were computed with"
    yield _ON_PEAKS.rstrip()
    yield "  peak_flops_per_s:"
    yield from (f"    {dtype}: {shortest_amount(rate, 'FLOPS')}" for dtype, rate in declared.peak_flops_per_s.items())
    vector = declared.vector_flops_per_s or declared.peak_flops_per_s.get("fp32", 0.0)
    yield f"  vector_flops_per_s: {shortest_amount(vector, 'FLOPS')}  # fp32 without tensor cores; by default peak fp32"
    yield f"  exponentials_per_clock: {declared.exponentials_per_clock:g}  # of a compute unit; for softmax"
    yield f"  sparsity_speedup: {declared.sparsity_speedup:g}  # of 2:4 sparse products; 1 where there are none"
    others = ", ".join(f"{form}: {speedup:g}" for form, speedup in declared.sparsity_speedups.items())
    yield f"  {'' if others else '# '}sparsity_speedups: {{{others or 'fp4: 1'}}}  # of formats in which it is another"
    yield _ON_LEVELS.rstrip()
    for level in declared.memory:
        always = [*(["device_share"] if level.unified else []), *(["inline_ecc"] if level.technology else [])]
        yield from _item(level, [field for field in _LEVEL if is_here or field != "visible_bytes"], always)
    yield _ON_LINKS.rstrip()
    yield "  links:" if declared.links else "  links: []"
    for link in declared.links:
        yield from _item(link, _LINK, ("direction", "latency_s"))
    if declared.tdp_w is not None:
        yield f"  tdp_w: {declared.tdp_w:g}  # of one device; without it what is usual for its kind is assumed"
    if declared.idle_w is not None:
        yield f"  idle_w: {declared.idle_w:g}"
    yield f"  max_devices: {declared.max_devices}  # that the fastest link joins: the largest tensor parallel group"
    yield "  # mig: {3g.40gb: {compute_units: 60, memory_slices: 4}}  # slices by profile, memory in eighths"
    yield "  # Paths of figures that no document of the vendor says: recalled, derived or guessed. Reports list them."
    yield f"  unconfirmed: [{', '.join(declared.unconfirmed) if is_here else 'idle_w'}]"


def _item(item: MemoryLevel | Link, fields: Collection[str], always: Collection[str]) -> Iterator[str]:
    """YAML lines of an item: non-default `fields`, and `always` ones."""
    dash = "- "
    for field in fields:
        value = getattr(item, field)
        if field not in always and value == type(item).model_fields[field].default:
            continue
        if field in _UNITS:
            value = shortest_amount(value, _UNITS[field])
        elif isinstance(value, bool):
            value = str(value).lower()
        yield f"    {dash}{field}: {f'{value:g}' if isinstance(value, float) else value}"
        dash = "  "
